"""Joins the job as training does and measures what its ranks say to each other."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from dflash_mp.cast import DRAFTER, Cast
from dflash_mp.checkup.finding import OK, WARNING, Finding, enough
from dflash_mp.wire.edge import DRAFTER_END, Edge
from dflash_mp.wire.stream import open_edges

PAYLOAD_BYTES = 64 << 20
REPEATS = 3
SLOW_GPU_EDGE = 2e9
"""Bytes a second; shared memory and NVLink are faster, sockets are not."""
CONNECT = timedelta(seconds=30)


def measure_edges(cast: Cast) -> list[Finding]:
    """Bandwidth of each edge of this rank, one edge of the node at a time; drafters report.

    Participants: all ranks of the node.
    """
    payload = torch.zeros(PAYLOAD_BYTES, dtype=torch.uint8, device=cast.device)
    findings = []
    edges = open_edges(cast, CONNECT)
    # Ascending on both sides, so every rank takes part in one global order (target, drafter).
    for other, edge in sorted(edges.items()):
        if cast.place.role != DRAFTER:
            for _ in range(REPEATS + 1):
                edge.put(payload)
            continue
        rate = PAYLOAD_BYTES / receive(edge, payload)
        slow = cast.device.type == "cuda" and rate < SLOW_GPU_EDGE
        findings.append(
            enough(
                f"target{other} > {cast.place.name}",
                f"{backend(edge)}, {rate / 1e9:.1f} GB/s alone",
                WARNING if slow else OK,
                "NCCL may be using sockets: NCCL_DEBUG=INFO says why",
            )
        )
    for edge in edges.values():
        edge.close()
    return findings


def receive(edge: Edge, payload: torch.Tensor) -> float:
    """Seconds that one payload takes, behind a first one that is not counted."""
    assert edge.end == DRAFTER_END
    edge.land(payload)
    begin = time.perf_counter()
    for _ in range(REPEATS):
        edge.land(payload)
    return (time.perf_counter() - begin) / REPEATS


def backend(edge: Edge) -> str:
    """What carries the edge."""
    return "nccl" if edge.stream is not None else "gloo"


def measure_role(cast: Cast) -> list[Finding]:
    """Time of one all-reduce over the drafters, which share their gradients that way.

    Participants: all drafters; the targets have nothing to reduce.
    """
    place = cast.place
    if place.role != DRAFTER or place.drafters == 1:
        return []
    gradients = torch.zeros(PAYLOAD_BYTES // 4, device=cast.device)
    dist.all_reduce(gradients)
    _synchronize(cast.device)
    begin = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(gradients)
    _synchronize(cast.device)
    seconds = (time.perf_counter() - begin) / REPEATS
    if not place.is_main:
        return []
    found = f"64 MiB over {place.drafters} drafters in {seconds * 1e3:.1f} ms"
    return [Finding(OK, "all-reduce", found)]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
