"""Shared memory between a target and a drafter: who owns a slot, and what is left of it."""

import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dflash_mp.config import UserError
from dflash_mp.wire.connect import choose_edge
from dflash_mp.wire.frame import FrameError
from dflash_mp.wire.shared_edge import EdgeError, SharedEdge, SharedMemory
from launch.spawn import host_store

SLOT = 4096
TIMEOUT = timedelta(seconds=5)
Pair = tuple[SharedEdge, SharedEdge]


@pytest.fixture
def pair() -> Pair:
    """Both ends of an edge, target first; the drafter has two slots."""
    store = dist.HashStore()
    drafter = SharedEdge("edge", store, SharedMemory(2 * SLOT), TIMEOUT)
    target = SharedEdge("edge", store, None, TIMEOUT)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(SharedEdge.warm, (target, drafter)))
    return target, drafter


def filled(value: int, size: int = SLOT) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_a_target_writes_only_into_the_slot_that_it_was_offered(pair: Pair) -> None:
    target, drafter = pair
    one, other = drafter.buffers(SLOT, 2)
    other.fill_(7)
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(target.put, filled(1))
        time.sleep(0.1)
        # Nothing was offered yet: both slots are the drafter's.
        assert not put.done()
        assert not one.any()
        drafter.land(one)
        put.result()
    assert (one == 1).all()
    assert (other == 7).all()


def test_a_sent_buffer_may_be_written_again(pair: Pair) -> None:
    target, drafter = pair
    payload, slots = filled(0), drafter.buffers(SLOT, 2)
    with ThreadPoolExecutor(1) as pool:

        def send_all() -> None:
            for value in range(50):
                payload.fill_(value)
                target.put(payload)
                payload.fill_(255)

        sent = pool.submit(send_all)
        for value in range(50):
            drafter.land(slots[value % 2])
            assert (slots[value % 2] == value).all()
        sent.result()


def test_a_frame_of_another_size_is_refused(pair: Pair) -> None:
    target, drafter = pair
    with ThreadPoolExecutor(1) as pool:
        landed = pool.submit(drafter.land, drafter.buffers(SLOT, 1)[0])
        with pytest.raises(FrameError, match=r"has 8 bytes, but the drafter wants 4096"):
            target.put(filled(1, 8))
        target.close()
        with pytest.raises(EdgeError, match="the other end is closed"):
            landed.result()
    with pytest.raises(ValueError, match="not a buffer of this edge"):
        drafter.land(filled(0))


SURVIVOR = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from dflash_mp.wire.shared_edge import EdgeError, SharedEdge, SharedMemory

port, role = sys.argv[1:]
store = dist.TCPStore("127.0.0.1", int(port))
memory = SharedMemory(2 * 4096) if role == "drafter" else None
edge = SharedEdge("edge", store, memory, timedelta(seconds=60))
edge.warm()
payload = edge.buffers(4096, 1)[0]
store.set(role, "")
try:
    while True:
        (edge.put if memory is None else edge.land)(payload)
        store.add("frames", 1)
except EdgeError as error:
    sys.exit(f"EdgeError: {error}")
"""


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.mark.distributed
@pytest.mark.parametrize("killed", ["target", "drafter"])
def test_a_killed_end_frees_the_other_one_and_leaves_nothing(killed: str) -> None:
    # Not a file: the killed process may leave an unfinished entry, and who reads it never ends.
    store = host_store()
    before = shared_files()
    ends = {
        role: subprocess.Popen(
            [sys.executable, "-c", SURVIVOR, str(store.port), role],
            stderr=subprocess.PIPE,
            text=True,
        )
        for role in ("target", "drafter")
    }
    deadline = time.monotonic() + 60
    while store.add("frames", 0) < 100:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ends[killed].send_signal(signal.SIGKILL)
    ends.pop(killed).communicate(timeout=20)
    (survivor,) = ends.values()
    # Long before the timeout of the edge.
    said = survivor.communicate(timeout=20)[1]
    assert survivor.returncode == 1
    assert "EdgeError: edge: " in said
    assert shared_files() <= before


def test_memory_that_is_not_there_is_refused_before_it_is_written() -> None:
    """A limit on files stands for a full memory; without a reservation it would be a SIGBUS."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    descriptors = set(Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (SLOT, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            SharedMemory(2 * SLOT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert set(Path("/proc/self/fd").iterdir()) <= descriptors


def test_auto_is_the_fastest_edge_that_works() -> None:
    assert choose_edge("auto", on_gpu=False) == "shm"
    assert choose_edge("auto", on_gpu=True) == "nccl"


@pytest.mark.parametrize(
    ("asked", "on_gpu", "words"),
    [
        ("nccl", False, "wire.edge=nccl is for GPU ranks, but this job's are CPU ranks"),
        ("gloo", True, "wire.edge=gloo is for CPU ranks, but this job's are GPU ranks"),
        ("shm", True, "wire.edge=shm is for CPU ranks, but this job's are GPU ranks"),
    ],
)
def test_an_edge_that_cannot_be_is_refused(asked: str, on_gpu: bool, words: str) -> None:
    with pytest.raises(UserError, match=words):
        choose_edge(asked, on_gpu)
