"""Sources become one corpus file: rows stream through all cores and are written as they come.

Memory holds a few chunks of rows at a time, whatever the size of the files.
"""

import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from dflash_mp.config import DataConfig, UserError, require
from dflash_mp.data.conversations import UNREADABLE, parse_line, read_row, row_names
from dflash_mp.data.documents import ARRAYS, Corpus, join_arrays, load_corpus
from dflash_mp.data.sources import Dropped, RawRow, Source, count_rows, read_rows
from dflash_mp.data.summary import Tally
from dflash_mp.data.template import ChatFormat
from dflash_mp.data.tokenize import Document, Tokenised, tokenise
from dflash_mp.progress import progress_bar

log = logging.getLogger(__name__)

ROWS_PER_CHUNK = 256
MOST_WORKERS = 32
"""One process reads for all of them and cannot feed more."""

ROWS_FOR_MANY_CORES = 4 * ROWS_PER_CHUNK
TEMPLATE_REASONS = (
    *("template_error", "not_serving_faithful", "no_supervised_tokens", "all_supervised"),
)
"""Reasons that speak against the template when they meet more rows than are trained on."""


@dataclass
class Chunk:
    """Outcome of a run of rows of one source."""

    tally: Tally
    documents: list[Document]
    rows: list[int]
    """Index within the chunk of the row that each document comes from."""


def process_row(chat: ChatFormat, data: DataConfig, raw: RawRow) -> Tokenised | Dropped:
    """One raw row all the way to its documents, or the reason why not. Raises nothing."""
    try:
        row = read_row(parse_line(raw), row_names(data))
        tokenised = tokenise(chat, data, row)
    except Dropped as dropped:
        return dropped
    return tokenised


def process_rows(chat: ChatFormat, data: DataConfig, raws: list[RawRow]) -> Chunk:
    """A run of rows, counted."""
    chunk = Chunk(Tally(), [], [])
    for index, raw in enumerate(raws):
        outcome = process_row(chat, data, raw)
        chunk.tally.add(raw.where, outcome)
        if isinstance(outcome, Tokenised):
            chunk.documents += outcome.documents
            chunk.rows += [index] * len(outcome.documents)
    return chunk


def ingest(
    key: str, sources: list[Source], chat: ChatFormat, data: DataConfig, path: Path
) -> tuple[Corpus, Tally]:
    """Tokenise ``sources`` into the corpus file ``path``.

    Raises ``UserError`` when too many lines are unreadable, when most rows fail in the template,
    or when nothing is left to train on; ``key`` is the configuration key to name.
    """
    tally = Tally()
    raw_files = {name: path.with_name(f"{path.name}.{name}") for name in ARRAYS}
    files = {name: raw_files[name].open("wb") for name in ARRAYS}
    try:
        np.zeros(1, ARRAYS["offsets"]).tofile(files["offsets"])
        end = 0
        for number, chunk in _chunks(key, sources, chat, data):
            if chunk.documents:
                lengths = np.array([len(d.input_ids) for d in chunk.documents])
                columns = {
                    "input_ids": np.concatenate([d.input_ids for d in chunk.documents]),
                    "loss_mask": np.concatenate([d.loss_mask for d in chunk.documents]),
                    "offsets": end + np.cumsum(lengths),
                    "sources": np.full(len(lengths), number),
                    "rows": tally.rows_read + np.array(chunk.rows),
                }
                for name, column in columns.items():
                    column.astype(ARRAYS[name]).tofile(files[name])
                end += int(lengths.sum())
            tally.merge(chunk.tally)
    finally:
        for file in files.values():
            file.close()
    _refuse_bad(key, sources, chat, data, tally)
    join_arrays(raw_files, tuple(source.weight for source in sources), path)
    for raw in raw_files.values():
        raw.unlink()
    return load_corpus(path), tally


def _refuse_bad(
    key: str, sources: list[Source], chat: ChatFormat, data: DataConfig, tally: Tally
) -> None:
    names = ", ".join(source.name for source in sources)
    bad = sum(tally.dropped[reason] for reason in UNREADABLE)
    require(
        bad <= data.max_bad_fraction * tally.rows_read,
        f"{key}={names}: {bad} of {tally.rows_read} lines are unreadable, more than "
        f"data.max_bad_fraction={data.max_bad_fraction} allows: {tally.reasons()}",
    )
    if tally.trained == 0:
        what = tally.reasons() or "the files hold no rows"
        raise UserError(
            f"{key}={names}: none of {tally.rows_read} rows can be trained on with {chat.name}: "
            f"{what}"
        )
    failed = sum(tally.dropped[reason] for reason in TEMPLATE_REASONS)
    require(
        failed <= tally.trained,
        f"{key}={names}: {failed} of {tally.rows_read} rows fail with {chat.name}: "
        f"{tally.reasons()}",
    )


def _chunks(
    key: str, sources: list[Source], chat: ChatFormat, data: DataConfig
) -> Iterator[tuple[int, Chunk]]:
    """Source number and outcome of each run of rows, in order."""
    raws = _raw_chunks(sources)
    head = list(islice(raws, ROWS_FOR_MANY_CORES // ROWS_PER_CHUNK))
    more = next(raws, None)
    progress = progress_bar(
        desc=f"tokenising {key}", total=count_rows(sources), unit="row", delay=1, leave=False
    )
    with progress:
        if more is None:
            for number, rows in head:
                yield number, process_rows(chat, data, rows)
                progress.update(len(rows))
            return
        waiting = iter([*head, more])
        for number, chunk in _on_all_cores(waiting, raws, chat, data):
            yield number, chunk
            progress.update(chunk.tally.rows_read)


def _raw_chunks(sources: list[Source]) -> Iterator[tuple[int, list[RawRow]]]:
    for number, source in enumerate(sources):
        rows = read_rows(source)
        while chunk := list(islice(rows, ROWS_PER_CHUNK)):
            yield number, chunk


def _on_all_cores(
    head: Iterator[tuple[int, list[RawRow]]],
    tail: Iterator[tuple[int, list[RawRow]]],
    chat: ChatFormat,
    data: DataConfig,
) -> Iterator[tuple[int, Chunk]]:
    """The same as ``process_rows`` one after the other, by one process per core.

    New interpreters, not forks: the caller may hold threads and process groups. A bounded number
    of chunks is under way, so a slow writer holds up the reader.
    """
    workers = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (chat, data)) as pool:
        under_way: deque[tuple[int, Future[Chunk]]] = deque()
        for part in (head, tail):
            for number, rows in part:
                under_way.append((number, pool.submit(_work, rows)))
                if len(under_way) > 4 * workers:
                    first, future = under_way.popleft()
                    yield first, future.result()
        for first, future in under_way:
            yield first, future.result()


_worker: tuple[ChatFormat, DataConfig] | None = None


def _start_worker(chat: ChatFormat, data: DataConfig) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = (chat, data)


def _work(rows: list[RawRow]) -> Chunk:
    assert _worker is not None
    return process_rows(*_worker, rows)
