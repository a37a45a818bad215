"""Where conversations come from: files, folders and hub datasets, read line by line.

Nothing here looks inside a row. A line that cannot be read becomes a ``Dropped`` in the stream,
never an exception, so that one broken line costs one line.
"""

import gzip
import hashlib
import io
import json
import logging
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from dflash_mp.config import UserError, require

log = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
COMPRESSIONS = (".gz", ".zst")
SHIPPED = ("narrow", "mixed")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
CHUNK = 1 << 20


class Dropped(Exception):
    """A row that is not trained on: ``reason`` is counted, ``detail`` is shown with examples."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class RawRow(NamedTuple):
    """One row as read: where it stands, and the undecoded line, the decoded object or the error."""

    where: str
    data: bytes | dict[str, Any] | Dropped


@dataclass(frozen=True)
class Source:
    """One entry of ``data.train`` or ``data.heldout``: files, or a split of a hub dataset."""

    name: str
    weight: float
    files: tuple[Path, ...]
    split: str = "train"

    @property
    def is_hub(self) -> bool:
        return not self.files


def resolve_sources(key: str, spec: Any, part: str) -> list[Source]:
    """The sources that a configuration value names; ``part`` is ``train`` or ``eval``.

    ``spec`` is a string, a list of strings or a list of ``{path, weight, split}``. Raises
    ``UserError`` naming ``key`` for a file that is missing, a folder without data or a bad entry.
    No data is read.
    """
    if spec is None:
        return []
    entries = spec if isinstance(spec, list | tuple) else [spec]
    require(len(entries) > 0, f"{key} is an empty list: name at least one file")
    return [_resolve_entry(key, entry, part) for entry in entries]


def _resolve_entry(key: str, entry: Any, part: str) -> Source:
    fields = dict(entry) if isinstance(entry, dict) else {"path": entry}
    unknown = set(fields) - {"path", "weight", "split"}
    require(not unknown, f"{key}: unknown {sorted(unknown)} in {entry}; use path, weight, split")
    name, weight = fields.get("path"), fields.get("weight", 1)
    require(isinstance(name, str) and name != "", f"{key}: {entry} has no path")
    assert isinstance(name, str)
    require(
        isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < 1e6,
        f"{key}: weight {weight!r} of {name} must be a positive number",
    )
    split = str(fields.get("split", "train"))
    if name in SHIPPED:
        name_in_package = Path(__file__).parent / "samples" / f"{name}_{part}.jsonl"
        return Source(name, float(weight), (name_in_package,), split)
    path = Path(name).expanduser()
    if path.is_dir():
        files = tuple(sorted(f for f in path.rglob("*") if f.is_file() and _is_data(f)))
        require(len(files) > 0, f"{key}: the folder {name} holds no file ending in {SUFFIXES}")
        return Source(name, float(weight), files, split)
    if path.is_file():
        require(_is_data(path), f"{key}: {name} must end in one of {SUFFIXES}, or so plus .gz/.zst")
        return Source(name, float(weight), (path,), split)
    looks_like_file = _is_data(path) or not HUB_NAME.fullmatch(name)
    require(not looks_like_file, f"{key}: there is no file or folder {name}")
    return Source(name, float(weight), (), split)


def _is_data(path: Path) -> bool:
    """Whether a file's name says that it holds rows; hidden files are left alone."""
    return _kind(path) in SUFFIXES and not path.name.startswith(".")


def _kind(path: Path) -> str:
    return (
        Path(path.stem).suffix.lower()
        if path.suffix.lower() in COMPRESSIONS
        else (path.suffix.lower())
    )


def content_hash(source: Source) -> str:
    """SHA-256 over the source's bytes, or over the hub's own fingerprint of the dataset."""
    digest = hashlib.sha256()
    if source.is_hub:
        digest.update(_hub_fingerprint(source).encode())
    for path in source.files:
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise UserError(f"data: cannot read {path}: {error.strerror or error}") from error
    return digest.hexdigest()


def read_rows(source: Source) -> Iterator[RawRow]:
    """All rows of a source, in order. Blank lines are not rows."""
    if source.is_hub:
        yield from _read_hub(source)
    for path in source.files:
        reader = READERS.get(_kind(path), _read_lines)
        last = f"{path.name}:0"
        try:
            for raw in reader(path):
                last = raw.where
                yield raw
        except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
            # A damaged archive has no next line: what could be read has been.
            log.warning(
                "%s cannot be read beyond %s: %s; the run goes on without the rest: fetch or "
                "write the file anew",
                path,
                last,
                error,
            )
            yield RawRow(last, Dropped("damaged_file", f"unreadable from here on: {error}"))


def count_rows(sources: list[Source]) -> int | None:
    """How many rows ``read_rows`` will give, for a progress line; None where only reading tells."""
    counts = [_rows_of(path) for source in sources for path in source.files]
    known = [count for count in counts if count is not None]
    hub = any(source.is_hub for source in sources)
    return None if hub or len(known) < len(counts) else sum(known)


