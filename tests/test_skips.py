"""A micro-batch that cannot be used is left out by all, counted and named."""

import json
import logging
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_mp.features import FeatureBatch
from dflash_mp.roles.skips import SKIP_ADVICE, SkippedTooMany, Skips
from dflash_mp.roles.target import fill_in_parts, finite
from dflash_mp.warn_once import warn_once
from dflash_mp.wire.stream import UNSENT_ADVICE

Start = Callable[..., subprocess.CompletedProcess]


def packed(lengths: list[int], padding: int = 2) -> FeatureBatch:
    """A row of documents of these lengths, hidden states still zero."""
    documents = [number for number, length in enumerate(lengths) for _ in range(length)]
    ids = torch.tensor(documents + [-1] * padding, dtype=torch.int32)
    zeros = torch.zeros_like(ids)
    return FeatureBatch(7, zeros, zeros, ids, zeros.to(torch.uint8), torch.zeros(len(ids), 3))


class Cramped:
    """An extractor that runs out of memory above ``limit`` tokens."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.sizes: list[int] = []

    def fill(self, frame: FeatureBatch, _: int | None) -> None:
        tokens = int((frame.document_ids >= 0).sum())
        if tokens > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.sizes.append(tokens)
        frame.hidden_states[:tokens] = frame.document_ids[:tokens, None].float() + 1


def test_a_batch_that_does_not_fit_is_filled_in_parts() -> None:
    batch, cramped = packed([3, 5, 2, 4, 1]), Cramped(6)
    assert fill_in_parts(cramped, batch)
    assert sum(cramped.sizes) == 15
    assert max(cramped.sizes) <= 6
    expected = (batch.document_ids.float() + 1).clamp(min=0)
    assert torch.equal(batch.hidden_states[:, 0], expected)


def test_a_document_that_does_not_fit_alone_is_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    assert not fill_in_parts(Cramped(4), packed([3, 5, 2]))
    assert "out of memory on 1 documents at once" in caplog.text


def test_what_comes_again_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("dflash_mp.test")
    with caplog.at_level("INFO"):
        for number in range(3):
            warn_once(log, f"micro-batch {number}", "do this")
        warn_once(log, "something else", "do that")
    said = [(record.levelname, record.getMessage().split(" (")[0]) for record in caplog.records]
    assert said == [
        ("WARNING", "micro-batch 0; do this"),
        ("INFO", "micro-batch 1"),
        ("INFO", "micro-batch 2"),
        ("WARNING", "something else; do that"),
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_seen(value: float) -> None:
    batch = packed([40])
    assert bool(finite(batch))
    batch.hidden_states[31, 2] = value
    assert not bool(finite(batch))


def test_a_run_of_skips_ends_the_job_and_a_good_batch_breaks_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    skips = Skips(3)
    for number, reason in enumerate(("x", "x", "", "x", "x"), start=1):
        skips.note(number, reason)
    with pytest.raises(SkippedTooMany, match=r"3 micro-batches in a row.*the last one, 6"):
        skips.note(6, "its loss is nan")
    assert "micro-batch 4 is skipped: x" in caplog.text


@pytest.fixture
def launch_two_drafters(launch: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> Start:
    """``start(kind, *overrides)``: a job of ``unusable_batch`` with two drafters."""
    script = Path(__file__).parent / "unusable_batch.py"
    # Without a cache: the features of one epoch are not those of the next.
    two = ("topology.drafters=2", "micro_batches_per_step=4", "features.cache=off")

    def start(kind: str, *overrides: str, ranks: int = 3) -> subprocess.CompletedProcess:
        monkeypatch.setenv("UNUSABLE", kind)
        return launch(ranks, *two, *overrides, script=script, timeout=240)

    return start


@pytest.mark.distributed
def test_bad_features_and_a_bad_loss_leave_out_the_same(
    launch_two_drafters: Start, tmp_path: Path
) -> None:
    """By two ways, on a target and on a drafter: as if the micro-batch were not there.

    Each drafter leaves one out, and one target or both: the job warns of each kind once.
    """
    weights = {}
    for kind, targets in (("features", 2), ("loss", 1)):
        folder = tmp_path / kind
        more = (f"output_dir={folder}", f"topology.targets={targets}")
        result = launch_two_drafters(kind, *more, ranks=2 + targets)
        said = result.stdout + result.stderr
        assert result.returncode == 0, said[-3000:]
        logs = "".join(path.read_text() for path in folder.glob("rank*.log"))
        for number in (4, 7):
            assert logs.count(f"micro-batch {number} is skipped") == 1
        assert said.count(SKIP_ADVICE) == 1
        assert said.count(UNSENT_ADVICE) == (kind == "features")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["train/skipped"] for row in rows if "train/skipped" in row] == [0, 2, 0, 0]
        (last,) = sorted((folder / "checkpoints").glob("step-*"))[-1:]
        weights[kind] = load_file(last / "model.safetensors")
    assert all(torch.isfinite(value).all() for value in weights["loss"].values())
    assert all(
        torch.equal(value, weights["loss"][name]) for name, value in weights["features"].items()
    )


@pytest.mark.distributed
def test_a_job_without_a_finite_loss_ends_with_one_cause(launch_two_drafters: Start) -> None:
    result = launch_two_drafters("diverged", "steps=1000", "failure.max_skips=3")
    said = result.stdout + result.stderr
    assert result.returncode != 0
    (cause,) = set(re.findall(r"ROOT CAUSE: .*", said))
    # A drafter has two in a step, and both drafters are at the same one.
    assert re.search(r"SkippedTooMany: 3 .* the last one, [45], because its loss is nan", cause)
