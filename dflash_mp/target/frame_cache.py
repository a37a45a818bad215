"""Frames kept from the first epoch on, so that later epochs do not run the target.

One file holds every frame of the training set at a place of its own, behind an index of eight
bytes a frame. All targets of a node read and write it, whoever made a frame; a frame is the same
bytes whoever makes it, so two writers do no harm. In memory (``ram``) the file lies in a memory
file system and is unlinked as soon as all targets have opened it: nothing is left behind by a
crash. On disk (``disk``) it stays for later runs with the same fingerprint, until a run of another
needs its space. Whoever has a file open holds a shared lock on it.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_mp.config import UserError
from dflash_mp.warn_once import warn_once

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
"""Where a file is memory, on Linux."""
ENTRY = 8
"""Index bytes of a frame: four of a mark, four of the checksum; zeros until it is written."""
MARK = b"dfmp"
PREFIX = "dflash_mp-"
"""Of the names of all files."""
FULL_ADVICE = (
    "what is not kept is captured anew in every epoch: make room, or lower features.cache_gb to "
    "what is there"
)


class FrameCache:
    """A file of ``capacity`` frames; frames beyond it are not kept.

    Args:
        path: the file, made if it is not there.
        capacity: frames that fit.
        nbytes: size of a frame.

    Raises:
        UserError: the file cannot be made.
    """

    def __init__(self, path: Path, capacity: int, nbytes: int) -> None:
        self.capacity, self.nbytes = capacity, nbytes
        self._first = capacity * ENTRY
        self.hits = self.misses = 0
        self._full = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_locked(path)
            # Sparse: only what is written takes space.
            os.ftruncate(self._file, capacity * (ENTRY + nbytes))
            # Reading leaves no date.
            os.utime(self._file)
        except OSError as error:
            raise UserError(
                f"features.cache: cannot write {path}: {error.strerror}; use features.cache=off "
                "or point data.cache_dir elsewhere"
            ) from None

    def load(self, number: int, slot: Tensor) -> bool:
        """Copy frame ``number`` into ``slot`` (``[nbytes]`` uint8) if it is there and whole."""
        if number < self.capacity:
            entry = os.pread(self._file, ENTRY, number * ENTRY)
            if entry[:4] == MARK:
                buffer = slot if slot.device.type == "cpu" else torch.empty_like(slot, device="cpu")
                self._read(buffer, self._place(number))
                if checksum(buffer) == entry[4:]:
                    slot.copy_(buffer)
                    self.hits += 1
                    return True
        self.misses += 1
        return False

    def store(self, number: int, slot: Tensor) -> None:
        """Keep ``slot`` as frame ``number``; the index is written last. Stops when space ends."""
        if self._full or number >= self.capacity:
            return
        buffer = slot.cpu()
        try:
            self._write(buffer.numpy().data, self._place(number))
            self._write(memoryview(MARK + checksum(buffer)), number * ENTRY)
        except OSError as error:
            # A frame that is not kept is only captured again.
            warn_once(log, f"features.cache: {error.strerror} at frame {number}", FULL_ADVICE)
            self._full = True

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    def _read(self, buffer: Tensor, place: int) -> None:
        """Fill ``buffer``, of which a call reads less than 2 GiB, as far as the file goes."""
        rest = buffer.numpy().data
        while rest and (count := os.preadv(self._file, [rest], place)):
            rest, place = rest[count:], place + count

    def _write(self, rest: memoryview, place: int) -> None:
        """Write all of ``rest``: where space ends, a call writes what fits, and the next fails."""
        while rest:
            count = os.pwrite(self._file, rest, place)
            rest, place = rest[count:], place + count

    def _place(self, number: int) -> int:
        return self._first + number * self.nbytes


def open_locked(path: Path) -> int:
    """Open or make a file, under a shared lock where the file system has locks."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH)
        if is_at(path, file):
            return file
        # Removed before it was locked.
        os.close(file)


def is_at(path: Path, file: int) -> bool:
    """Whether ``path`` is still the name of an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def make_room(path: Path, limit: int) -> None:
    """Remove files beside ``path``, opened longest ago first, until all take ``limit`` bytes.

    ``path`` counts with the size it may grow to, the others with what they take. Files that a run
    has open stay, and so do all where the file system has no locks.
    """
    others = []
    for other in path.parent.glob(f"{PREFIX}*"):
        # Another node may be removing it.
        with contextlib.suppress(FileNotFoundError):
            others += [(other.stat(), other)] if other != path else []
    total = path.stat().st_size + sum(stat.st_blocks * 512 for stat, _ in others)
    removed: list[int] = []
    for stat, other in sorted(others, key=lambda pair: pair[0].st_mtime_ns):
        if total <= limit:
            break
        if remove_unused(other):
            removed.append(stat.st_blocks * 512)
        # Another node may have removed it meanwhile.
        if not other.exists():
            total -= stat.st_blocks * 512
    if removed:
        log.info(
            "features.cache: removed %d files of other runs, %d bytes, from %s",
            *(len(removed), sum(removed), path.parent),
        )


def remove_unused(path: Path) -> bool:
    """Remove a file unless somebody has it open; returns whether this call did."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(path, file.fileno()):
            path.unlink()
            return True
    return False


def checksum(buffer: Tensor) -> bytes:
    """CRC-32 of a CPU buffer, four bytes."""
    return zlib.crc32(buffer.numpy().data).to_bytes(4, "little")


def fingerprint(facts: dict[str, Any]) -> str:
    """Name of the cache of everything in ``facts`` (JSON values): other facts, other file."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]
