"""Objectives over the frozen LM head, without ever holding the logits of a whole batch.

Rows are hidden states of supervised block slots. Each objective is one value per row; weighting
and normalising them is the caller's business. The head is frozen, so the gradient of a row's loss
with respect to its hidden state is made in the forward, chunk by chunk, and only scaled in the
backward: two passes over the head in all.

Legend: R rows, H hidden size, V vocabulary, A blocks, B block size.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = ("ce", "kl", "tv", "ce+kl")

PIECE = 2**21
"""Logits that go through the softmax at a time on a CPU: 8 MiB in fp32, what its cache holds."""

GPU_PIECE = 2**24
"""The same on other devices: 64 MiB in fp32, enough for kernels to be longer than launches."""


class RowLoss(NamedTuple):
    """What the head says about each row."""

    loss: Tensor
    """``[R]`` fp32, differentiable with respect to the hidden rows."""

    correct: Tensor
    """``[R]`` bool, True where the most likely token is the label."""


class HeadRows(NamedTuple):
    """Rows and the frozen head they go through."""

    hidden: Tensor
    """``[R, H]`` drafter hidden states, after its final norm."""

    weight: Tensor
    """``[V, H]`` frozen LM head; its dtype is that of both matrix products."""

    labels: Tensor | None = None
    """``[R]`` int64 tokens; None takes the target's most likely token as the label."""

    target_hidden: Tensor | None = None
    """``[R, H]`` input of the target's head at the position *before* the label."""

    softcap: float | None = None
    """``c`` of logits ``c * tanh(logits / c)`` (Gemma), or None."""


def head_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows_per_chunk: int = 512
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of ``labels [R]`` under ``softmax(hidden [R, H] @ weight [V, H].T)``.

    Returns:
        ``ce [R]`` fp32, differentiable with respect to ``hidden``, and ``correct [R]`` bool.
    """
    row_loss = head_loss(HeadRows(hidden, weight, labels), "ce", rows_per_chunk)
    return row_loss.loss, row_loss.correct


def head_loss(rows: HeadRows, kind: str, rows_per_chunk: int = 512) -> RowLoss:
    """One objective per row, in chunks of ``rows_per_chunk`` rows.

    With ``q`` the drafter's distribution and ``p`` the target's (from ``target_hidden``):

    * ``ce``: ``-log q[label]``;
    * ``kl``: ``sum p (log p - log q)``;
    * ``tv``: ``1 - sum min(p, q)``, the probability that rejection sampling refuses the draft;
    * ``ce+kl``: their sum.

    Raises:
        ValueError: unknown ``kind``, or the rows lack what it needs.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown objective {kind!r}: must be one of {', '.join(KINDS)}")
    soft = kind != "ce"
    if (soft or rows.labels is None) and rows.target_hidden is None:
        raise ValueError(f"objective {kind!r} needs target_hidden")
    loss, correct = _HeadLoss.apply(rows.hidden, rows, kind, rows_per_chunk)
    return RowLoss(loss, correct)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, rows: HeadRows, kind: str, rows_per_chunk: int
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[0]
        count = hidden.shape[0]
        loss = torch.empty(count, dtype=torch.float32, device=hidden.device)  # [R]
        correct = torch.empty(count, dtype=torch.bool, device=hidden.device)  # [R]
        gradient = torch.empty_like(hidden) if wanted else None  # [R, H]
        weight = compute_weight(rows.weight)
        for first in range(0, count, rows_per_chunk):
            chunk = slice(first, first + rows_per_chunk)
            logits = _product(hidden[chunk], weight)  # [r, V]
            target = labels = None
            if rows.target_hidden is not None:
                target = _product(rows.target_hidden[chunk], weight)  # [r, V]
            if rows.labels is not None:
                labels = rows.labels[chunk]
            results = (loss[chunk], correct[chunk])
            _overwrite(kind, logits, labels, target, rows.softcap, results)
            if gradient is not None:
                with torch.autocast(hidden.device.type, enabled=False):
                    gradient[chunk] = logits @ weight
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0][:, None].to(gradient.dtype), None, None, None


def compute_weight(weight: Tensor) -> Tensor:
    """The head in the dtype of its matrix products: autocast's where it is on, else its own.

    A copy of the whole head where they differ: who calls ``head_loss`` several times makes it once.
    """
    kind = weight.device.type
    if torch.is_autocast_enabled(kind):
        return weight.to(torch.get_autocast_dtype(kind))
    return weight


def _product(hidden: Tensor, weight: Tensor) -> Tensor:
    """``hidden [r, H]`` through the head: ``[r, V]`` in the head's dtype."""
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.to(weight.dtype), weight)


def _overwrite(
    kind: str,
    logits: Tensor,
    labels: Tensor | None,
    target: Tensor | None,
    softcap: float | None,
    results: tuple[Tensor, Tensor],
) -> None:
    """Replace ``logits [r, V]`` by the gradient with respect to them, a few rows at a time.

    Only those rows exist in fp32, beside the chunk in the dtype of the products.

    Args:
        kind: which objective.
        logits: of the drafter, from the product with the head.
        labels: ``[r]``, or None for the most likely tokens of ``target``.
        target: ``[r, V]`` the target's logits, if there are any.
        softcap: of both.
        results: ``[r]`` losses and ``[r]`` hits, written here.
    """
    losses, hits = results
    for rows in _pieces(logits):
        own = logits[rows]
        theirs = None if target is None else _capped(target[rows], softcap)
        capped = own if softcap is None else _capped(own, softcap)
        top, best = capped.max(dim=-1)
        if labels is None:
            assert theirs is not None
            wanted = theirs.argmax(dim=-1)
        else:
            wanted = labels[rows]
        hits[rows] = best == wanted
        slope = _softcap_slope(capped, softcap)
        if kind == "ce":
            losses[rows], by_logits = _cross_entropy(capped, wanted, top, best)
        else:
            assert theirs is not None
            losses[rows], by_logits = _divergence(kind, capped.float(), wanted, theirs)
        if slope is not None:
            by_logits.mul_(slope)
        own.copy_(by_logits)


