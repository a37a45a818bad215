"""Faults in real processes: all gone in time, one cause, named last. The whole table is
``make fault-matrix``; here each kind is once, mostly on ranks without models.
"""

import os
import re
from pathlib import Path

import pytest
import torch
from matrix import (
    DRAFTER_RANK,
    HERE,
    TARGET_RANK,
    Case,
    Outcome,
    problems,
    run,
)
from safetensors.torch import load_file

pytestmark = [pytest.mark.distributed, pytest.mark.faults]

ACTOR = HERE / "actor.py"
SLACK_S = 10.0
"""For a busy machine; the bounds themselves are checked by ``make fault-matrix``."""


def assert_good(case: Case, result: Outcome, allowed: tuple[str, ...] = ()) -> None:
    wrong = [p for p in problems(case, result, SLACK_S) if p not in allowed]
    assert not wrong, f"{wrong}: {result.output[-4000:]}"


LIGHT = [
    Case("vanish", "torchrun", TARGET_RANK),
    Case("hang", "torchrun", DRAFTER_RANK),
    Case("stop", "torchrun", TARGET_RANK),
    Case("gil", "torchrun", DRAFTER_RANK),
    Case("segfault", "torchrun", TARGET_RANK),
    Case("exit", "spawn", DRAFTER_RANK),
    Case("vanish", "spawn", TARGET_RANK),
    Case("kill", "spawn", DRAFTER_RANK),
    Case("lost", "spawn", TARGET_RANK),
]


@pytest.mark.parametrize("case", LIGHT, ids=lambda c: f"{c.fault}-{c.launcher}-{c.rank}")
def test_a_fault_ends_the_job_with_one_cause(case: Case) -> None:
    (result,) = run(case, ACTOR, [])
    assert_good(case, result)


@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_the_cause_is_named_on_both_nodes(fault: str) -> None:
    # Two agents of two ranks each: rank 2 is the target of the second node.
    case = Case(fault, "nodes", 2, ranks=2)
    for result in run(case, ACTOR, []):
        assert_good(case, result)


INTERRUPTS = [
    ("ctrl-c", "spawn", 75, r"stopped: SIGINT: saved step"),
    ("ctrl-c twice", "torchrun", None, ""),
    ("sigterm", "torchrun", 1, r"stopped: SIGTERM: saved step"),
    ("launcher killed", "torchrun", -9, r"the launcher \(pid \d+\) is gone"),
    ("launcher killed", "spawn", -9, r"the launcher \(pid \d+\) is gone"),
]


@pytest.mark.parametrize(
    ("fault", "launcher", "code", "words"), INTERRUPTS, ids=lambda value: str(value)[:16]
)
def test_an_interrupted_job_saves_and_leaves(
    fault: str, launcher: str, code: int | None, words: str
) -> None:
    (result,) = run(Case(fault, launcher, -1), ACTOR, [])
    assert not result.survivors
    assert result.code != 0
    assert code is None or result.code == code
    assert result.seconds < 5 + SLACK_S
    assert result.matches(words)


@pytest.fixture
def training(tiny_target: Path, conversations: Path, heldout: Path, tmp_path: Path) -> Path:
    """The script of a training that fails, with what it needs in the environment."""
    for name, path in (
        ("target", tiny_target),
        ("train.jsonl", conversations),
        ("heldout.jsonl", heldout),
    ):
        (tmp_path / name).symlink_to(path)
    os.environ["FAULT_FOLDER"] = str(tmp_path)
    return HERE / "training.py"


@pytest.mark.parametrize(
    "case",
    [Case("kill", "torchrun", TARGET_RANK), Case("raise", "spawn", DRAFTER_RANK)],
    ids=lambda c: f"{c.fault}-{c.launcher}-{c.rank}",
)
def test_a_fault_ends_a_training_with_one_cause(case: Case, training: Path) -> None:
    (result,) = run(case, training, [])
    assert_good(case, result)


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


@pytest.mark.timeout(600)
def test_a_killed_interrupted_or_smaller_training_comes_to_the_same_weights(
    training: Path, tmp_path: Path
) -> None:
    """torchrun starts the ranks again by itself; spawn can do without a target; a person starts
    again with resume=auto."""

    def train(name: str, case: Case, *overrides: str) -> Outcome:
        folder = tmp_path / name
        settings = [f"output_dir={folder}", "steps=20", *overrides]
        (result,) = run(case, training, settings)
        return result

    def same(name: str) -> bool:
        mine, theirs = weights(tmp_path / name, 20), weights(tmp_path / "unbroken", 20)
        return all(torch.equal(mine[key], theirs[key]) for key in theirs)

    unbroken = train("unbroken", Case("none", "spawn", 9, ranks=2))
    assert unbroken.code == 0, unbroken.output[-3000:]

    killed = train("killed", Case("kill", "torchrun", 1, ranks=2, restarts=1))
    assert killed.code == 0, killed.output[-3000:]
    assert killed.matches("ROOT CAUSE: rank 1 ")
    assert same("killed")

    lost = train("lost", Case("kill", "spawn", 1), "topology.elastic=true")
    assert lost.code == 0, lost.output[-3000:]
    assert lost.matches(r"WARNING: rank 1 \(target1, pid \d+\) is lost, killed by SIGKILL")
    assert same("lost")

    stopped = train("stopped", Case("ctrl-c", "spawn", -1, ranks=2))
    assert stopped.code == 75, stopped.output[-3000:]
    found = re.search(r"stopped: SIGINT: step (\d+) is saved", stopped.output)
    assert found is not None
    assert weights(tmp_path / "stopped", int(found[1]))
    continued = train("stopped", Case("none", "spawn", 9, ranks=2), "resume=auto")
    assert continued.code == 0, continued.output[-3000:]
    assert same("stopped")
