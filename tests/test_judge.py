"""What is concluded from what a rank sees of the others, without any job."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from three_ranks import LIMITS, beat, hello, peers_of, tell

from dflash_mp.cast import place
from dflash_mp.config import TopologyConfig, UserError
from dflash_mp.judge import (
    Silence,
    dead_peer,
    is_communication,
    no_progress,
    silent_neighbour,
)
from dflash_mp.peers import GONE, Beat, Hello, Peers
from dflash_mp.verdict import FAILURE, MISTAKE, SILENT_END, STOP, STUCK, Verdict, write_report
from dflash_mp.wire.frame import FrameError
from dflash_mp.wire.stream import StreamError


@pytest.fixture
def process() -> Iterator[subprocess.Popen]:
    """A process that does nothing for a while."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield child
    child.kill()
    child.wait()


def test_a_verdict_ends_with_one_line_that_has_everything() -> None:
    verdict = hello(1, 42).accused("forward", "ValueError: x", "Traceback ...\n  in f\n")
    *stack, cause = verdict.text.splitlines()
    assert stack == ["Traceback ...", "  in f"]
    assert cause.startswith("ROOT CAUSE: rank 1 (target1) on host ")
    assert cause.endswith("(node 0, pid 42), phase forward: ValueError: x")
    assert Verdict.unpack(verdict.pack().encode()) == verdict
    assert [replace(verdict, kind=k).code for k in (FAILURE, MISTAKE, STOP)] == [1, 2, 75]


def test_the_report_is_what_torchrun_reads(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    path = tmp_path / "error.json"
    write_report(str(path), hello(1).accused("forward", "boom", "Traceback").text)
    failure = ProcessFailure(local_rank=1, pid=42, exitcode=-9, error_file=str(path))
    lines = str(ChildFailedError("train", {1: failure})).strip().splitlines()
    assert lines[-2].strip().startswith("ROOT CAUSE: rank 1 (target1)")
    assert abs(failure.timestamp - time.time()) < 5


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StreamError("frame 4 did not come"), True),
        (dist.DistNetworkError("x"), True),
        (ConnectionResetError(), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer"), True),
        (RuntimeError("NCCL communicator was aborted"), True),
        (RuntimeError("shape '[2]' is invalid"), False),
        (FrameError("magic"), False),
        (UserError("x"), False),
        (MemoryError(), False),
    ],
)
def test_what_may_be_a_consequence(error: Exception, expected: bool) -> None:
    assert is_communication(error) is expected
    wrapped = ValueError("while receiving")
    wrapped.__cause__ = error
    assert is_communication(wrapped) is expected


def test_a_process_is_gone_stopped_or_another_one(process: subprocess.Popen) -> None:
    who = hello(1, process.pid)
    # D: it may be reading its modules.
    assert who.state() in "RSD"
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    assert who.state() == "T"
    # Its number was given to another process.
    assert replace(who, started="1").state() == GONE
    process.kill()
    time.sleep(0.2)
    # A zombie, before its parent looks.
    assert who.state() == GONE
    process.wait()
    assert who.state() == GONE


def test_a_dead_peer_without_a_goodbye_is_the_culprit(
    process: subprocess.Popen, tmp_path: Path
) -> None:
    report = tmp_path / "report"
    peers = peers_of(0, [hello(0), hello(1, process.pid, str(report)), hello(2)])
    tell(peers, 1, beat("forward"))
    assert peers.dead() == []
    process.kill()
    process.wait()
    (peer,) = peers.dead()
    verdict = dead_peer(peers.store, peer)
    assert (verdict.rank, verdict.phase, verdict.reason) == (1, "forward", SILENT_END)
    assert "ROOT CAUSE: rank 1" in report.read_text()
    tell(peers, 1, replace(beat("forward"), time=time.time() - 31))
    assert dead_peer(peers.store, peer).reason == STUCK
    peers.store.set("bye/1", "")
    assert peers.dead() == []


def test_a_silent_neighbour_is_accused_only_when_it_lives(process: subprocess.Popen) -> None:
    peers = peers_of(0, [hello(0), hello(1, process.pid), hello(2)])
    last = beat("forward")
    assert silent_neighbour(peers, last, 89, LIMITS) is None
    verdict = silent_neighbour(peers, last, 91, LIMITS)
    assert verdict is not None
    assert (verdict.rank, verdict.pid) == (1, process.pid)
    assert "no sign of life, for 90 s" in verdict.reason
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    stopped = silent_neighbour(peers, last, 91, LIMITS)
    assert stopped is not None
    assert "is stopped" in stopped.reason
    peers.left.add(1)
    # Its neighbour is the one behind it now.
    assert peers.next == 2
    peers.left.add(2)
    assert silent_neighbour(peers, last, 91, LIMITS) is None


def test_silence_counts_from_the_last_change() -> None:
    silence = Silence()
    assert silence.of(1) < 0.1
    time.sleep(0.2)
    assert silence.of(1) >= 0.2
    assert silence.of(2) < 0.1


WAITING = [
    beat("wait for a free slot"),
    beat("wait for a free slot"),
    beat("wait for frame 4", frame="0/4"),
]


def stuck(signs: list[Beat], owner: int | None = None) -> Verdict | None:
    peers = peers_of(0, [hello(rank) for rank in range(3)])
    for rank, sign in enumerate(signs):
        tell(peers, rank, sign)
    if owner is not None:
        peers.store.set("own/0/4", str(owner))
    return no_progress(peers, 3)


def test_a_stuck_job_names_who_owes_the_oldest_frame() -> None:
    verdict = stuck(WAITING, owner=1)
    assert verdict is not None
    assert verdict.rank == 1
    assert "it claimed frame 4 of drafter0 and has not sent it" in verdict.reason
    assert "drafter0: wait for frame 4" in verdict.reason
    unclaimed = stuck(WAITING)
    assert unclaimed is not None
    assert unclaimed.rank == 2
    assert "nobody has claimed its frame 4" in unclaimed.reason


@pytest.mark.parametrize(
    "sign", [beat("forward"), beat("wait for a free slot", over=False)], ids=["works", "not yet"]
)
def test_one_rank_that_works_or_has_time_is_progress(sign: Beat) -> None:
    assert stuck([WAITING[0], sign, WAITING[2]]) is None


def test_a_rank_that_has_not_come_is_not_judged() -> None:
    peers = peers_of(0, [hello(0)])
    tell(peers, 0, WAITING[0])
    assert no_progress(peers, 3) is None


def test_ranks_watch_their_node_and_their_neighbour() -> None:
    nodes = [place(rank, 6, 3, TopologyConfig(2, 1)) for rank in range(6)]
    store = dist.HashStore()
    watched = [Peers(store, one, Hello.mine(one, 1)).watched for one in nodes]
    assert watched[0] == set(range(6))
    assert watched[1] == {0, 1, 2}
    assert watched[2] == {0, 1, 2, 3}
    assert watched[5] == {0, 3, 4, 5}


def test_limits_must_be_in_order() -> None:
    with pytest.raises(UserError, match=r"failure\.silent_s=50.*failure\.gil_s=60"):
        replace(LIMITS, silent_s=50)
    with pytest.raises(UserError, match=r"failure\.step_s=0: must be positive"):
        replace(LIMITS, step_s=0)


def test_ranks_that_have_all_left_are_not_judged() -> None:
    peers = peers_of(0, [hello(rank) for rank in range(3)])
    peers.left.update(range(3))
    assert no_progress(peers, 3) is None
