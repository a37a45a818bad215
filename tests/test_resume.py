"""Continue a run: the same bits as without the break, or a refusal that says why."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file

from dflash_mp.checkpoint import Start
from dflash_mp.config import TrainConfig, UserError, config_dir, to_config
from dflash_mp.resume import choose_checkpoint, refuse_other_data, refuse_other_target, start_of
from dflash_mp.run_folder import claim_folder
from dflash_mp.tracking import keep_metrics

Launch = Callable[..., object]


def configure(*overrides: str) -> TrainConfig:
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return to_config(compose("train", list(overrides)), TrainConfig)


def state(folder: Path, step: int, config: TrainConfig, **facts: object) -> Path:
    """A checkpoint without tensors: all that is looked at before the models are there."""
    path = folder / "checkpoints" / f"step-{step:06d}"
    path.mkdir(parents=True)
    values = {"step": step, "batches": 2 * step, "config": asdict(config), "data": "data-1"}
    (path / "state.json").write_text(json.dumps(values | facts))
    return path


def damage_state(path: Path, damage: dict[str, object]) -> None:
    values = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(values | damage))


def test_auto_takes_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    config = configure("resume=auto")
    for step in (1, 2, 10):
        state(tmp_path, step, config)
    (tmp_path / "checkpoints" / "step-000010" / "state.json").unlink()
    (tmp_path / "checkpoints" / ".partial-000011").mkdir()
    chosen = choose_checkpoint(config, tmp_path, restarted=False)
    assert start_of(chosen, config) == Start(chosen, 2, 4)
    assert chosen.name == "step-000002"


def test_auto_without_a_checkpoint_starts_afresh_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configure("resume=auto")
    assert choose_checkpoint(config, tmp_path, restarted=False) is None
    assert "resume=auto: no complete checkpoint" in caplog.text
    (tmp_path / "run.json").write_text("{}")
    assert claim_folder(tmp_path, config, restarted=False) == Start()


def test_a_restarted_run_continues_itself_whatever_it_was_told(tmp_path: Path) -> None:
    for overrides in ([], ["resume=/elsewhere"], ["overwrite=true"]):
        folder = tmp_path / str(len(overrides)) / str(overrides)[:5]
        config = configure(*overrides)
        state(folder, 3, config)
        (folder / "run.json").write_text("{}")
        assert claim_folder(folder, config, restarted=True).step == 3
        assert len(json.loads((folder / "run.json").read_text())["continued"]) == 1


@pytest.mark.parametrize("name", ["", "checkpoints", "checkpoints/step-000002"])
def test_a_path_may_name_a_run_or_a_checkpoint(tmp_path: Path, name: str) -> None:
    run = tmp_path / "first"
    state(run, 2, configure())
    config = configure(f"resume={run / name}")
    assert claim_folder(tmp_path / "second", config, restarted=False).step == 2
    assert (tmp_path / "second" / "run.json").exists()


@pytest.mark.parametrize("name", ["nowhere", "nowhere/step-000001", "empty"])
def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no complete checkpoint there"):
        choose_checkpoint(configure(f"resume={tmp_path / name}"), tmp_path, restarted=False)


def test_an_earlier_step_does_not_leave_later_checkpoints_behind(tmp_path: Path) -> None:
    paths = [state(tmp_path, step, configure()) for step in (2, 4)]
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UserError, match=r"goes on to step-000004.*overwrite=true"):
        claim_folder(tmp_path, configure(f"resume={paths[0]}"), restarted=False)
    config = configure(f"resume={paths[0]}", "overwrite=true")
    assert claim_folder(tmp_path, config, restarted=False).step == 2
    assert [path.exists() for path in paths] == [True, False]


def test_what_differs_is_listed(tmp_path: Path) -> None:
    path = state(tmp_path, 2, configure())
    changed = ("drafter.block_size=10", "seed=5", "optim.weight_decay=0.5", "wire.dtype=float32")
    with pytest.raises(UserError) as caught:
        start_of(path, configure(*changed))
    for words in (
        "drafter.block_size 8 -> 10",
        "seed 0 -> 5",
        "optim.weight_decay 0.0 -> 0.5",
        "wire.dtype bfloat16 -> float32",
    ):
        assert words in str(caught.value)
    assert str(caught.value).count("->") == len(changed)


def test_what_may_change_does_not_matter(tmp_path: Path) -> None:
    path = state(tmp_path, 2, configure())
    changed = [
        *("optim.lr=1", "schedule=wsd", "steps=77", "epochs=3", "log_interval=1", "trackers=[]"),
        *("evaluate.interval=1", "checkpoint.keep=9", "wire.slots=1", "wire.timeout_s=7000"),
        *("topology.targets=7", "threads=3", "run_name=other", "failure.beat_s=3"),
        *("data.cache_dir=/elsewhere", "data.train=/elsewhere.jsonl"),
    ]
    assert start_of(path, configure(*changed)).step == 2


def test_fewer_steps_than_done_is_refused(tmp_path: Path) -> None:
    path = state(tmp_path, 4, configure())
    assert start_of(path, configure("steps=4")).step == 4
    with pytest.raises(UserError, match=r"steps=3, but .*step-000004 has done 4 already"):
        start_of(path, configure("steps=3"))


@pytest.mark.parametrize("damage", [{"config": None}, {"batches": "x"}, {"step": 3}, {"step": "2"}])
def test_a_strange_state_is_refused(tmp_path: Path, damage: dict) -> None:
    path = state(tmp_path, 2, configure())
    damage_state(path, damage)
    with pytest.raises(UserError, match="step-000002"):
        start_of(path, configure())


def test_other_data_drafters_and_targets_are_refused(tmp_path: Path) -> None:
    drafter = {"block_size": 16, "dflash_config": {"target_layer_ids": [1, 2], "mask_token_id": 3}}
    path = state(tmp_path, 2, configure(), drafter=drafter, target="abc")
    refuse_other_data(path, "data-1", json.loads(json.dumps(drafter)))
    refuse_other_target(path, "abc")
    with pytest.raises(UserError, match=r"other data \(data-1, this run has data-2\)"):
        refuse_other_data(path, "data-2", drafter)
    other = drafter | {"dflash_config": {"target_layer_ids": [1, 2], "mask_token_id": 4}}
    with pytest.raises(UserError, match="another drafter: dflash_config"):
        refuse_other_data(path, "data-1", other)
    with pytest.raises(UserError, match=r"another target.*abc.*abd"):
        refuse_other_target(path, "abd")


def test_metrics_behind_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 1, "seconds": 1.0, "train/loss": 3.0},
        {"step": 2, "seconds": 2.0, "train/loss": 2.0},
        {"step": 2, "seconds": 2.5, "eval/decoded_acceptance_length": 1.5},
        {"step": 2, "seconds": 2.6, "final/loss": 2.0},
        {"step": 3, "seconds": 3.0, "train/loss": 1.0},
        {"step": 1, "seconds": 3.1, "eval/decoded_acceptance_length": 1.25},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "sec'
    path.write_text(text)
    assert keep_metrics(path, 2, finished=False) == 3.1
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        *rows[:3],
        rows[5],
    ]
    assert keep_metrics(path, 2, finished=True) == 3.1
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*rows[:2], rows[5]]


SETTINGS = ("steps=8", "checkpoint.interval=1", "checkpoint.keep=99", "evaluate.interval=3")
"""10 micro-batches an epoch, two a step: the sixth step begins the second epoch."""


@pytest.fixture(scope="module")
def reference(launch_in: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an unbroken run of eight steps with every checkpoint kept."""
    base = tmp_path_factory.mktemp("reference")
    result = launch_in(
        base, 2, *SETTINGS, "evaluate.decode_prompts=2", "evaluate.decode_interval=4"
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return base / "run"


def killed_after(reference: Path, step: int, folder: Path) -> Path:
    """What a run leaves that was killed when it had saved ``step`` and gone on for a while."""
    shutil.copytree(reference, folder)
    for path in (folder / "checkpoints").iterdir():
        if int(path.name[-6:]) > step:
            shutil.rmtree(path)
    (folder / "results.json").unlink()
    return folder


def results(folder: Path) -> dict[str, object]:
    """What the run came to, without times."""
    found = json.loads((folder / "results.json").read_text())
    for summary in (found["decoded_before"], found["decoded"]):
        del summary["tokens_per_second"]
    return found


def rows(folder: Path) -> list[dict[str, float]]:
    """What was measured, without times; decoding comes when it is ready, so sort by step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    measured = [
        {k: v for k, v in json.loads(line).items() if k != "seconds" and not k.startswith("perf/")}
        for line in lines
    ]
    return sorted(measured, key=lambda row: (row["step"], sorted(row)))


def assert_equals(folder: Path, reference: Path) -> None:
    """The same weights, moments, losses, evaluations, nothing twice and nothing missing."""
    for name in ("model", "optimizer"):
        mine, theirs = (
            load_file(path / "checkpoints" / "step-000008" / f"{name}.safetensors")
            for path in (folder, reference)
        )
        assert mine.keys() == theirs.keys()
        assert not [key for key in mine if not torch.equal(mine[key], theirs[key])]
    assert rows(folder) == rows(reference)
    assert results(folder) == results(reference)


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_a_continued_run_has_the_same_bits(launch: Launch, reference: Path, tmp_path: Path) -> None:
    decoding = ("evaluate.decode_prompts=2", "evaluate.decode_interval=4")
    # In the middle of an epoch, at its edge, at the end; with one target and with two.
    for step, ranks, spawn in ((3, 3, False), (5, 2, True), (8, 2, False)):
        folder = killed_after(reference, step, tmp_path / f"from-{step}")
        again = (*SETTINGS, *decoding, "resume=auto", f"output_dir={folder}")
        result = launch(ranks, *again, spawn=spawn, timeout=300)
        assert result.returncode == 0, result.stderr[-3000:]
        assert_equals(folder, reference)


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_another_number_of_drafters_differs_by_rounding_only(
    launch: Launch, reference: Path, tmp_path: Path
) -> None:
    folder = killed_after(reference, 5, tmp_path / "two")
    again = (*SETTINGS, "resume=auto", f"output_dir={folder}", "topology.drafters=2")
    result = launch(3, *again, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    mine, theirs = (
        load_file(path / "checkpoints" / "step-000008" / "model.safetensors")
        for path in (folder, reference)
    )
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], atol=2e-5, rtol=1e-4)
