"""A user's mistake gives one readable line and a non-zero exit code, before anything is loaded."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RUN = [sys.executable, "-m", "dflash_mp.train"]


def alone(tmp_path: Path, *overrides: str, ranks: int = 3) -> subprocess.CompletedProcess:
    """Rank 0 of a job that never gets as far as meeting the others."""
    environment = os.environ | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    return subprocess.run(
        [*RUN, f"hydra.run.dir={tmp_path}", "target=hub", "target.name=/nonexistent", *overrides],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=environment,
    )


CASES = {
    "unknown key": (["optim.lrr=1"], "unknown configuration key optim.lrr; did you mean optim.lr?"),
    "added key": (["+optim.foo=1"], "unknown configuration key optim.foo"),
    "unknown group": (["optimm=adamw"], "did you mean optim?"),
    "unknown choice": (["loss=mse"], "loss/mse"),
    "wrong type": (["optim.lr=abc"], "optim.lr: Value 'abc'"),
    "block size": (["drafter.block_size=1"], "drafter.block_size=1: must be at least 2"),
    "seed": (["seed=-1", "data.train=narrow"], "seed=-1: must not be negative"),
    "beta": (
        ["optim.beta1=1.5", "data.train=narrow"],
        "optim.beta1=1.5: must be at least 0 and below 1",
    ),
    "tracker": (["trackers=[foo]", "data.train=narrow"], "trackers: foo is unknown"),
    "repeated layer": (["target.layer_ids=[1,1]"], "a layer is repeated"),
    "negative layer": (["target.layer_ids=[-1,1]"], "layers count from 0"),
    "ranks": (
        ["topology.targets=2", "topology.drafters=2", "data.train=x"],
        "topology.targets=2 and topology.drafters=2 need 4 ranks a node, but the launcher "
        "started 3",
    ),
    "no data file": (["data.train=/no/such.jsonl"], "/no/such.jsonl"),
    "no target": (["data.train=narrow"], "target.name=/nonexistent: no such folder"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_a_mistake_is_one_line(case: str, tmp_path: Path) -> None:
    overrides, message = CASES[case]
    result = alone(tmp_path, *overrides)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("dflash_mp: ")


@pytest.mark.slow
def test_outside_of_a_launcher_the_command_to_use_is_shown(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    result = subprocess.run(
        [*RUN, f"hydra.run.dir={tmp_path}"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert result.returncode == 2
    assert "torchrun --nproc_per_node 3 -m dflash_mp.train" in result.stderr


JOBS = {
    "layer beyond the target": (["target.layer_ids=[0,9]"], "9"),
    "the last layer": (["target.layer_ids=[0,3]"], "last"),
    "mask token outside": (["drafter.mask_token_id=4000"], "4000"),
    "mask token in use": (["drafter.mask_token_id=0"], "drafter.mask_token_id=0"),
    "nothing to train on": (["data.train=EMPTY"], "no_supervised"),
}


BY_BOTH = "layer beyond the target"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "spawn"), [*((case, False) for case in JOBS), (BY_BOTH, True)], ids=str
)
def test_a_mistake_found_inside_a_job_is_said_once(
    case: str, spawn: bool, launch: Callable[..., object], tmp_path: Path
) -> None:
    overrides, message = JOBS[case]
    empty = tmp_path / "empty.jsonl"
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}
    empty.write_text(json.dumps(row) + "\n")
    overrides = [override.replace("EMPTY", str(empty)) for override in overrides]
    result = launch(2, *overrides, spawn=spawn)
    assert result.returncode != 0
    said = [line for line in result.stderr.splitlines() if line.startswith("dflash_mp: ")]
    assert len(said) == 1, result.stderr[-2000:]
    assert message in said[0]
    before_torchrun = result.stderr.split("torch/distributed")[0]
    assert "Traceback" not in before_torchrun
