"""What is loaded is what was stored, whole; everything else is a miss."""

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_mp.config import UserError
from dflash_mp.target.frame_cache import ENTRY, FrameCache, fingerprint


def frame(seed: int, nbytes: int = 512) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)


def test_two_processes_share_frames_and_capacity_bounds_the_file(tmp_path: Path) -> None:
    path = tmp_path / "made" / "frames"
    one, other = FrameCache(path, 3, 512), FrameCache(path, 3, 512)
    slot = torch.zeros(512, dtype=torch.uint8)
    assert not other.load(1, slot)
    one.store(1, frame(1))
    one.store(3, frame(3))
    assert other.load(1, slot)
    assert torch.equal(slot, frame(1))
    assert not other.load(3, slot), "beyond the capacity nothing is kept"
    assert path.stat().st_size == 3 * (512 + ENTRY)
    assert (other.hits, other.misses) == (1, 2)


def test_an_unlinked_file_still_serves_those_who_opened_it(tmp_path: Path) -> None:
    path = tmp_path / "frames"
    one, other = FrameCache(path, 2, 512), FrameCache(path, 2, 512)
    path.unlink()
    one.store(0, frame(7))
    slot = torch.zeros(512, dtype=torch.uint8)
    assert other.load(0, slot)
    assert torch.equal(slot, frame(7))


def test_a_damaged_frame_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "frames"
    cache = FrameCache(path, 2, 512)
    cache.store(1, frame(1))
    with path.open("r+b") as file:
        file.seek(2 * ENTRY + 512 + 100)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert not cache.load(1, torch.zeros(512, dtype=torch.uint8))


@pytest.mark.parametrize("room", [0, 100], ids=["before a frame", "within a frame"])
def test_when_space_ends_frames_are_captured_again(
    room: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    cache = FrameCache(tmp_path / "frames", 4, 512)
    cache.store(0, frame(0))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * ENTRY + 512 + room, before[1]))
    try:
        cache.store(1, frame(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "features.cache: File too large at frame 1" in caplog.text
    assert not cache.load(1, torch.zeros(512, dtype=torch.uint8))
    cache.store(2, frame(2))
    assert not cache.load(2, torch.zeros(512, dtype=torch.uint8)), "nothing is tried again"


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"features\.cache: cannot write"):
        FrameCache(tmp_path / "file" / "frames", 1, 512)


def test_other_facts_have_another_name() -> None:
    assert fingerprint({"layers": [1, 2]}) != fingerprint({"layers": [1, 3]})
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
