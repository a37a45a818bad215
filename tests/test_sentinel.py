"""A sentinel in a process of its own; whole jobs that fail are in ``faults``."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch.distributed as dist
from three_ranks import hello

from dflash_mp.verdict import SILENT_END


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


WATCHED = """
import sys, threading, time
from datetime import timedelta
from functools import partial
import torch.distributed as dist
from dflash_mp.cast import place
from dflash_mp.config import TopologyConfig
from dflash_mp.sentinel import Sentinel
from three_ranks import LIMITS

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
def test_a_rank_that_left_because_of_a_verdict_is_no_culprit(tmp_path: Path) -> None:
    """Rank 1 has failed, rank 2 is gone for that, and rank 0 hears it while it looks at rank 2."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    report = tmp_path / "error.json"
    gone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    store.set("hello/2", json.dumps(asdict(hello(2, gone.pid, str(report)))))
    gone.kill()
    gone.wait()
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
