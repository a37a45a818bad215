"""After the first step and the first walk nothing is compiled again, and what is does not go by."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from dflash_mp.drafter import attention
from dflash_mp.drafter.step import batch_loss
from dflash_mp.features import FeatureBatch
from dflash_mp.recompiles import Recompiles, compiled_graphs, newest_compile
from dflash_mp.simulate import simulate
from dflash_mp.tracking import read_metrics
from tiny_drafter import ANCHORS, DRAFTER, MASK, TAPS, WIDTH, loss_config, make_head, make_model

SLOTS = 150
LOSS = loss_config("ce", "data", True)
TWO_RULES = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 32,
}
"""Layers of different visibility."""
RAGGED = [[70, 31, 40], [150], [2, 3, 20], [9] * 16]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention and its mask are compiled on the CPU, too; with guards, without code."""
    flex = attention._flex
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(attention, "_flex", lambda layout, rule, compiled: flex(layout, rule, True))
    caches = attention._flex_kernel, attention._block_mask_builder
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def ragged_batch(number: int, lengths: list[int], slots: int) -> FeatureBatch:
    """Random documents, some of their tokens supervised."""
    generator = torch.Generator().manual_seed(number)
    padded = [*lengths, slots - sum(lengths)]
    numbers = torch.tensor([*range(len(lengths)), -1], dtype=torch.int32)
    documents = numbers.repeat_interleave(torch.tensor(padded))
    supervised = (torch.rand(slots, generator=generator) < 0.7) & (documents >= 0)
    return FeatureBatch(
        number=number,
        input_ids=torch.randint(0, MASK, (slots,), generator=generator, dtype=torch.int32),
        position_ids=torch.cat([torch.arange(n, dtype=torch.int32) for n in padded]),
        document_ids=documents,
        loss_mask=supervised.to(torch.uint8),
        hidden_states=torch.randn(slots, TAPS * WIDTH, generator=generator),
    )


def make_work() -> tuple[Callable[[int, list[int], int], None], Callable[[list[int]], None]]:
    """A step, without its backward, which FlexAttention does not have on a CPU; and a walk."""
    model, head = make_model("flex", **TWO_RULES), make_head(None)
    model.init_weights(seed=0)
    drafter = replace(DRAFTER, attention="flex", sliding_layers=1, sliding_window=32)

    @torch.no_grad()
    def step(number: int, lengths: list[int], anchors: int = ANCHORS) -> None:
        batch = ragged_batch(number, lengths, SLOTS)
        batch_loss(model, head, batch, MASK, replace(drafter, anchors_per_batch=anchors), LOSS, 0)

    def walk(lengths: list[int]) -> None:
        simulate(ragged_batch(7, lengths, SLOTS), model, head, ANCHORS, 64)

    return step, walk


@pytest.mark.usefixtures("as_on_a_gpu")
def test_steps_and_walks_over_ragged_documents_compile_nothing_again() -> None:
    step, walk = make_work()
    before, recompiles = compiled_graphs(), Recompiles(alone=True)
    for number, lengths in enumerate(RAGGED):
        step(number, lengths)
        recompiles.check("a step")
        if number % 2:
            walk(lengths)
            recompiles.check("a walk")
    assert compiled_graphs() > before
    assert recompiles.value() == 0


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_shape_that_varies_is_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    step, _ = make_work()
    recompiles, among_others = Recompiles(alone=True), Recompiles(alone=False)
    for number, anchors in enumerate((6, 6, 7)):
        step(number, RAGGED[0], anchors)
        recompiles.check("a step")
        among_others.check("a step")
    assert recompiles.value() > 0
    assert among_others.value() is None
    told = [r.getMessage() for r in caplog.records if r.name == "dflash_mp.recompiles"]
    assert len(told) == 1
    assert told[0].startswith("a step: ")
    assert "was compiled again: " in told[0]
    assert "drafter.attention=sdpa" in told[0]


def test_the_newest_compile_is_named_with_its_reason() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = torch.compile(doubled, backend="eager", dynamic=False)
    recompiles = Recompiles(alone=True)
    for rows in (2, 3):
        compiled(torch.ones(rows))
        recompiles.check("work")
    assert recompiles.count == 1
    assert newest_compile().startswith(f"doubled ({__file__}:")
    assert "expected 2, actual 3" in newest_compile()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_job_compiles_its_target_once(launch: Callable, tmp_path: Path) -> None:
    """Though the target decodes in between; what it makes is compared in ``test_compiled``."""
    folder = tmp_path / "run"
    decoded = ("evaluate.decode_prompts=2", "evaluate.decode_interval=2")
    run = launch(2, f"output_dir={folder}", "target.compile=true", *decoded, timeout=280)
    assert run.returncode == 0, run.stderr
    assert "compiled again" not in run.stderr
    rows = [row for row in read_metrics(folder) if "train/loss" in row]
    # A target that is done tells nothing new.
    again = "perf/target_recompiles"
    assert {row[again] for row in rows if again in row} == {0}
    # Of the drafter nothing is compiled.
    assert not any("perf/recompiles" in row for row in rows)
