"""Progress in a log: whole lines, and only where it is time for one."""

import io
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from transformers.utils import logging as loading

from dflash_mp.config import TrainConfig, config_dir, to_config
from dflash_mp.progress import ProgressLines, progress_bar
from dflash_mp.roles import drafter
from dflash_mp.target.model import show_loading


def shown(**options: object) -> str:
    log = io.StringIO()
    with progress_bar(total=4, desc="train", unit="step", file=log, **options) as bar:
        assert isinstance(bar, ProgressLines)
        for number in range(1, 5):
            bar.set_postfix({"loss": number}, refresh=False)
            bar.update()
    return log.getvalue()


def test_every_state_is_a_line() -> None:
    text = shown(mininterval=0)
    assert "\r" not in text
    assert text.endswith("]\n")
    lines = text.splitlines()
    assert all(line.startswith("train:") for line in lines)
    assert [f"{n}/4" for n in (0, 1, 2, 3, 4, 4)] == [
        next(word for word in line.split() if word.endswith("/4")) for line in lines
    ]
    assert "loss=4" in lines[-1]


def test_first_and_last_are_shown_where_no_interval_ends() -> None:
    lines = shown(mininterval=3600).splitlines()
    assert len(lines) == 2
    assert "0/4" in lines[0]
    assert "4/4" in lines[1]


def test_nothing_is_shown_of_a_bar_that_is_off_or_wiped() -> None:
    assert shown(disable=True) == ""
    assert "\r" not in shown(leave=False)


def test_what_is_over_at_once_is_not_shown() -> None:
    assert shown(delay=60, mininterval=0) == ""


@pytest.mark.parametrize("main", [True, False])
def test_the_walk_is_shown_by_the_main_drafter(main: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    at_once = {"delay": 0, "mininterval": 0, "file": log}
    monkeypatch.setattr(drafter, "progress_bar", lambda **given: progress_bar(**given | at_once))
    with initialize_config_dir(config_dir(), version_base="1.3"):
        job = SimpleNamespace(config=to_config(compose("train"), TrainConfig))
    alone = SimpleNamespace(is_main_process=main, device="cpu", reduce=lambda counts, _: counts)
    # Without documents, as when there are more drafters than held-out micro-batches.
    empty = SimpleNamespace(document_ids=torch.full((4,), -1))
    patient = SimpleNamespace(wait=lambda _: None)
    drafter.evaluate_heldout(alone, None, None, [empty] * 3, job, patient)
    assert ("held-out: 100%" in log.getvalue() and "3/3" in log.getvalue()) == main


@pytest.mark.parametrize("rank", ["0", "1"])
def test_loading_is_shown_in_the_same_way_by_one_rank(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As in a process that has loaded nothing yet.
    monkeypatch.setattr(loading, "_tqdm_hook", None)
    monkeypatch.setattr(loading, "_tqdm_active", True)
    monkeypatch.setenv("RANK", rank)
    show_loading()
    with loading.tqdm(["a", "b"], desc="Loading weights") as bar:
        assert list(bar) == ["a", "b"]
        assert isinstance(bar, ProgressLines) == (rank == "0")
    # It took no second.
    assert capsys.readouterr().err == ""
