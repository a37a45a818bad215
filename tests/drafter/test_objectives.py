"""The loss of a micro-batch, every objective, against plain loops over slots in float64."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode

import dflash_mp.drafter.model
from dflash_mp.config import LossConfig, UserError
from dflash_mp.drafter.anchors import sample_anchors
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.model import DFlashDraftModel, DraftCache
from dflash_mp.drafter.step import BatchLoss, batch_loss, describe_objective
from dflash_mp.features import FeatureBatch
from tiny_drafter import (
    ALPHA,
    ANCHORS,
    BLOCK,
    DRAFTER,
    LENGTHS,
    MASK,
    loss_config,
    make_batch,
    make_head,
    make_model,
)


@pytest.fixture
def model() -> DFlashDraftModel:
    model = make_model()
    model.init_weights(seed=0)
    return model


def slot_loss(kind: str, q: Tensor, p: Tensor, label: int) -> Tensor:
    """One slot's objective from the two distributions ``[V]``."""
    if kind in ("ce", "dpace"):
        return -q[label].log()
    if kind == "tv":
        return (p - q).abs().sum() / 2
    kl = (p * (p.log() - q.log())).sum()
    return kl if kind == "kl" else kl - q[label].log()


def plain_loss(
    model: DFlashDraftModel, head: FrozenHead, batch: FeatureBatch, loss: LossConfig
) -> tuple[Tensor, list[float]]:
    """Loss sum, and loss, weight, correct slots, supervised slots, tokens and blocks.

    One block and one slot at a time.
    """
    anchors, valid = sample_anchors(batch, ANCHORS, seed=0)
    starts = [0, LENGTHS[0]]
    total, weight, correct, slots = torch.zeros((), dtype=torch.float64), 0.0, 0, 0
    for anchor in anchors[valid].tolist():
        document = int(batch.document_ids[anchor])
        start, end = starts[document], starts[document] + LENGTHS[document]
        ids = torch.full((BLOCK,), MASK)
        ids[0] = batch.input_ids[anchor]
        features = batch.hidden_states[start:anchor].double()
        hidden = model.draft(head.embed(ids), features, DraftCache())
        values: list[Tensor] = []
        factors: list[tuple[int, Tensor]] = []
        for k in range(1, BLOCK):
            if anchor + k >= end or not batch.loss_mask[anchor + k]:
                continue
            q = head.logits(hidden[k]).softmax(-1)
            p = head.logits(batch.final_hidden[anchor + k - 1].double()).softmax(-1)
            label = int(batch.input_ids[anchor + k] if loss.labels == "data" else p.argmax())
            values.append(slot_loss(loss.kind, q, p, label))
            factors.append((k, q[label].detach()))
            correct += int(q.argmax() == label)
            slots += 1
        for j, value in enumerate(values):
            if loss.kind == "dpace":
                reached = [(1 - ALPHA) * q + ALPHA for _, q in factors]
                w = sum(float(torch.stack(reached[: m + 1]).prod()) for m in range(j, len(values)))
                weight += 1
            else:
                w = math.exp(-(factors[j][0] - 1) / loss.gamma) if loss.decay else 1.0
                weight += w
            total = total + w * value
    counts = [float(total.detach()), weight, correct, slots, sum(LENGTHS), int(valid.sum())]
    return total, counts


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("per_slice", [2, 32])
@pytest.mark.parametrize("labels", ["data", "target"])
@pytest.mark.parametrize(
    ("kind", "decay"),
    [
        ("ce", True),
        ("ce", False),
        ("dpace", False),
        ("kl", True),
        ("kl", False),
        ("tv", True),
        ("ce+kl", True),
    ],
)
def test_batch_loss_equals_plain_loops(
    model: DFlashDraftModel,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    decay: bool,
    labels: str,
    per_slice: int,
    softcap: float | None,
) -> None:
    monkeypatch.setattr(dflash_mp.drafter.model, "BLOCKS_PER_SLICE", per_slice)
    loss = loss_config(kind, labels, decay)
    batch, head = make_batch(), make_head(softcap)
    twin = deepcopy(model).double()
    expected, counts = plain_loss(twin, deepcopy(head).double(), batch, loss)
    expected.backward()

    out = batch_loss(model, head, batch, MASK, DRAFTER, loss, seed=0)
    out.loss.backward()

    assert out.counts.tolist() == pytest.approx(counts, rel=1e-5)
    assert counts[3] > 10
    for name, parameter in model.named_parameters():
        gradient = twin.get_parameter(name).grad
        scale = float(gradient.abs().max())
        torch.testing.assert_close(parameter.grad.double(), gradient, atol=1e-4 * scale, rtol=1e-4)


