"""How the ranks of a run reach each other: what differs between processes and threads."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from accelerate import Accelerator

from dflash_mp.cast import Cast
from dflash_mp.config import TrainConfig
from dflash_mp.roles.setup import make_accelerator
from dflash_mp.roles.step import StopVote
from dflash_mp.sentinel import Sentinel
from dflash_mp.wire.edge import Edge
from dflash_mp.wire.stream import open_edges


@dataclass(frozen=True)
class Means:
    """The role loops call these; everything else in them is the same."""

    open_edges: Callable[[Cast, timedelta], dict[int, Edge]]
    make_accelerator: Callable[[Cast, TrainConfig, Path], Accelerator]
    make_vote: Callable[[Sentinel], StopVote]


PROCESSES = Means(open_edges, make_accelerator, StopVote)
