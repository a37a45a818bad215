"""What is loaded is what was stored, whole; everything else is a miss."""

import fcntl
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_mp.config import UserError
from dflash_mp.target.frame_cache import ENTRY, FrameCache, fingerprint, make_room


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
    assert cache.load(0, torch.zeros(512, dtype=torch.uint8)), "what is there is used"


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"features\.cache: cannot write"):
        FrameCache(tmp_path / "file" / "frames", 1, 512)


def test_other_facts_have_another_name() -> None:
    assert fingerprint({"layers": [1, 2]}) != fingerprint({"layers": [1, 3]})
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})


def stored(path: Path, frames: int, age: int) -> FrameCache:
    """A cache of ``frames`` frames of 8 KiB, opened ``age`` seconds ago."""
    cache = FrameCache(path, frames, 8192)
    for number in range(frames):
        cache.store(number, frame(number, 8192))
    then = path.stat().st_mtime - age
    os.utime(path, (then, then))
    return cache


def test_files_of_other_runs_go_oldest_first_until_all_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for name, age in (("a", 20), ("b", 30), ("c", 10)):
        stored(tmp_path / f"dflash_mp-{name}", 4, age).close()
    (tmp_path / "of somebody else").write_bytes(bytes(100_000))
    own = tmp_path / "dflash_mp-own"
    cache = FrameCache(own, 4, 8192)
    make_room(own, 200_000)
    assert len(list(tmp_path.iterdir())) == 5, "all fit"
    make_room(own, 80_000)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"dflash_mp-own", "dflash_mp-c", "of somebody else"}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    freed = int(said[0].split(" runs, ")[1].split(" bytes")[0])
    assert "removed 2 files of other runs" in said[0]
    assert 2 * 4 * 8192 <= freed < 2.5 * 4 * 8192
    cache.store(0, frame(0, 8192))
    assert cache.load(0, torch.zeros(8192, dtype=torch.uint8))


def test_opening_makes_a_file_young(tmp_path: Path) -> None:
    for name, age in (("a", 20), ("b", 10)):
        stored(tmp_path / f"dflash_mp-{name}", 4, age).close()
    FrameCache(tmp_path / "dflash_mp-a", 4, 8192).close()
    own = tmp_path / "dflash_mp-own"
    FrameCache(own, 4, 8192)
    make_room(own, 80_000)
    assert {path.name for path in tmp_path.iterdir()} == {"dflash_mp-own", "dflash_mp-a"}


def test_a_file_that_another_process_has_open_stays(tmp_path: Path) -> None:
    used, own = tmp_path / "dflash_mp-used", tmp_path / "dflash_mp-own"
    code = f"""
        from pathlib import Path
        from dflash_mp.target.frame_cache import FrameCache
        cache = FrameCache(Path({str(used)!r}), 4, 8192)
        print("open", flush=True)
        input()
        """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin
    assert other.stdout
    try:
        assert other.stdout.readline() == b"open\n"
        stored(used, 4, 10).close()
        FrameCache(own, 4, 8192)
        make_room(own, 0)
        assert used.exists()
    finally:
        other.communicate(b"\n")
    make_room(own, 0)
    assert not used.exists()
    assert own.exists()


def test_a_file_removed_while_it_is_opened_is_made_anew(tmp_path: Path) -> None:
    path, opened = tmp_path / "dflash_mp-own", threading.Event()
    path.touch()
    caches = []

    def open_it() -> None:
        opened.set()
        caches.append(FrameCache(path, 4, 8192))

    with path.open("r+b") as removing:
        fcntl.flock(removing, fcntl.LOCK_EX)
        thread = threading.Thread(target=open_it)
        thread.start()
        opened.wait()
        time.sleep(0.2)
        path.unlink()
    thread.join()
    caches[0].store(1, frame(1, 8192))
    other, slot = FrameCache(path, 4, 8192), torch.zeros(8192, dtype=torch.uint8)
    assert other.load(1, slot)
    assert torch.equal(slot, frame(1, 8192))