def step_without_values(attention: str, kind: str) -> BatchLoss:
    """A forward on tensors that have shapes but no values; asking for one raises.

    Without a backward: FlexAttention has none on the CPU.
    """
    real = make_batch()
    with FakeTensorMode() as mode, torch.no_grad():
        tensors = {k: mode.from_tensor(v) for k, v in vars(real).items() if isinstance(v, Tensor)}
        batch, loss = replace(real, **tensors), loss_config(kind, "data", False)
        return batch_loss(
            make_model(attention), make_head(None), batch, MASK, DRAFTER, loss, seed=0
        )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", ["ce", "dpace", "kl"])
def test_with_flex_the_host_needs_no_value_of_the_device(kind: str) -> None:
    out = step_without_values("flex", kind)
    assert isinstance(out.loss, FakeTensor)
    assert (out.loss.shape, out.counts.shape) == ((), (6,))


def test_a_step_that_asks_for_a_value_is_noticed() -> None:
    with pytest.raises(DynamicOutputShapeException):
        step_without_values("sdpa", "ce")


def test_gradients_are_scaled_and_added_up(model: DFlashDraftModel) -> None:
    loss, head = loss_config("ce", "data", True), make_head(None)
    once = [p.clone() for p in gradients(model, head, loss, [1.0])]
    for single, sum_of_two in zip(once, gradients(model, head, loss, [3.0, 0.5]), strict=True):
        torch.testing.assert_close(sum_of_two, 3.5 * single, atol=1e-5, rtol=1e-4)


class Kept:
    """A tensor that autograd keeps for the backward; knows the most bytes kept at a time."""

    now = peak = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        Kept.now += tensor.nbytes
        Kept.peak = max(Kept.peak, Kept.now)

    def __del__(self) -> None:
        Kept.now -= self.tensor.nbytes


def test_activations_of_one_slice_exist_at_a_time(
    model: DFlashDraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, peaks = loss_config("ce", "data", True), []
    for per_slice in (6, 2):
        monkeypatch.setattr(dflash_mp.drafter.model, "BLOCKS_PER_SLICE", per_slice)
        Kept.now = Kept.peak = 0
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            batch_loss(model, make_head(None), make_batch(), MASK, DRAFTER, loss, seed=0)
        peaks.append(Kept.peak)
    # What the context keeps is there all the time.
    assert peaks[1] < 0.6 * peaks[0]


def test_checkpointing_keeps_less_and_gives_the_same_bits(model: DFlashDraftModel) -> None:
    loss, head, found = loss_config("ce", "data", True), make_head(None), []
    for recompute in (False, True):
        model.recompute = recompute
        Kept.now = Kept.peak = 0
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
            found.append([p.clone() for p in gradients(model, head, loss, [1.0])])
            found.append(Kept.peak)
    plain, peak, again, lower = found
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    assert lower < 0.6 * peak


def gradients(
    model: DFlashDraftModel, head: FrozenHead, loss: LossConfig, factors: list[float]
) -> list[Tensor]:
    model.zero_grad()
    for factor in factors:
        out = batch_loss(model, head, make_batch(), MASK, DRAFTER, loss, seed=0)
        (factor * out.loss).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "labels", "reads"),
    [
        ("ce", "data", False),
        ("dpace", "data", False),
        ("ce", "target", True),
        ("dpace", "target", True),
        ("kl", "data", True),
        ("tv", "data", True),
        ("ce+kl", "data", True),
    ],
)
def test_what_the_target_has_to_send(kind: str, labels: str, reads: bool) -> None:
    assert loss_config(kind, labels, decay=False).reads_target is reads


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (loss_config("ce", "data", True, None), "ce, labels from the data, weights exp(-(slot - 1"),
        (loss_config("kl", "target", True, None), "/ 4)"),
        (loss_config("tv", "target", False), "the same weight for every slot"),
        (loss_config("dpace", "data", False), "D-PACE weights with alpha 0.3"),
    ],
)
def test_the_objective_is_told_with_its_defaults(loss: LossConfig, said: str) -> None:
    assert said in describe_objective(loss, block_size=8)


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(UserError, match=r"use loss=dpace, or set loss\.decay=false"):
        loss_config("dpace", "data", decay=True)
    with pytest.raises(UserError, match=r"loss\.labels=self"):
        loss_config("ce", "self", decay=True)
