"""Losses and gradient norms against the peers' own, each with that peer's normaliser."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from golden_rows import GOLDEN
from safetensors import safe_open
from torch import Tensor

from dflash_mp.drafter.anchors import Blocks
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.features import FeatureBatch
from dflash_mp.losses import HeadRows, dpace_weights, head_loss, position_weights

GoldenRow = Callable[[str, int], tuple[FeatureBatch, Blocks]]


def row_losses(
    model: DFlashDraftModel,
    head: FrozenHead,
    row: tuple[FeatureBatch, Blocks],
    kind: str = "ce",
    from_target: bool = False,
) -> Tensor:
    """``[A, B]`` objective at supervised slots, 0 elsewhere."""
    batch, blocks = row
    hidden = model(head.embed(blocks.input_ids), batch.hidden_states, batch.position_ids, blocks)
    target = None
    if from_target:
        # Stored before the target's final norm; the row before the label predicts the label.
        with safe_open(GOLDEN / "target" / "model.safetensors", "pt") as file:
            norm = file.get_tensor("model.norm.weight").float()
        final = torch.nn.functional.rms_norm(batch.final_hidden, norm.shape, norm, 1e-6)
        block, slot = blocks.supervised.nonzero(as_tuple=True)
        target = final[blocks.anchors[block] + slot - 1]
    labels = None if from_target else blocks.labels[blocks.supervised]
    rows = HeadRows(hidden[blocks.supervised], head.weight, labels, target)
    loss = head_loss(rows, kind, rows_per_chunk=5).loss
    return torch.zeros(blocks.labels.shape).masked_scatter(blocks.supervised, loss)


def gradient_norm(model: DFlashDraftModel, loss: Tensor) -> float:
    model.zero_grad()
    loss.backward()
    return torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()


@pytest.mark.parametrize("gamma", [7.0, None])
@pytest.mark.parametrize("case", ["main", "full", "tail"])
def test_cross_entropy_equals_specforge_and_torchspec(
    case: str,
    gamma: float | None,
    drafter: DFlashDraftModel,
    head: FrozenHead,
    golden_row: GoldenRow,
    runs: dict[str, Any],
    outputs: dict[str, Tensor],
):
    weights = position_weights(8, gamma)
    rows = [golden_row(case, row) for row in range(2)]
    total = sum((row_losses(drafter, head, row) * weights).sum() for row in rows)
    norm = sum((row[1].supervised * weights).sum() for row in rows)
    grad_norm = gradient_norm(drafter, total / norm)
    for golden in (
        runs["specforge"][f"{case}.sdpa.gamma{gamma}"],
        runs["torchspec"][f"{case}.masked.gamma{gamma}"],
    ):
        assert (total / norm).item() == pytest.approx(golden["loss"], abs=1e-5)
        assert grad_norm == pytest.approx(golden["grad_norm"], rel=1e-5)
    assert norm.item() == pytest.approx(runs["specforge"][f"{case}.sdpa.gamma{gamma}"]["loss_den"])
    if gamma == 7.0:
        gradients = {
            key.removeprefix(f"specforge.{case}.grad."): value
            for key, value in outputs.items()
            if key.startswith(f"specforge.{case}.grad.")
        }
        assert gradients
        for name, golden_gradient in gradients.items():
            ours = drafter.get_parameter(name).grad
            torch.testing.assert_close(ours, golden_gradient, atol=1e-6, rtol=1e-5)


def test_dpace_equals_specforge(
    drafter: DFlashDraftModel, head: FrozenHead, golden_row: GoldenRow, runs: dict[str, Any]
):
    total = torch.zeros(())
    for row in (golden_row("full", 0), golden_row("full", 1)):
        ce = row_losses(drafter, head, row)
        total = total + (ce * dpace_weights(ce, row[1].supervised, alpha=0.5)).sum()
    golden = runs["specforge"]["full.sdpa.dpace"]["loss"]
    assert (total / 2).item() == pytest.approx(golden, rel=1e-6)


@pytest.mark.parametrize("peer", ["speculators_checkout", "speculators_pypi"])
@pytest.mark.parametrize(
    ("where", "theirs", "ours"),
    [
        (("full", 0), "ce.gamma4", "ce"),
        (("full", 1), "ce.gamma4", "ce"),
        (("full", 0), "kl_div.gamma4", "kl"),
        (("full", 1), "kl_div.gamma4", "kl"),
        (("main", 1), "kl_div.gamma4", "kl"),
        (("full", 0), "tv.gamma4", "tv"),
        (("full", 1), "tv.gamma4", "tv"),
        (("full", 0), "ce.dpace", "dpace"),
    ],
)
def test_labels_from_the_target_equal_speculators(
    where: tuple[str, int],
    theirs: str,
    ours: str,
    peer: str,
    drafter: DFlashDraftModel,
    head: FrozenHead,
    golden_row: GoldenRow,
    runs: dict[str, Any],
):
    golden = runs[peer]["{}.row{}.sdpa.{}".format(*where, theirs)]
    here = golden_row(*where)
    supervised = here[1].supervised
    losses = row_losses(drafter, head, here, "ce" if ours == "dpace" else ours, from_target=True)
    weights = (
        dpace_weights(losses, supervised, alpha=0.5)
        if ours == "dpace"
        else position_weights(8, 4.0)
    )
    loss = (losses * weights).sum() / (supervised.sum() + 1e-5)
    assert loss.item() == pytest.approx(golden["loss"], abs=2e-6)
    assert gradient_norm(drafter, loss) == pytest.approx(golden["grad_norm"], rel=1e-5)
