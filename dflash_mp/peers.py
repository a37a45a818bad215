"""What ranks tell each other of themselves, and what can be seen of a process on one machine."""

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from dflash_mp.cast import Place
from dflash_mp.verdict import FAILURE, Verdict, report_path

GONE = "gone"


@dataclass(frozen=True)
class Hello:
    """Who a rank is.

    ``started`` tells its process from a later one with the same number; an end after more than
    ``stuck_s`` seconds without a sign of life was its timer's doing.
    """

    rank: int
    name: str
    host: str
    node: int
    pid: int
    started: str
    report: str | None
    stuck_s: float

    @staticmethod
    def mine(place: Place, stuck_s: float) -> "Hello":
        """This process."""
        return Hello(
            rank=place.rank,
            name=place.name,
            host=socket.gethostname(),
            node=place.node,
            pid=os.getpid(),
            started=start_time(os.getpid()),
            report=report_path(),
            stuck_s=stuck_s,
        )

    def accused(self, phase: str, reason: str, traceback: str = "") -> Verdict:
        """The verdict that this rank has failed."""
        return Verdict(
            FAILURE, self.rank, self.name, self.host, self.node, self.pid, phase, reason, traceback
        )

    def state(self) -> str:
        """Letter of the process's state on this machine (``T`` stopped), or ``gone``."""
        fields = stat(self.pid)
        if not fields or fields[0] in "ZX" or fields[19] != self.started:
            return GONE
        return fields[0]


@dataclass(frozen=True)
class Beat:
    """A rank's sign of life.

    ``count`` counts the phases it has been through; ``waits`` says that its phase ends only by
    what another rank does, and ``over`` that it has lasted longer than allowed; ``frame`` is the
    ``drafter/k`` that is waited for.
    """

    number: int
    time: float
    phase: str
    count: int
    waits: bool
    over: bool
    frame: str | None


def stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on; empty when there is no such process."""
    try:
        # The command's name, in parentheses, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return []


def start_time(pid: int) -> str:
    """When a process was started, in the system's own count."""
    fields = stat(pid)
    return fields[19] if fields else ""


def read_hello(store: dist.Store, rank: int) -> Hello | None:
    """Who rank ``rank`` is; None before it has come."""
    key = f"hello/{rank}"
    return Hello(**json.loads(store.get(key))) if store.check([key]) else None


def read_beat(store: dist.Store, rank: int) -> Beat | None:
    """The last sign of life of a rank."""
    key = f"beat/{rank}"
    return Beat(**json.loads(store.get(key))) if store.check([key]) else None


class Peers:
    """The ranks that this one watches, as the store shows them; for one thread.

    Every rank watches those of its node and the next one in the ring; rank 0 watches all.
    """

    def __init__(self, store: dist.Store, place: Place, mine: Hello) -> None:
        self.store, self.mine = store, mine
        self.size = place.world_size
        per_node = place.world_size // place.nodes
        first = place.node * per_node
        everybody = range(place.world_size)
        self.watched = set(everybody if place.rank == 0 else range(first, first + per_node))
        self.known: dict[int, Hello] = {mine.rank: mine}
        self.left: set[int] = set()
        self.watched.add(self.next)
        store.set(f"hello/{mine.rank}", json.dumps(asdict(mine)))

    @property
    def next(self) -> int:
        """This rank's neighbour in the ring of those who have not said goodbye."""
        others = [(self.mine.rank + i) % self.size for i in range(1, self.size)]
        return next((rank for rank in others if rank not in self.left), self.mine.rank)

    def refresh(self) -> None:
        """Look for ranks that have come or have said goodbye."""
        for rank in self.watched - self.known.keys():
            hello = read_hello(self.store, rank)
            if hello is not None:
                self.known[rank] = hello
        for rank in self.known.keys() - self.left:
            if self.store.check([f"bye/{rank}"]):
                self.left.add(rank)

    def dead(self) -> list[Hello]:
        """Ranks of this node whose process is gone though they have not said goodbye."""
        gone = [
            peer
            for rank, peer in self.known.items()
            if peer.node == self.mine.node and rank not in self.left and peer.state() == GONE
        ]
        # Their goodbye may be newer than the last look.
        return [peer for peer in gone if not self.store.check([f"bye/{peer.rank}"])]
