"""What a sentinel concludes, from what it sees; whole jobs that fail are in ``faults``."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from dflash_mp.cast import place
from dflash_mp.config import FailureConfig, TopologyConfig, UserError
from dflash_mp.judge import (
    Silence,
    dead_peer,
    is_communication,
    no_progress,
    silent_neighbour,
)
from dflash_mp.peers import GONE, Beat, Hello, Peers, start_time
from dflash_mp.verdict import FAILURE, MISTAKE, SILENT_END, STOP, STUCK, Verdict, write_report
from dflash_mp.wire.frame import FrameError
from dflash_mp.wire.stream import StreamError

LIMITS = FailureConfig(
    beat_s=1,
    silent_s=90,
    gil_s=60,
    setup_s=1800,
    step_s=300,
    save_s=1800,
    wait_s=400,
    stop_s=25,
    max_skips=5,
)
PLACES = [place(rank, 3, 3, TopologyConfig(2, 1)) for rank in range(3)]


@pytest.fixture
def process() -> Iterator[subprocess.Popen]:
    """A process that does nothing for a while."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield child
    child.kill()
    child.wait()


def hello(rank: int, pid: int = 0, report: str | None = None) -> Hello:
    who = Hello.mine(PLACES[rank], stuck_s=30)
    pid = pid or who.pid
    return replace(who, pid=pid, started=start_time(pid), report=report)


def beat(phase: str, over: bool = True, frame: str | None = None) -> Beat:
    waits = phase.startswith("wait")
    return Beat(1, time.time(), phase, 1, waits, over, frame)


def peers_of(rank: int, everyone: list[Hello]) -> Peers:
    store = dist.HashStore()
    for one in everyone:
        store.set(f"hello/{one.rank}", json.dumps(asdict(one)))
    peers = Peers(store, PLACES[rank], everyone[rank])
    peers.refresh()
    return peers


def tell(peers: Peers, rank: int, sign: Beat) -> None:
    peers.store.set(f"beat/{rank}", json.dumps(asdict(sign)))


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


