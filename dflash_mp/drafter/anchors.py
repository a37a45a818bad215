"""Where blocks start in a packed row, and what each block is given and asked for.

A block is the token at its anchor followed by ``B - 1`` mask tokens. Slot ``k`` is trained to
name the token at ``anchor + k`` (no shift); slot 0 is known and never trained. Everything a block
sees or is trained on lies in the anchor's own document.

Legend: S token slots of the packed row, A anchor slots, B block size.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_mp.features import FeatureBatch


@dataclass(frozen=True)
class Blocks:
    """The blocks of one packed row. Padding slots of ``A`` have ``valid`` False."""

    anchors: Tensor
    """``[A]`` int64 row index of each block's known first token, ascending."""

    valid: Tensor
    """``[A]`` bool, False where the slot holds no block."""

    context_start: Tensor
    """``[A]`` int64 row index where the anchor's document starts."""

    input_ids: Tensor
    """``[A, B]`` int64: the anchor's token, then mask tokens."""

    position_ids: Tensor
    """``[A, B]`` int64 positions inside the document."""

    labels: Tensor
    """``[A, B]`` int64 token at ``anchor + k``; 0 where that lies outside the document."""

    supervised: Tensor
    """``[A, B]`` bool, True where the label enters the loss."""


def select_blocks(blocks: Blocks, index: Tensor | slice) -> Blocks:
    """Some of the blocks, by number."""
    return Blocks(**{name: value[index] for name, value in vars(blocks).items()})


def anchor_candidates(batch: FeatureBatch) -> Tensor:
    """``[S]`` bool: slots whose token and next token are supervised in the same document."""
    supervised = (batch.loss_mask != 0) & (batch.document_ids >= 0)  # [S]
    same_document = batch.document_ids[:-1] == batch.document_ids[1:]  # [S - 1]
    candidates = torch.zeros_like(supervised)
    candidates[:-1] = supervised[:-1] & supervised[1:] & same_document
    return candidates


def sample_anchors(batch: FeatureBatch, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw up to ``count`` anchors uniformly without replacement.

    The draw is a function of ``seed`` and ``batch.number``, so it is fresh in every epoch and the
    same whatever the split into ranks.

    Returns:
        ``anchors [count]`` int64, ascending, and ``valid [count]`` bool. With fewer candidates
        than ``count`` the last slots are invalid and point at the row's last slot, which is never
        a candidate.
    """
    device = batch.input_ids.device
    candidates = anchor_candidates(batch)  # [S]
    last = candidates.numel() - 1
    generator = torch.Generator(device).manual_seed(_mix(seed, batch.number))
    priority = torch.rand(candidates.numel(), generator=generator, device=device)  # [S]
    priority = torch.where(candidates, priority, -1.0)
    taken = min(count, candidates.numel())
    best, slots = priority.topk(taken)  # [taken]
    anchors = torch.full((count,), last, dtype=torch.int64, device=device)
    anchors[:taken] = torch.where(best >= 0, slots, last)
    anchors = anchors.sort().values
    return anchors, anchors != last


def make_blocks(
    batch: FeatureBatch, anchors: Tensor, valid: Tensor, block_size: int, mask_token_id: int
) -> Blocks:
    """Build inputs, positions, labels and supervision of the blocks at ``anchors [A]``."""
    anchors = anchors.long()
    slot = torch.arange(block_size, device=anchors.device)  # [B]
    last = batch.input_ids.numel() - 1
    row = anchors[:, None] + slot  # [A, B]
    inside = row <= last
    row = row.clamp(max=last)
    document = batch.document_ids[anchors]  # [A]
    inside &= batch.document_ids[row] == document[:, None]
    supervised = inside & (batch.loss_mask[row] != 0) & (slot > 0) & valid[:, None]
    position = batch.position_ids[anchors].long()  # [A]
    input_ids = torch.full_like(row, mask_token_id)  # [A, B]
    input_ids[:, 0] = batch.input_ids[anchors].long()
    return Blocks(
        anchors=anchors,
        valid=valid,
        context_start=anchors - position,
        input_ids=input_ids,
        position_ids=position[:, None] + slot,
        labels=batch.input_ids[row].long() * inside,
        supervised=supervised,
    )


def _mix(seed: int, number: int) -> int:
    """One 63-bit generator seed; neighbouring inputs give unrelated streams."""
    digest = hashlib.sha256(f"anchors {seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
