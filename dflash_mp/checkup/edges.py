"""Joins the job as training does and measures what its ranks say to each other."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from dflash_mp.cast import DRAFTER, TARGET, Cast
from dflash_mp.checkup.finding import OK, WARNING, Finding, enough
from dflash_mp.wire.connect import node_edges, open_edges
from dflash_mp.wire.edge import Edge

GB = 1e9
PAYLOAD_BYTES = 64 << 20
REPEATS = 3
SLOW_GPU_EDGE = 2e9
"""Bytes a second; shared memory and NVLink are faster, sockets are not."""
CONNECT = timedelta(seconds=30)


def measure_edges(cast: Cast, asked: str) -> list[Finding]:
    """Bandwidth of each edge of this rank, one edge of the node at a time; drafters report.

    Participants: all ranks of the node.

    Args:
        cast: this rank.
        asked: ``wire.edge``.
    """
    findings, before = [], ""
    edges = open_edges(cast, asked, PAYLOAD_BYTES, CONNECT)
    for target, drafter in node_edges(cast.place):
        key = f"measured/{target}-{drafter}"
        is_target = cast.place.role == TARGET
        if cast.place.role_rank == (target if is_target else drafter):
            if before:
                cast.store.wait([before], CONNECT * len(edges))
            if is_target:
                send(edges[drafter])
            else:
                findings.append(judged(edges[target], f"target{target} > {cast.place.name}"))
                cast.store.set(key, "")
        before = key
    for edge in edges.values():
        edge.close()
    return findings


def judged(edge: Edge, name: str) -> Finding:
    """The finding for this drafter's end of an edge; the target's calls ``send``."""
    rate = PAYLOAD_BYTES / receive(edge)
    return enough(
        name,
        f"{edge.kind}, {rate / GB:.1f} GB/s alone",
        WARNING if edge.kind == "nccl" and rate < SLOW_GPU_EDGE else OK,
        "NCCL may be using sockets: NCCL_DEBUG=INFO says why",
    )


def send(edge: Edge) -> None:
    """The other end of ``receive``."""
    (payload,) = edge.buffers(PAYLOAD_BYTES, 1)
    for _ in range(REPEATS + 1):
        edge.put(payload)


def receive(edge: Edge) -> float:
    """Seconds that one payload takes, behind a first one that is not counted."""
    (payload,) = edge.buffers(PAYLOAD_BYTES, 1)
    edge.land(payload)
    begin = time.perf_counter()
    for _ in range(REPEATS):
        edge.land(payload)
    return (time.perf_counter() - begin) / REPEATS


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
