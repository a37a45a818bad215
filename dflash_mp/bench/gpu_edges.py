"""Which edges two processes can use that share one GPU, and how fast these are."""

import queue
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from dflash_mp.wire.edge import DRAFTER_END, TARGET_END, Edge, GroupEdge
from dflash_mp.wire.shared_edge import SharedEdge, SharedMemory

NBYTES = 64 << 20
FRAMES = 4
TIMEOUT = timedelta(seconds=20)
ANSWER_S = 40.0
"""Time for an edge: two processes start, connect, and move the frames."""


def try_edges(device: torch.device) -> list[dict[str, Any]]:
    """A line for each kind of edge: its name, GB/s (None if it does not work), and what it said.

    gloo and shm move host memory: between GPUs a copy on either side comes on top of them, and the
    trainer does not use them there.
    """
    host = torch.device("cpu")
    found = [try_edge("gloo", host), try_edge("shm", host)]
    if device.type == "cuda":
        found.append(try_edge("nccl", device))
    return found


def try_edge(kind: str, device: torch.device) -> dict[str, Any]:
    """Two processes on ``device`` move some frames over an edge; both are gone afterwards."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = [
        context.Process(
            target=one_end, args=(kind, end, store.port, str(device), answers), daemon=True
        )
        for end in (TARGET_END, DRAFTER_END)
    ]
    for process in ends:
        process.start()
    rate, said = None, ""
    deadline = time.monotonic() + ANSWER_S
    try:
        # Both ends tell; the worse news count.
        for _ in ends:
            rate, said = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            if rate is None:
                break
    except queue.Empty:
        rate, said = None, f"one end did not answer within {ANSWER_S:g} s"
    for process in ends:
        # An end whose other one has failed may wait for it.
        process.kill()
        process.join()
    return {"name": kind, "gb_per_s": rate, "said": said}


def make_edge(kind: str, end: int, store: dist.Store, device: torch.device) -> Edge:
    """One end of an edge of this kind."""
    if kind != "shm":
        return GroupEdge(end, store, device, TIMEOUT)
    return SharedEdge(kind, store, SharedMemory(NBYTES) if end == DRAFTER_END else None, TIMEOUT)


def one_end(kind: str, end: int, port: int, device: str, answers: Any) -> None:
    """Entry point of a process: tells ``(GB/s, said)``, None for the rate if it failed."""
    place = torch.device(device)
    try:
        if place.type == "cuda":
            torch.cuda.set_device(place)
        store = dist.TCPStore("127.0.0.1", port, timeout=TIMEOUT)
        edge = make_edge(kind, end, store, place)
        edge.warm()
        payload = edge.buffers(NBYTES, 1)[0]
        move = edge.put if end == TARGET_END else edge.land
        move(payload)
        begun = time.perf_counter()
        for _ in range(FRAMES):
            move(payload)
        rate = FRAMES * NBYTES / (time.perf_counter() - begun) / 1e9
        answers.put((rate, f"{rate:.2f} GB/s"))
    except Exception as error:
        # Errors of NCCL name the reason in their last line.
        answers.put((None, (str(error).strip() or type(error).__name__).splitlines()[-1]))
    # The parent ends this process: the other end may still need it.
    time.sleep(2 * ANSWER_S)