def _pieces(logits: Tensor) -> Iterator[slice]:
    """Rows of ``logits [r, V]`` that go through the softmax at a time.

    On a CPU all that is not a product takes 55 ms instead of 132 then (480 rows of 49,152, bf16,
    torch 2.13).
    """
    count, vocabulary = logits.shape
    piece = PIECE if logits.device.type == "cpu" else GPU_PIECE
    size = max(1, piece // vocabulary)
    for first in range(0, count, size):
        yield slice(first, first + size)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    """``[r, V]`` fp32; the given tensor itself where that is fp32 and nothing caps it."""
    wide = logits.float()
    return wide if softcap is None else softcap * torch.tanh(wide / softcap)


def _softcap_slope(logits: Tensor, softcap: float | None) -> Tensor | None:
    """Derivative of the softcap, from its result: ``1 - (logits / c) ** 2``."""
    return None if softcap is None else 1 - (logits / softcap).square()


def _cross_entropy(
    logits: Tensor, labels: Tensor, top: Tensor, best: Tensor
) -> tuple[Tensor, Tensor]:
    """``logsumexp(logits) - logits[label]`` ``[r]`` and its gradient ``[r, V]``, both fp32.

    The sum of exponentials comes out of the likeliest token's probability, which cannot underflow:
    one pass of torch's softmax over ``logits [r, V]``, in any dtype, is all.

    Not compiled: on a CPU that made it three times slower (torch 2.13, 512 rows of 49,152).

    Args:
        logits: ``[r, V]``.
        labels: ``[r]``.
        top: ``[r]`` the highest logits.
        best: ``[r]`` where they are.
    """
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    likeliest = probabilities.gather(1, best[:, None])  # [r, 1]
    chosen = logits.gather(1, labels[:, None])  # [r, 1]
    loss = top[:, None].float() - likeliest.log() - chosen.float()
    return loss[:, 0], probabilities.scatter_add_(1, labels[:, None], -torch.ones_like(likeliest))


def _divergence(kind: str, logits: Tensor, labels: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Loss ``[r]`` and its gradient by logits ``[r, V]``; may overwrite ``logits``, ``target``."""
    log_p = target.sub_(target.logsumexp(dim=-1, keepdim=True))  # [r, V]
    log_q = logits.sub_(logits.logsumexp(dim=-1, keepdim=True))  # [r, V]
    p, q = log_p.exp(), log_q.exp()  # [r, V]
    if kind == "tv":
        return _total_variation(p, q)
    chosen = log_q.gather(1, labels[:, None])  # [r, 1]
    loss = log_p.sub_(log_q).mul_(p).sum(dim=-1)
    by_logits = p.neg_().add_(q, alpha=2 if kind == "ce+kl" else 1)
    if kind == "ce+kl":
        loss = loss - chosen[:, 0]
        by_logits.scatter_add_(1, labels[:, None], -torch.ones_like(chosen))
    return loss, by_logits


def _total_variation(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """``d/dz_i -sum min(p, q) = q_i * (sum_{q < p} q - [q_i < p_i])``."""
    below = (q < p).to(q.dtype)  # [r, V]
    loss = 1 - torch.minimum(p, q).sum(dim=-1)
    return loss, q * ((q * below).sum(dim=-1, keepdim=True) - below)


def position_weights(
    block_size: int, gamma: float | None, device: torch.device | str | None = None
) -> Tensor:
    """Weight of each block slot: ``exp(-(k - 1) / gamma)``, ones for ``gamma=None``.

    Slot 0, the anchor, is never supervised; its weight is 0. DFlash paper, equation 4.

    Returns:
        ``[B]`` fp32.
    """
    slot = torch.arange(block_size, dtype=torch.float32, device=device)
    weights = torch.ones_like(slot) if gamma is None else torch.exp(-(slot - 1) / gamma)
    weights[0] = 0.0
    return weights


def dpace_weights(ce: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """D-PACE: weight each slot by the expected number of slots its acceptance opens up.

    With ``q_j = exp(-ce_j)``, ``s_j = (1 - alpha) q_j + alpha`` (1 at unsupervised slots) and
    ``P_m = prod_{i <= m} s_i``, slot ``j`` weighs ``sum_{m >= j} P_m`` over supervised ``m``
    (SpecForge ``dpace``, speculators). No gradient flows through the weights.

    Args:
        ce: ``[A, B]`` cross-entropy; values at unsupervised slots are ignored.
        supervised: ``[A, B]`` bool.
        alpha: in (0, 1]; 1 weighs by the number of supervised slots left.

    Returns:
        ``[A, B]`` fp32, 0 at unsupervised slots.
    """
    confidence = (1 - alpha) * torch.exp(-ce.detach().float()) + alpha
    confidence = torch.where(supervised, confidence, 1.0)
    reached = confidence.cumprod(dim=-1) * supervised  # [A, B]
    continuation = reached.flip(-1).cumsum(-1).flip(-1)  # [A, B]
    return continuation * supervised
