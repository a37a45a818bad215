"""Simulated acceptance: where decoding would stop on a text that is already there.

The text of a response is its supervised tokens. Each contiguous supervised span is one response:
its first token comes from the target's prefill, the rest in cycles; a supervised stop token belongs
to it. On the target's own greedy text the cycles are those of real greedy decoding.

Shapes: S token slots of a packed row, A anchors of one pass, B block size, H hidden size,
R supervised slots of one pass.
"""

import torch
from torch import Tensor

from dflash_mp.drafter.anchors import anchor_candidates, make_blocks
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.features import FeatureBatch
from dflash_mp.losses import HeadRows, head_loss
from dflash_mp.metrics import (
    BlockCounts,
    block_counts,
    empty_counts,
    leading_runs,
    walk,
    walk_counts,
)


def simulate(
    batch: FeatureBatch,
    drafter: DFlashDraftModel,
    head: FrozenHead,
    anchors_per_pass: int,
    rows_per_chunk: int,
) -> tuple[BlockCounts, list[list[int]]]:
    """Draft from every anchor of every response in ``batch`` and walk over the responses.

    ``anchors_per_pass`` blocks go through the drafter at once, ``rows_per_chunk`` slots through the
    head. Returns counts, to be added over batches and ranks, and for each response the tokens that
    each cycle commits.
    """
    block_size = drafter.config.block_size
    counts = empty_counts(block_size)
    runs = torch.zeros(batch.input_ids.numel(), dtype=torch.int64)  # [S]
    for anchors, valid in _passes(anchor_candidates(batch), anchors_per_pass):
        correct, supervised, cross_entropy = draft_blocks(
            batch, drafter, head, anchors, valid, rows_per_chunk
        )
        counts += block_counts(correct, supervised, cross_entropy)
        runs[anchors[valid].cpu()] = leading_runs(correct, supervised)[valid].cpu()
    cycles = [walk(runs[start:stop].tolist()) for start, stop in response_spans(batch)]
    for committed in cycles:
        counts += walk_counts(committed, block_size)
    return counts, cycles


@torch.no_grad()
def draft_blocks(
    batch: FeatureBatch,
    drafter: DFlashDraftModel,
    head: FrozenHead,
    anchors: Tensor,
    valid: Tensor,
    rows_per_chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft one block from each of ``anchors [A]`` and compare it with the text.

    Returns ``correct [A, B]`` and ``supervised [A, B]`` bool, and the cross-entropy ``[R]`` of the
    supervised slots.
    """
    config = drafter.config
    mask_token_id = config.dflash_config["mask_token_id"]
    blocks = make_blocks(batch, anchors, valid, config.block_size, mask_token_id)
    dtype = next(drafter.parameters()).dtype
    rows = blocks.supervised
    hidden = drafter(
        head.embed(blocks.input_ids).to(dtype),
        batch.hidden_states.to(dtype),
        batch.position_ids,
        blocks,
        rows,
    )  # [R, H]
    drafted = HeadRows(hidden, head.weight, blocks.labels[rows], softcap=head.softcap)
    judged = head_loss(drafted, "ce", rows_per_chunk)
    correct = torch.zeros_like(rows)  # [A, B]
    correct[rows] = judged.correct
    return correct, rows, judged.loss


def response_spans(batch: FeatureBatch) -> list[tuple[int, int]]:
    """``(start, stop)`` row indices of each contiguous supervised span of one document."""
    marked = torch.where(batch.loss_mask != 0, batch.document_ids, -1).tolist()  # [S]
    spans = []
    start = 0
    for index in range(1, len(marked) + 1):
        if index == len(marked) or marked[index] != marked[start]:
            if marked[start] >= 0:
                spans.append((start, index))
            start = index
    return spans


def _passes(candidates: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """All candidate slots in groups of exactly ``size``; the last group is filled with padding."""
    anchors = candidates.nonzero().flatten()  # [all]
    padding = -len(anchors) % size
    valid = torch.ones_like(anchors, dtype=torch.bool)
    # Padding points at the last slot, so that anchors stay in ascending order.
    anchors = torch.cat([anchors, anchors.new_full((padding,), len(candidates) - 1)])
    valid = torch.cat([valid, valid.new_zeros(padding)])
    return list(zip(anchors.split(size), valid.split(size), strict=True))
