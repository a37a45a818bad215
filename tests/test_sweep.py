"""Hydra's habits under a launcher: print the configuration, sweep."""

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

pytestmark = pytest.mark.distributed

Launch = Callable[..., object]


@pytest.mark.parametrize("spawn", [False, True], ids=["torchrun", "spawn"])
def test_the_configuration_is_printed_once(launch: Launch, spawn: bool) -> None:
    result = launch(2, "seed=7", "--cfg", "job", spawn=spawn)
    assert result.returncode == 0, result.stderr[-2000:]
    assert OmegaConf.create(result.stdout).seed == 7


def test_a_sweep_trains_once_for_each_value(launch: Launch, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    folders = ("output_dir=null", f"hydra.sweep.dir={sweep}")
    result = launch(2, *folders, "seed=1,2", "steps=1", "--multirun", spawn=False)
    assert result.returncode == 0, result.stderr[-2000:]
    seeds = [OmegaConf.load(sweep / job / "config.yaml").seed for job in ("0", "1")]
    assert seeds == [1, 2]
    first, second = ((sweep / job / "export/model.safetensors").read_bytes() for job in ("0", "1"))
    assert first != second
