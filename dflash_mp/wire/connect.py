"""Which edge carries the frames of this job, and opening all of a rank's edges."""

import logging
import os
from datetime import timedelta

import torch.distributed as dist

from dflash_mp.cast import TARGET, Cast, Place
from dflash_mp.config import require
from dflash_mp.warn_once import warn_once
from dflash_mp.wire.edge import DRAFTER_END, TARGET_END, Edge, GroupEdge
from dflash_mp.wire.shared_edge import SharedEdge, SharedMemory

log = logging.getLogger(__name__)

GLOO_ADVICE = (
    "frames go over gloo, which copies them more often: lower wire.slots or data.tokens_per_batch, "
    "or give the machine or container more memory"
)


def choose_edge(asked: str, on_gpu: bool) -> str:
    """The kind of edge for ``wire.edge=<asked>``: gloo, nccl or shm.

    Edges never leave their node, so on CPUs shared memory is there wherever the system is Linux.

    Raises:
        UserError: what was asked for cannot carry frames between such ranks.
    """
    shares = hasattr(os, "memfd_create")
    if asked == "auto":
        return "nccl" if on_gpu else "shm" if shares else "gloo"
    require(
        on_gpu == (asked == "nccl"),
        f"wire.edge={asked} is for {'GPU' if asked == 'nccl' else 'CPU'} ranks, but this job's are "
        f"{'GPU' if on_gpu else 'CPU'} ranks: use wire.edge=auto",
    )
    require(
        asked != "shm" or shares,
        "wire.edge=shm needs Linux (memfd_create): use wire.edge=auto",
    )
    return asked


def node_edges(place: Place) -> list[tuple[int, int]]:
    """The role ranks ``(target, drafter)`` of all edges of this node, in one global order."""
    first_target = place.node * place.targets_per_node
    first_drafter = place.node * place.drafters_per_node
    return [
        (first_target + target, first_drafter + drafter)
        for target in range(place.targets_per_node)
        for drafter in range(place.drafters_per_node)
    ]


def open_edges(cast: Cast, asked: str, nbytes: int, timeout: timedelta) -> dict[int, Edge]:
    """Connect this rank with every rank of the other role on its node; keys are role ranks.

    Participants: all ranks of the node. Edges are built and warmed in one global order.

    Args:
        cast: this rank.
        asked: ``wire.edge``.
        nbytes: what each drafter's slots take together.
        timeout: of connecting and of each operation.

    Raises:
        UserError: what was asked for cannot be had here.
    """
    place, store = cast.place, cast.client()
    is_target = place.role == TARGET
    kind, memory = choose_edge(asked, cast.device.type == "cuda"), None
    if not is_target:
        # The memory is a drafter's: it says what its edges are.
        if kind == "shm" and (memory := reserve(place, asked, nbytes)) is None:
            kind = "gloo"
        store.set(kind_key(place.role_rank), kind)
    edges: dict[int, Edge] = {}
    for target, drafter in node_edges(place):
        if place.role_rank != (target if is_target else drafter):
            continue
        inside = dist.PrefixStore(f"edge/{target}-{drafter}", store)
        store.wait([kind_key(drafter)], timeout)
        edge: Edge
        if store.get(kind_key(drafter)) == b"shm":
            name = f"edge of target{target} and drafter{drafter}"
            edge = SharedEdge(name, inside, memory, timeout)
        else:
            end = TARGET_END if is_target else DRAFTER_END
            edge = GroupEdge(end, inside, cast.device, timeout)
        edge.warm()
        edges[drafter if is_target else target] = edge
    kinds = sorted({edge.kind for edge in edges.values()})
    log.info("%s: wire.edge=%s: frames go over %s", place.name, asked, ", ".join(kinds))
    return edges


def kind_key(drafter: int) -> str:
    """Where a drafter says what its edges are."""
    return f"edge/drafter{drafter}"


def reserve(place: Place, asked: str, nbytes: int) -> SharedMemory | None:
    """Shared memory for a drafter's slots; ``None`` where gloo has to do.

    Raises:
        UserError: shared memory was asked for, and there is not as much.
    """
    try:
        return SharedMemory(nbytes)
    except OSError as error:
        problem = f"cannot reserve {nbytes / 1e6:,.0f} MB of shared memory: {error.strerror}"
        require(
            asked == "auto",
            f"wire.edge={asked}: {problem}; lower wire.slots or data.tokens_per_batch, or use "
            "wire.edge=gloo",
        )
        warn_once(log, f"{place.name}: {problem}", GLOO_ADVICE)
        return None