def test_signals_are_seen_while_the_main_thread_is_in_native_code() -> None:
    code = (
        "import os, threading, time, ctypes\n"
        "from dflash_mp.stop_signals import StopSignals\n"
        "signals = StopSignals()\n"
        "def look():\n"
        "    while not (got := signals.received()): time.sleep(0.05)\n"
        "    print(got[0], flush=True); os._exit(0)\n"
        "threading.Thread(target=look, daemon=True).start()\n"
        "print('ready', flush=True)\n"
        "ctypes.CDLL(None).pause()\n"
        "ctypes.CDLL(None).pause()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    out, _ = child.communicate(timeout=30)
    assert int(out) == signal.SIGTERM
    assert child.returncode == 0


def test_ranks_that_have_all_left_are_not_judged() -> None:
    peers = peers_of(0, [hello(rank) for rank in range(3)])
    peers.left.update(range(3))
    assert no_progress(peers, 3) is None


WATCHED = """
import sys, threading, time
from datetime import timedelta
from functools import partial
import torch.distributed as dist
from dflash_mp.cast import place
from dflash_mp.config import TopologyConfig
from dflash_mp.sentinel import Sentinel
from test_sentinel import LIMITS

class Wrapped:
    def __init__(self, store, calls):
        self.store = store
        vars(self).update({name: partial(call, store) for name, call in calls.items()})
    def __getattr__(self, name):
        return getattr(self.store, name)

def watched(**calls):
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]))
    sentinel = Sentinel(place(0, 3, 3, TopologyConfig(2, 1)), store, LIMITS)
    sentinel._peers.store = Wrapped(sentinel._peers.store, calls)
    return sentinel
"""
"""Rank 0 of three, whose sentinel calls the store in another way."""

PATHS = os.pathsep.join([str(Path(__file__).parent.parent), str(Path(__file__).parent)])

SLOW_BEAT = """
def set(store, key, value):
    store.set(key, value)
    if key == "beat/0":
        print("beats", flush=True)
        time.sleep(1)

sentinel = watched(set=set)
time.sleep(60)
"""


@pytest.mark.distributed
def test_the_report_of_a_leaving_rank_does_not_come_back(tmp_path: Path) -> None:
    """A verdict about another rank arrives while the store takes its time over this one's beat."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    report = tmp_path / "error.json"
    environment = os.environ | {
        "PYTHONPATH": PATHS,
        "TORCHELASTIC_ERROR_FILE": str(report),
    }
    child = subprocess.Popen(
        [sys.executable, "-c", WATCHED + SLOW_BEAT, str(store.port)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(2)] == ["beats\n", "beats\n"]
        assert report.exists()
        store.compare_set("verdict", "", replace(hello(1).accused("step", "raised"), by="x").pack())
        # The beat ends after one second; the rank leaves after eight, or when it is told to.
        time.sleep(2)
        assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=30) != 0
        assert not report.exists()
    finally:
        child.kill()
        child.wait()


DIES_AT_ONCE = """
import os, signal

watched()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.distributed
def test_a_rank_that_dies_before_its_first_beat_leaves_a_report(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    report = tmp_path / "error.json"
    subprocess.run(
        [sys.executable, "-c", WATCHED + DIES_AT_ONCE, str(store.port)],
        env=os.environ | {"PYTHONPATH": PATHS, "TORCHELASTIC_ERROR_FILE": str(report)},
        timeout=60,
        check=False,
    )
    message = json.loads(report.read_text())["message"]["message"]
    assert message.startswith("ROOT CAUSE: rank 0 (target0)")
    assert message.endswith(f"phase start: {SILENT_END}")


LEAVES_IN_A_BEAT = """
beats = threading.Event()

def set(store, key, value):
    beats.set()
    try:
        store.wait(["never"], timedelta(seconds=2))
    except dist.DistStoreError:
        pass

class LongEnd:
    def __del__(self, sleep=time.sleep):
        sleep(4)

end = LongEnd()
sentinel = watched(set=set)
beats.wait()
sentinel.bye()
"""


@pytest.mark.distributed
def test_a_rank_that_is_done_ends_well_though_its_store_is_slow() -> None:
    """A thread that comes back from the store into an ended interpreter aborts the process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for other in (1, 2):
        store.set(f"bye/{other}", "")
    ended = subprocess.run(
        [sys.executable, "-c", WATCHED + LEAVES_IN_A_BEAT, str(store.port)],
        env=os.environ | {"PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


SEES_A_DEAD_RANK = """
looks = 0

def check(store, keys):
    global looks
    looks += keys == ["bye/2"]
    # First when it learns of rank 2, then when it finds it dead.
    if keys == ["bye/2"] and looks == 2:
        print("looks", flush=True)
        store.compare_set("verdict", "", sys.argv[2])
    return store.check(keys)

sentinel = watched(check=check)
time.sleep(60)
"""


@pytest.mark.distributed
def test_a_rank_that_left_because_of_a_verdict_is_no_culprit(
    tmp_path: Path, process: subprocess.Popen
) -> None:
    """Rank 1 has failed, rank 2 is gone for that, and rank 0 hears it while it looks at rank 2."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    report = tmp_path / "error.json"
    store.set("hello/2", json.dumps(asdict(hello(2, process.pid, str(report)))))
    process.kill()
    process.wait()
    verdict = replace(hello(1).accused("step", "raised"), by="x").pack()
    child = subprocess.Popen(
        [sys.executable, "-c", WATCHED + SEES_A_DEAD_RANK, str(store.port), verdict],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": PATHS},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "looks\n"
        # It waits for half a second in case its launcher knows more.
        time.sleep(2)
        assert child.poll() is None
        assert not report.exists()
    finally:
        child.kill()
        child.wait()
