"""How the ranks of a run reach each other: what differs between processes and threads."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from accelerate import Accelerator

from dflash_mp.cast import Cast
from dflash_mp.config import TrainConfig
from dflash_mp.job import Job
from dflash_mp.roles.setup import make_accelerator
from dflash_mp.roles.step import StopVote
from dflash_mp.sentinel import Sentinel
from dflash_mp.wire.connect import open_edges
from dflash_mp.wire.edge import Edge


@dataclass(frozen=True)
class Means:
    """The role loops call these; everything else in them is the same."""

    open_edges: Callable[[Cast, Job], dict[int, Edge]]
    make_accelerator: Callable[[Cast, TrainConfig, Path], Accelerator]
    make_vote: Callable[[Sentinel], StopVote]


def connect(cast: Cast, job: Job) -> dict[int, Edge]:
    """This rank's edges to processes of the other role, as ``wire`` describes them."""
    wire = job.config.wire
    nbytes = wire.slots * job.layout.nbytes
    return open_edges(cast, wire.edge, nbytes, timedelta(seconds=wire.timeout_s))


PROCESSES = Means(connect, make_accelerator, StopVote)