def _rows_of(path: Path) -> int | None:
    try:
        match _kind(path):
            case ".parquet":
                return int(pq.read_metadata(path).num_rows)
            case ".jsonl" | ".ndjson" if path.suffix.lower() not in COMPRESSIONS:
                with path.open("rb") as file:
                    return sum(1 for line in file if line.strip())
            case _:
                return None
    except (OSError, pa.ArrowException):
        # Reading the rows will say so.
        return None


def _open(path: Path) -> BinaryIO:
    match path.suffix.lower():
        case ".gz":
            return io.BufferedReader(gzip.GzipFile(path))
        case ".zst":
            return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))
        case _:
            return path.open("rb")


def _read_lines(path: Path) -> Iterator[RawRow]:
    """JSONL. A binary file splits on ``\\n`` alone: U+2028 and its kind stay inside their row."""
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield RawRow(f"{path.name}:{number}", line)


def _read_json(path: Path) -> Iterator[RawRow]:
    """A JSON array of rows, an object that holds one, or lines of JSON under the wrong name."""
    with _open(path) as file:
        first = file.readline().removeprefix(b"\xef\xbb\xbf").lstrip()
        while first == b"":
            line = file.readline()
            if line == b"":
                return
            first = line.lstrip()
    if first.startswith(b"["):
        yield from _read_array(path)
    elif _is_json(first):
        yield from _read_lines(path)
    else:
        yield from _read_object(path)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _read_object(path: Path) -> Iterator[RawRow]:
    """An object over several lines: the rows are its only list of objects, or it is one row."""
    with _open(path) as file:
        content = file.read()
    try:
        whole = json.loads(content)
    except (ValueError, RecursionError):
        # Not one document, so lines: the broken ones are counted there.
        yield from _read_lines(path)
        return
    lists = [v for v in whole.values() if isinstance(v, list) and v and isinstance(v[0], dict)]
    is_row = "messages" in whole or "conversations" in whole
    rows = lists[0] if len(lists) == 1 and not is_row else [whole]
    for index, row in enumerate(rows):
        yield RawRow(f"{path.name}[{index}]", _object(row))


def _object(row: Any) -> dict[str, Any] | Dropped:
    return row if isinstance(row, dict) else Dropped("not_an_object", type(row).__name__)


def _read_array(path: Path) -> Iterator[RawRow]:
    """The elements of a JSON array one by one, so that a cut file loses only what is cut."""
    decoder = json.JSONDecoder()
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig", errors="surrogateescape") as file:
        buffer, at, line = file.read(CHUNK), 0, 1
        at = buffer.index("[") + 1
        line += buffer.count("\n", 0, at)
        while True:
            gap = re.compile(r"[\s,]*").match(buffer, at)
            assert gap is not None
            line += buffer.count("\n", at, gap.end())
            at = gap.end()
            if buffer[at : at + 1] == "]":
                return
            try:
                if at == len(buffer):
                    raise ValueError("the array is not closed")
                row, end = decoder.raw_decode(buffer, at)
                if end == len(buffer):
                    raise ValueError("a number may go on")
            except (ValueError, RecursionError) as error:
                # Perhaps the element only ends beyond the buffer; reading as much again each
                # time keeps the work linear.
                more = file.read(max(CHUNK, len(buffer) - at))
                if more == "":
                    cause = f"unreadable from here on: {error}"
                    yield RawRow(f"{path.name}:{line}", Dropped("bad_json", cause))
                    return
                buffer, at = buffer[at:] + more, 0
                continue
            yield RawRow(f"{path.name}:{line}", _object(row))
            line += buffer.count("\n", at, end)
            at = end


def _read_parquet(path: Path) -> Iterator[RawRow]:
    number = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield RawRow(f"{path.name}:{number}", _without_nulls(row))


def _without_nulls(value: Any) -> Any:
    """``value`` less what Arrow adds: every object of a column gets the keys of all of them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


READERS = {".parquet": _read_parquet, ".json": _read_json}


def _hub_fingerprint(source: Source) -> str:
    import datasets

    try:
        return str(datasets.load_dataset_builder(source.name).hash) + source.split
    except Exception as error:
        raise UserError(_hub_problem(source, error)) from error


def _read_hub(source: Source) -> Iterator[RawRow]:
    import datasets

    try:
        rows = datasets.load_dataset(source.name, split=source.split, streaming=True)
        for number, row in enumerate(rows, start=1):
            yield RawRow(f"{source.name}:{number}", _object(_without_nulls(row)))
    except Exception as error:
        # Whatever the library and the network may raise.
        raise UserError(_hub_problem(source, error)) from error


def _hub_problem(source: Source, error: Exception) -> str:
    cause = (str(error) or type(error).__name__).splitlines()[0]
    return (
        f"data: {source.name} is no file here and could not be read from the hub "
        f"(split {source.split}): {cause}"
    )
