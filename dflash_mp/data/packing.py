"""Documents are packed into micro-batches of a fixed number of token slots.

Everything here is a pure function of its arguments, so every rank of every topology finds the
same micro-batches without talking to the others. ``S`` is the number of slots.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_mp.config import require
from dflash_mp.data.documents import Corpus

WINDOW = 4096
"""Documents packed together. Larger fills better; smaller mixes more from epoch to epoch."""

JITTER = 0.2
"""Documents are placed longest first, after stretching each length by up to this share."""


@dataclass(frozen=True)
class PackedBatch:
    """One row of ``S`` slots on the CPU; documents one after the other, padding at the end."""

    input_ids: Tensor
    """``[S]`` int32; 0 in padding."""

    position_ids: Tensor
    """``[S]`` int32, from 0 in each document; 0 in padding."""

    document_ids: Tensor
    """``[S]`` int32, 0-based in the order of the row; -1 in padding."""

    loss_mask: Tensor
    """``[S]`` uint8; 1 where supervised."""


def pack(
    lengths: np.ndarray, budget: int, seed: int, epoch: int, weights: np.ndarray | None = None
) -> list[np.ndarray]:
    """Document numbers of each pack of one epoch, in training order.

    Best fit in windows of shuffled documents: long ones first, each into the fullest pack that
    still holds it. The order of placement is jittered, so that packs differ between epochs even
    when all documents fit into one window.

    Args:
        lengths: ``[documents]`` tokens of each document, at most ``budget`` each.
        budget: token slots of a pack.
        seed: of the shuffle, not negative.
        epoch: 0-based.
        weights: ``[documents]`` times each document occurs per epoch on average, see
            ``epoch_documents``; None means once.

    Returns:
        One int64 array per pack; its lengths add up to at most ``budget``.

    Raises:
        UserError: a document is longer than ``budget``.
    """
    longest = int(lengths.max(initial=0))
    require(longest <= budget, f"data.tokens_per_batch={budget}: a document has {longest} tokens")
    rng = np.random.default_rng([seed, epoch])
    documents = rng.permutation(epoch_documents(len(lengths), seed, epoch, weights))
    packs: list[list[int]] = []
    for start in range(0, len(documents), WINDOW):
        window = documents[start : start + WINDOW]
        stretched = lengths[window] * (1 + JITTER * rng.random(len(window)))
        window = window[np.argsort(-stretched, kind="stable")]
        packs += _best_fit(window.tolist(), lengths[window].tolist(), budget)
    order = rng.permutation(len(packs))
    return [np.array(packs[index], np.int64) for index in order]


def _best_fit(documents: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Place each document, in the given order, into the fullest pack that still has room for it."""
    packs: list[list[int]] = []
    # (free slots, number of the pack), ascending.
    room: list[tuple[int, int]] = []
    for document, length in zip(documents, lengths, strict=True):
        at = bisect_left(room, (length, -1))
        if at == len(room):
            packs.append([])
            free, number = budget, len(packs) - 1
        else:
            free, number = room.pop(at)
        packs[number].append(document)
        if free > length:
            insort(room, (free - length, number))
    return packs


def epoch_documents(
    count: int, seed: int, epoch: int, weights: np.ndarray | None = None
) -> np.ndarray:
    """``[n]`` int64 document numbers that one epoch trains on, ascending, with repeats.

    Document ``i`` occurs ``floor((epoch + 1) w_i + u_i) - floor(epoch w_i + u_i)`` times, where
    the offsets ``u`` of the documents of one weight are spread evenly over [0, 1) in a seeded
    order. So after ``E`` epochs each was seen ``E w_i`` times, rounded up or down, and every
    single epoch holds the right share of each weight to within one document.
    """
    if weights is None:
        return np.arange(count)
    rng = np.random.default_rng([seed, 0x6D6978])
    offsets = np.empty(count)
    for weight in np.unique(weights):
        members = np.flatnonzero(weights == weight)
        offsets[members] = rng.permutation(len(members)) / len(members)
    before = np.floor(epoch * weights + offsets)
    after = np.floor((epoch + 1) * weights + offsets)
    return np.repeat(np.arange(count), (after - before).astype(np.int64))


def fill(lengths: np.ndarray, packs: list[np.ndarray], budget: int) -> float:
    """Share of all slots that hold a token; 1 for no packs at all."""
    used = sum(int(lengths[pack].sum()) for pack in packs)
    return used / (len(packs) * budget) if packs else 1.0


def collate(corpus: Corpus, documents: Sequence[int] | np.ndarray, budget: int) -> PackedBatch:
    """One packed row of ``budget`` slots from the given documents, in their order.

    Raises ``ValueError`` when they do not fit.
    """
    input_ids = np.zeros(budget, np.int32)  # [S]
    position_ids = np.zeros(budget, np.int32)  # [S]
    document_ids = np.full(budget, -1, np.int32)  # [S]
    loss_mask = np.zeros(budget, np.uint8)  # [S]
    at = 0
    for index, document in enumerate(documents):
        ids, mask = corpus.document(int(document))
        end = at + len(ids)
        if end > budget:
            raise ValueError(f"{end} tokens do not fit into {budget} slots")
        input_ids[at:end] = ids
        position_ids[at:end] = np.arange(len(ids))
        document_ids[at:end] = index
        loss_mask[at:end] = mask
        at = end
    return PackedBatch(
        torch.from_numpy(input_ids),
        torch.from_numpy(position_ids),
        torch.from_numpy(document_ids),
        torch.from_numpy(loss_mask),
    )
