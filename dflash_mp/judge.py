"""Who has failed, judged from what ranks tell of themselves, what /proc shows, and from errors."""

import time

import torch.distributed as dist

from dflash_mp.config import FailureConfig
from dflash_mp.peers import GONE, Beat, Hello, Peers, read_beat
from dflash_mp.verdict import SILENT_END, STUCK, Verdict, write_report


class Silence:
    """Seconds for which a count has stood still, by this process's own watch."""

    def __init__(self) -> None:
        self.number, self.since = -1, time.monotonic()

    def of(self, number: int) -> float:
        """Seconds since ``number`` was first seen."""
        if number != self.number:
            self.number, self.since = number, time.monotonic()
        return time.monotonic() - self.since


def dead_peer(store: dist.Store, peer: Hello, seen: str = SILENT_END) -> Verdict:
    """What became of a process that is gone without a word; its launcher is told the same.

    Args:
        store: where it gave signs of life.
        peer: the process, of this node.
        seen: what the observer knows of its end.
    """
    beat = read_beat(store, peer.rank)
    stuck = beat is not None and time.time() - beat.time > peer.stuck_s
    verdict = peer.accused(beat.phase if beat else "start", STUCK if stuck else seen)
    write_report(peer.report, verdict.text)
    return verdict


def silent_neighbour(
    peers: Peers, beat: Beat, silent: float, limits: FailureConfig
) -> Verdict | None:
    """The verdict about the next rank in the ring, if it has been silent for too long.

    Args:
        peers: this rank's view.
        beat: the neighbour's last sign of life.
        silent: seconds since it came, more than half of ``gil_s``.
        limits: of the run.
    """
    peer = peers.known.get(peers.next)
    if peer is None or peer.rank in (peers.mine.rank, *peers.left):
        return None
    near = peer.node == peers.mine.node
    state = peer.state() if near else "?"
    if state == GONE:
        return None
    if near and state != "T":
        # Its own timer will end it; this is what its launcher will show then.
        write_report(peer.report, peer.accused(beat.phase, STUCK).text)
    if silent < limits.silent_s:
        return None
    what = "is stopped (SIGSTOP)" if state == "T" else "gives no sign of life"
    reason = f"{what}, for {limits.silent_s:g} s (failure.silent_s)"
    verdict = peer.accused(beat.phase, reason)
    if near:
        write_report(peer.report, verdict.text)
    return verdict


def no_progress(peers: Peers, ranks: int) -> Verdict | None:
    """The verdict when all ranks have waited for each other for too long.

    It is about the rank that owes the oldest frame that is waited for.
    """
    beats = {rank: read_beat(peers.store, rank) for rank in range(ranks) if rank not in peers.left}
    known = {rank: beat for rank, beat in beats.items() if beat and rank in peers.known}
    if not known or len(known) < len(beats):
        # All have left, or somebody has not come yet.
        return None
    if not all(beat.waits and beat.over for beat in known.values()):
        return None
    names = {rank: peers.known[rank].name for rank in known}
    table = ", ".join(f"{names[rank]}: {beat.phase}" for rank, beat in known.items())
    wanted = [(beat.frame, rank) for rank, beat in known.items() if beat.frame is not None]
    culprit, owes = peers.mine, ""
    if wanted:
        frame, waiting = min(wanted, key=lambda pair: int(pair[0].split("/")[1]))
        k = frame.split("/")[1]
        if peers.store.check([f"own/{frame}"]):
            culprit = peers.known[int(peers.store.get(f"own/{frame}"))]
            owes = f": it claimed frame {k} of {names[waiting]} and has not sent it"
        else:
            culprit = peers.known[waiting]
            owes = f": nobody has claimed its frame {k}"
    phase = known[culprit.rank].phase if culprit.rank in known else "end"
    return culprit.accused(phase, f"no rank makes progress{owes}; {table}")


def is_communication(error: BaseException) -> bool:
    """Whether ``error`` may only tell that another rank is gone."""
    kinds = (dist.DistError, ConnectionError)
    words = ("gloo", "NCCL", "Connection", "Socket", "Broken pipe", "store")
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, kinds) or getattr(current, "consequence", False):
            return True
        if isinstance(current, RuntimeError) and any(word in str(current) for word in words):
            return True
        current = current.__cause__ or current.__context__
    return False
