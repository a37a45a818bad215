"""A continued run is the same run to each tracker. Their packages are stand-ins, except one.

The names of the arguments are those of wandb 0.31.0, trackio 0.43.0 and mlflow-skinny 3.17.2.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import accelerate.tracking
import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import LoggerType
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash_mp.tracking import Tracker, read_metrics
from tiny import LAUNCHED

Calls = list[dict[str, Any]]


class Settings(dict):
    """``wandb.config``."""

    def update(self, values: dict[str, Any], allow_val_change: bool) -> None:  # type: ignore[override]
        assert allow_val_change
        super().update(values)


def mlflow_module(calls: Calls) -> dict[str, Any]:
    """MLflow as far as Accelerate uses it; runs keep their first settings, as in MLflow."""
    runs: dict[str, dict[str, str]] = {}

    def start_run(run_id: str | None, **settings: Any) -> SimpleNamespace:
        calls.append({"run_id": run_id, "run_name": settings["run_name"]})
        made = run_id or f"run{len(runs)}"
        runs.setdefault(made, {})
        calls[-1]["made"] = made
        return SimpleNamespace(info=SimpleNamespace(run_id=made))

    def log_params(values: dict[str, Any]) -> None:
        known = runs[calls[-1]["made"]]
        for key, value in values.items():
            assert known.setdefault(key, str(value)) == str(value), "MLflow refuses changed values"

    limits = SimpleNamespace(MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=100)
    return {
        "search_experiments": lambda filter_string: [SimpleNamespace(experiment_id="1")],
        "start_run": start_run,
        "log_params": log_params,
        "log_metrics": lambda values, step: None,
        "end_run": lambda: None,
        "utils": SimpleNamespace(validation=limits),
    }


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is no rank, whatever Accelerate has noted in another test."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Calls]:
    """How each package was asked for a run, one entry a process."""
    calls: dict[str, Calls] = {"wandb": [], "trackio": [], "mlflow": []}

    def starter(name: str) -> Callable[..., SimpleNamespace]:
        def init(**settings: Any) -> SimpleNamespace:
            calls[name].append(settings)
            return SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)

        return init

    for name in ("wandb", "trackio"):
        module = ModuleType(name)
        vars(module).update(init=starter(name), config=Settings())
        monkeypatch.setitem(sys.modules, name, module)
    module = ModuleType("mlflow")
    vars(module).update(mlflow_module(calls["mlflow"]))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    known = [LoggerType(name) for name in ("tensorboard", *calls)]
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", known)
    return calls


def process(folder: Path, names: list[str], first_step: int = 0, **config: Any) -> Tracker:
    """One process of a run of 8 steps."""
    folder.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(cpu=True, log_with=names, project_dir=folder)
    return Tracker(accelerator, folder, 8, first_step, {"lr": 0.1, **config})


def test_a_continued_run_goes_on_in_the_same_run_of_each_tracker(
    asked: dict[str, Calls], tmp_path: Path
) -> None:
    names = ["wandb", "trackio", "mlflow"]
    for first_step, resume in ((0, "None"), (4, "auto")):
        process(tmp_path / "mine", names, first_step, resume=resume).close()
    wandb, again = asked["wandb"]
    assert wandb == again
    assert wandb.pop("id")
    folder = str(tmp_path / "mine")
    assert wandb == {"project": "dflash_mp", "name": "mine", "resume": "allow", "dir": folder}
    trackio, again = asked["trackio"]
    assert trackio == again
    assert trackio["name"].startswith("mine-")
    assert (trackio["project"], trackio["resume"]) == ("dflash_mp", "allow")
    assert asked["mlflow"] == [
        {"run_id": None, "run_name": "mine", "made": "run0"},
        {"run_id": "run0", "run_name": "mine", "made": "run0"},
    ]


def test_another_folder_is_another_run_whatever_its_name(
    asked: dict[str, Calls], tmp_path: Path
) -> None:
    # The second one starts from a checkpoint of the first.
    for place, first_step in (("a", 0), ("b", 4)):
        process(tmp_path / place / "mine", ["wandb", "trackio", "mlflow"], first_step).close()
    assert len({call["id"] for call in asked["wandb"]}) == 2
    assert len({call["name"] for call in asked["trackio"]}) == 2
    assert [call["run_id"] for call in asked["mlflow"]] == [None, None]


def test_only_the_trackers_that_were_named_are_started(
    asked: dict[str, Calls], tmp_path: Path
) -> None:
    process(tmp_path / "two", ["tensorboard", "wandb"]).close()
    process(tmp_path / "default", ["tensorboard"]).close()
    assert {name: len(calls) for name, calls in asked.items()} == {
        "wandb": 1,
        "trackio": 0,
        "mlflow": 0,
    }
    assert list((tmp_path / "two").glob("dflash_mp/events.out.tfevents.*"))
    ids = json.loads((tmp_path / "two" / "trackers.json").read_text())
    assert ids == {"id": asked["wandb"][0]["id"]}
    assert not (tmp_path / "default" / "trackers.json").exists()


def test_tensorboard_shows_each_step_of_a_continued_run_once(tmp_path: Path) -> None:
    killed = process(tmp_path, ["tensorboard"])
    for step in range(1, 7):
        killed.log(step, {"train/loss": 1.0 * step})
    killed.close()
    after = process(tmp_path, ["tensorboard"], first_step=4)
    for step in range(5, 9):
        after.log(step, {"train/loss": 10.0 * step})
    after.close()
    events = EventAccumulator(str(tmp_path / "dflash_mp")).Reload().Scalars("train/loss")
    told = [1.0, 2.0, 3.0, 4.0, 50.0, 60.0, 70.0, 80.0]
    assert [(event.step, event.value) for event in events] == list(enumerate(told, 1))
    assert [row["train/loss"] for row in read_metrics(tmp_path)] == told
