"""What the spawn launcher makes of a rank's end."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from dflash_mp.cast import CURRENT_JOB, current_job, place
from dflash_mp.config import TopologyConfig
from dflash_mp.peers import Hello
from dflash_mp.verdict import SILENT_END, Verdict
from launch.spawn import finish, forgiven, how_it_ended, judge


def process(rank: int, code: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(name=str(rank), exitcode=code)


@pytest.fixture
def store() -> dist.Store:
    """A launcher's store with a job of two targets and a drafter that trains elastically."""
    store = dist.HashStore()
    store.set(CURRENT_JOB, json.dumps(["job", 0]))
    job = current_job(store)
    for rank in range(3):
        mine = place(rank, 3, 3, TopologyConfig(2, 1, True))
        job.set(f"hello/{rank}", json.dumps(asdict(replace(Hello.mine(mine, 30), report=None))))
    job.set("elastic", "")
    job.set("training", "yes")
    return store


def test_a_killed_target_is_forgiven_while_another_one_is_there(store: dist.Store) -> None:
    assert forgiven(store, process(1, -9), [process(0), process(2)])
    job = current_job(store)
    assert job.check(["lost", "lost/1", "bye/1"])
    # The last one is not.
    assert not forgiven(store, process(0, -9), [process(2)])


@pytest.mark.parametrize(
    ("rank", "code", "key", "value"),
    [
        (2, -9, "training", "yes"),
        (1, 1, "training", "yes"),
        (1, 0, "training", "yes"),
        (1, -9, "training", "no"),
        (1, -9, "verdict", "x"),
    ],
    ids=["a drafter", "an exception", "a silent exit", "not training", "another cause"],
)
def test_nothing_else_is_forgiven(
    store: dist.Store, rank: int, code: int, key: str, value: str
) -> None:
    current_job(store).set(key, value)
    others = [process(other) for other in range(3) if other != rank]
    assert not forgiven(store, process(rank, code), others)
    assert not current_job(store).check(["lost"])


def test_without_elastic_nothing_is_forgiven(store: dist.Store) -> None:
    current_job(store).delete_key("elastic")
    assert not forgiven(store, process(1, -9), [process(0), process(2)])


def test_the_parent_knows_the_signal_that_a_neighbour_did_not(store: dist.Store) -> None:
    hello = Hello(**json.loads(current_job(store).get("hello/1")))
    current_job(store).set("verdict", hello.accused("forward", SILENT_END).pack())
    verdict = judge(store, process(1, -11))
    assert verdict.reason == "ended by SIGSEGV"


def test_what_a_rank_has_said_itself_stands(store: dist.Store) -> None:
    hello = Hello(**json.loads(current_job(store).get("hello/2")))
    said = hello.accused("step", "ValueError: x")
    current_job(store).set("verdict", said.pack())
    assert judge(store, process(1, -15)) == said


@pytest.mark.parametrize(
    ("code", "words"),
    [(-9, "for want of memory"), (-11, "SIGSEGV"), (0, "left with exit code 0")],
)
def test_ends_in_words(code: int, words: str) -> None:
    assert words in how_it_ended(code)


def test_exit_codes(store: dist.Store, capsys: pytest.CaptureFixture) -> None:
    hello = Hello(**json.loads(current_job(store).get("hello/1")))
    cause = hello.accused("step", "x")
    ended = [process(0, 13), process(1, 1), process(2, 13)]
    assert finish(cause, ended, asked=False) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("ROOT CAUSE: rank 1")
    killed = [process(0, 13), process(1, -9), process(2, 13)]
    assert finish(cause, killed, asked=False) == 137
    stopped = Verdict(**asdict(cause) | {"kind": "stop"})
    assert finish(stopped, ended, asked=True) == 75
    assert finish(None, [process(0, 2), process(1, -15)], asked=False) == 2
