"""The loss of one micro-batch: anchors, blocks, draft layers, frozen head, weighted sum.

Legend: A blocks, B block size, R supervised rows, H hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash_mp.config import DrafterConfig, LossConfig
from dflash_mp.drafter.anchors import Blocks, make_blocks, sample_anchors
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.features import FeatureBatch
from dflash_mp.losses import (
    HeadRows,
    compute_weight,
    dpace_weights,
    head_loss,
    position_weights,
)

DEFAULT_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass(frozen=True)
class BatchLoss:
    """Sums over one micro-batch; nothing is divided before all of a step's are added up."""

    loss: Tensor
    """Scalar: sum over supervised slots of weight times objective, with its graph."""

    counts: Tensor
    """``[6]`` float64, detached: loss, weight, correct slots, supervised slots, tokens, blocks."""


def decay_gamma(loss: LossConfig, block_size: int) -> float | None:
    """``gamma`` of the position weights; None without decay.

    ``loss.gamma``, or the paper's choice for the block size (section 4 of arXiv 2602.06036).
    """
    if not loss.decay:
        return None
    return loss.gamma or DEFAULT_GAMMA.get(block_size, block_size / 2)


def describe_objective(loss: LossConfig, block_size: int) -> str:
    """The objective with every default filled in, for people."""
    gamma = decay_gamma(loss, block_size)
    if loss.kind == "dpace":
        weights = f"D-PACE weights with alpha {loss.dpace_alpha:g}"
    elif gamma is None:
        weights = "the same weight for every slot"
    else:
        weights = f"weights exp(-(slot - 1) / {gamma:g})"
    return f"{loss.kind}, labels from the {loss.labels}, {weights}"


def batch_loss(
    model: nn.Module,
    head: FrozenHead,
    batch: FeatureBatch,
    mask_token_id: int,
    drafter: DrafterConfig,
    loss: LossConfig,
    seed: int,
) -> BatchLoss:
    """Weighted loss sum of ``batch``; PAD (no documents) gives zero with a complete graph.

    The anchors are a function of ``seed`` and ``batch.number``.
    """
    anchors, valid = sample_anchors(batch, drafter.anchors_per_batch, seed)
    blocks = make_blocks(batch, anchors, valid, drafter.block_size, mask_token_id)
    return blocks_loss(model, head, batch, blocks, loss)


def blocks_loss(
    model: nn.Module, head: FrozenHead, batch: FeatureBatch, blocks: Blocks, loss: LossConfig
) -> BatchLoss:
    """``batch_loss`` for blocks that have been chosen already."""
    weight = compute_weight(head.weight)

    def objective(hidden: Tensor, some: Blocks, rows: Tensor) -> tuple[Tensor, Tensor]:
        through_head = HeadRows(
            hidden,
            weight,
            some.labels.take(rows) if loss.labels == "data" else None,
            target_rows(batch, some, rows) if loss.reads_target else None,
            head.softcap,
        )
        return weighted_sum(through_head, some, rows, loss)

    value, counts = model(
        head.embed(blocks.input_ids),
        batch.hidden_states,
        batch.position_ids,
        blocks,
        blocks.supervised,
        objective,
    )
    tokens = (batch.document_ids >= 0).sum(dtype=torch.float64)
    there = torch.stack([tokens, blocks.valid.sum(dtype=torch.float64)])
    return BatchLoss(value, torch.cat([counts, there]))


def weighted_sum(
    through_head: HeadRows, blocks: Blocks, rows: Tensor, loss: LossConfig
) -> tuple[Tensor, Tensor]:
    """Sum over supervised slots of weight times objective.

    Args:
        through_head: the slots ``rows``.
        blocks: whole blocks, all of a batch's or some.
        rows: ``[R]`` flat indices of those slots; what is not supervised in them weighs nothing.
        loss: which objective.

    Returns:
        The sum with its graph, and ``[4]`` float64: its value, weight, correct slots, supervised
        slots.
    """
    kind = "ce" if loss.kind == "dpace" else loss.kind
    loss_rows, correct_rows = head_loss(through_head, kind, loss.rows_per_chunk)  # [R]
    supervised = blocks.supervised  # [A, B]
    weights = supervised.float()  # [A, B]
    if loss.kind == "dpace":
        ce = torch.zeros_like(weights).flatten().index_copy(0, rows, loss_rows.detach())
        weights = dpace_weights(ce.view_as(weights), supervised, loss.dpace_alpha)
        total = supervised.sum()
    else:
        block_size = supervised.shape[1]
        gamma = decay_gamma(loss, block_size)
        weights = weights * position_weights(block_size, gamma, weights.device)
        total = weights.sum()
    value = (weights.take(rows) * loss_rows).sum()
    correct = (correct_rows & supervised.take(rows)).sum()
    counts = (value.detach(), total, correct, supervised.sum())
    return value, torch.stack([count.double() for count in counts])


def target_rows(batch: FeatureBatch, blocks: Blocks, rows: Tensor) -> Tensor:
    """``[R, H]`` input of the target's head from which it predicts the label of each slot.

    The label of slot ``k`` is the token at ``anchor + k``; the target names it one position before.

    Args:
        batch: with ``final_hidden``.
        blocks: of this batch.
        rows: ``[R]`` flat indices of the slots that are asked for, slot 0 not among them.

    Raises:
        ValueError: the batch came without ``final_hidden``.
    """
    final = batch.final_hidden
    if final is None:
        raise ValueError("the objective needs final_hidden, but the batch came without")
    slot = torch.arange(blocks.input_ids.shape[1], device=rows.device)  # [B]
    before = (blocks.anchors[:, None] + slot - 1).clamp(max=final.shape[0] - 1)  # [A, B]
    return final[before.take(rows)]
