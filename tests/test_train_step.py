"""A drafter's step in one process: what is left out of it, and that the host waits for nothing."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.attention import flex_attention

from dflash_mp.config import ScheduleConfig
from dflash_mp.drafter.step import BatchLoss
from dflash_mp.features import FeatureBatch
from dflash_mp.optim import build_schedule
from dflash_mp.roles import step as step_module
from dflash_mp.roles.skips import Gate, SkippedTooMany, Skips
from dflash_mp.roles.step import Learner, train_step
from dflash_mp.wire.plan import Frame, Kind
from tiny import LAUNCHED
from tiny_drafter import DRAFTER, MASK, loss_config, make_batch, make_head, make_model

PER_STEP = 3
JOB: Any = SimpleNamespace(
    config=SimpleNamespace(
        drafter=DRAFTER,
        loss=loss_config("ce", "data", True),
        seed=0,
        optim=SimpleNamespace(max_grad_norm=1.0),
    ),
    mask_token_id=MASK,
    plan=SimpleNamespace(step_frames=PER_STEP),
)
SENTINEL: Any = SimpleNamespace(wait=lambda what: None)
Frames = Iterator[tuple[Frame, FeatureBatch]]
Bad = Callable[[dict[int, float]], None]


@pytest.fixture(autouse=True)
def own_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No rank, and no state of Accelerate's from, or for, other tests."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def bad(monkeypatch: pytest.MonkeyPatch) -> Bad:
    """``bad(factors)``: the micro-batches of these numbers come out times a factor."""
    plain = step_module.batch_loss

    def arm(factors: dict[int, float]) -> None:
        def spoiled(model: Any, head: Any, batch: FeatureBatch, *rest: Any) -> BatchLoss:
            out = plain(model, head, batch, *rest)
            factor = factors.get(batch.number, 1.0)
            return replace(out, loss=out.loss * factor, counts=out.counts * factor)

        monkeypatch.setattr(step_module, "batch_loss", spoiled)

    return arm


def make_learner(attention: str = "sdpa", max_skips: int = 100) -> Learner:
    # What has no values cannot be moved.
    accelerator = Accelerator(cpu=True, device_placement=False)
    model = make_model(attention)
    model.init_weights(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = build_schedule(optimizer, 10, ScheduleConfig("constant", 0.0, 0.0, 0.0))
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    gate = Gate(model.parameters(), accelerator.device)
    head, skips = make_head(None), Skips(max_skips)
    return Learner(accelerator, model, wrapped, optimizer, schedule, head, gate, skips)


def frames(steps: int, missing: tuple[int, ...] = ()) -> Frames:
    """Micro-batches 0, 1, 2 ...; a target could not make the ``missing`` ones."""
    for number in range(PER_STEP * steps):
        batch = replace(make_batch(), number=number)
        kind = Kind.SKIP if number in missing else Kind.TRAIN
        if kind is Kind.SKIP:
            nothing = torch.full_like(batch.document_ids, -1)
            batch = replace(batch, number=-1, document_ids=nothing)
        yield Frame(0, number, kind, number), batch


def train(stream: Frames, steps: int, max_skips: int = 100) -> tuple[list[Tensor], list[Tensor]]:
    """Weights behind ``steps`` steps, and the counts of each."""
    learner = make_learner(max_skips=max_skips)
    counts = [train_step(learner, stream, JOB, SENTINEL) for _ in range(steps)]
    learner.skips.settle()
    return [parameter.detach() for parameter in learner.model.parameters()], counts


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("numbers", [(0,), (1,), (2,), (0, 1), (3, 4, 5)])
def test_a_loss_that_is_not_finite_counts_as_if_its_batch_were_not_there(
    bad: Bad, factor: float, numbers: tuple[int, ...]
) -> None:
    expected = train(frames(3, missing=numbers), 3)
    bad(dict.fromkeys(numbers, factor))
    found = train(frames(3), 3)
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert sum(int(counts[6]) for counts in found[1]) == len(numbers)
    assert all(bool(torch.isfinite(weight).all()) for weight in found[0])


@pytest.mark.parametrize("usable", [True, False])
def test_a_gate_lets_all_bits_pass_or_none_at_all(usable: bool) -> None:
    learner = make_learner()
    parameters = list(learner.model.parameters())
    step_module.loss_of(learner, make_batch(), JOB).loss.backward()
    plain = [parameter.grad for parameter in parameters]
    learner.model.zero_grad()
    loss = step_module.loss_of(learner, make_batch(), JOB).loss * (1.0 if usable else torch.nan)
    with learner.gate.open_if(torch.tensor(usable)):
        loss.backward()
    for parameter, gradient in zip(parameters, plain, strict=True):
        assert torch.equal(parameter.grad, gradient if usable else torch.zeros_like(gradient))


@pytest.mark.parametrize(
    ("limit", "numbers", "missing", "last", "known"),
    [
        (3, (2, 3, 4, 5), (), 4, 9),
        (3, (0, 1), (2,), 2, 6),
        (2, (0, 10, 11), (), 11, 12),
        (1, (), (5,), 5, 9),
    ],
    ids=["over a step's end", "of both kinds", "in the last step", "one is too many"],
)
def test_the_micro_batch_that_was_one_too_many_is_named(
    bad: Bad, limit: int, numbers: tuple[int, ...], missing: tuple[int, ...], last: int, known: int
) -> None:
    bad(dict.fromkeys(numbers, float("nan")))
    stream = frames(5, missing)
    reason = "its target could not" if last in missing else "its loss is nan"
    said = rf"{limit} micro-batches in a row .* the last one, {last}, because {reason}"
    with pytest.raises(SkippedTooMany, match=said):
        train(stream, 4, limit)
    # A step late, and not later.
    assert next(stream)[0].number == known


def test_a_good_micro_batch_breaks_the_row(bad: Bad) -> None:
    bad(dict.fromkeys((0, 1, 3, 4, 6, 7), float("nan")))
    _, counts = train(frames(3), 3, max_skips=3)
    assert sum(int(count[6]) for count in counts) == 6


def step_without_values(monkeypatch: pytest.MonkeyPatch, attention: str) -> tuple[Learner, Tensor]:
    """A whole step on tensors that have shapes but no values; asking for one raises."""
    # FlexAttention refuses a backward on the CPU, where no kernel would have to run.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    real = list(frames(1, missing=(1,)))
    with FakeTensorMode() as mode:
        learner = make_learner(attention)
        stream = iter(
            (
                frame,
                replace(
                    batch,
                    **{
                        name: mode.from_tensor(value)
                        for name, value in vars(batch).items()
                        if isinstance(value, Tensor)
                    },
                ),
            )
            for frame, batch in real
        )
        return learner, train_step(learner, stream, JOB, SENTINEL)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_with_flex_the_host_needs_no_value_of_a_step_before_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner, counts = step_without_values(monkeypatch, "flex")
    assert isinstance(counts, FakeTensor)
    assert counts.shape == (8,)
    # Now, not before, it asks for the losses.
    with pytest.raises(DataDependentOutputException):
        learner.skips.settle()


def test_a_step_that_asks_for_a_value_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DynamicOutputShapeException):
        step_without_values(monkeypatch, "sdpa")
