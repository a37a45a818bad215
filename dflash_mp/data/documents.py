"""All tokenised documents of one set, as flat arrays that lie in a file and are mapped, not read.

The file is a safetensors file. It is written piece by piece and read through the page cache, so
neither side ever holds it in memory.
"""

import json
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DTYPES: dict[str, np.dtype[Any]] = {
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
    "I64": np.dtype("<i8"),
}
NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Corpus:
    """``N`` tokens of ``D`` documents, one after the other."""

    input_ids: np.ndarray
    """``[N]`` int32."""

    loss_mask: np.ndarray
    """``[N]`` uint8; 1 where supervised."""

    offsets: np.ndarray
    """``[D + 1]`` int64; document ``i`` is ``offsets[i]:offsets[i + 1]``."""

    sources: np.ndarray
    """``[D]`` int32; number of the configured source that each document comes from."""

    rows: np.ndarray
    """``[D]`` int64; number of the row, counting from 0 over all sources in order. A row whose
    turns had to be separated has several documents."""

    source_weights: tuple[float, ...] = (1.0,)
    """Times that a document of each source is seen per epoch."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """``[D]`` int64 tokens of each document."""
        return np.diff(self.offsets)

    @property
    def weights(self) -> np.ndarray | None:
        """``[D]`` float64 times each document is seen per epoch; None when all are seen once."""
        if all(weight == 1 for weight in self.source_weights):
            return None
        return np.array(self.source_weights)[self.sources]

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """``[n]`` int32 ids and ``[n]`` uint8 mask of one document."""
        span = slice(self.offsets[index], self.offsets[index + 1])
        return self.input_ids[span], self.loss_mask[span]

    def prompt(self, index: int) -> np.ndarray:
        """``[n]`` int32 ids in front of the first supervised token."""
        ids, mask = self.document(index)
        return ids[: int(np.argmax(mask))]

    def response(self, index: int) -> np.ndarray:
        """``[n]`` int32 supervised ids."""
        ids, mask = self.document(index)
        return ids[mask.astype(bool)]


ARRAYS: dict[str, np.dtype[Any]] = {
    "input_ids": np.dtype("<i4"),
    "loss_mask": np.dtype("u1"),
    "offsets": np.dtype("<i8"),
    "sources": np.dtype("<i4"),
    "rows": np.dtype("<i8"),
}


def empty_corpus() -> Corpus:
    """No documents."""
    none = {name: np.zeros(0, dtype) for name, dtype in ARRAYS.items()}
    return Corpus(**{**none, "offsets": np.zeros(1, ARRAYS["offsets"])}, source_weights=(1.0,))


def select(corpus: Corpus, kept: np.ndarray) -> Corpus:
    """The documents where ``kept`` (``[D]`` bool) is true, in memory."""
    tokens = np.repeat(kept, corpus.lengths)
    lengths = corpus.lengths[kept]
    return Corpus(
        corpus.input_ids[tokens],
        corpus.loss_mask[tokens],
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        corpus.sources[kept],
        corpus.rows[kept],
        corpus.source_weights,
    )


def save_corpus(corpus: Corpus, path: Path) -> None:
    """Write a corpus that is in memory as a safetensors file."""
    arrays = {name: np.ascontiguousarray(getattr(corpus, name), ARRAYS[name]) for name in ARRAYS}
    shapes = {name: (array.dtype, len(array)) for name, array in arrays.items()}
    with path.open("wb") as file:
        file.write(_header(shapes, corpus.source_weights))
        for array in arrays.values():
            file.write(array.tobytes())


def join_arrays(files: Mapping[str, Path], weights: tuple[float, ...], path: Path) -> None:
    """Make a corpus file of raw little-endian arrays that lie in ``files``, one per field."""
    shapes = {
        name: (dtype, files[name].stat().st_size // dtype.itemsize)
        for name, dtype in ARRAYS.items()
    }
    with path.open("wb") as file:
        file.write(_header(shapes, weights))
        for name in ARRAYS:
            with files[name].open("rb") as array:
                shutil.copyfileobj(array, file, 1 << 20)


def _header(shapes: Mapping[str, tuple[np.dtype[Any], int]], weights: tuple[float, ...]) -> bytes:
    """The safetensors header: its length as 8 bytes, then JSON, padded to 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"source_weights": json.dumps(weights)}}
    at = 0
    for name, (dtype, count) in shapes.items():
        end = at + dtype.itemsize * count
        entries[name] = {"dtype": NAMES[dtype], "shape": [count], "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def load_corpus(path: Path) -> Corpus:
    """Map a corpus file into memory; its pages are read when they are used."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entries = json.loads(file.read(length))
    weights = tuple(json.loads(entries.pop("__metadata__")["source_weights"]))
    arrays = {}
    for name in ARRAYS:
        dtype, (start, end) = DTYPES[entries[name]["dtype"]], entries[name]["data_offsets"]
        count = (end - start) // dtype.itemsize
        # An empty range cannot be mapped.
        arrays[name] = (
            np.memmap(path, dtype, "r", 8 + length + start, (count,))
            if count
            else np.zeros(0, dtype)
        )
    return Corpus(**arrays, source_weights=weights)
