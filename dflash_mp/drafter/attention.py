"""Which keys a block slot sees, and three ways to attend to exactly those.

Rule for slot ``k`` of the block at row index ``a`` whose document starts at ``c``:

* context key ``s`` is visible iff ``c <= s < a`` (the anchor's own features do not exist yet when
  decoding); under a window ``w`` also ``s >= a + k - (w - 1)``;
* slot ``j`` of the same block is visible in a bidirectional layer; in a causal layer iff
  ``j <= k``; under a window ``w`` also ``|j - k| < w``;
* no other block is visible, and a padded block sees nothing: its rows are zeros.

Full layers are bidirectional, sliding ones causal, as serving engines run them.

Legend: S context tokens, A blocks, B block size, N query heads, G key/value heads, D head size.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

BLOCKS_PER_GROUP = 8

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""``(query [A, B, N, D], context key [S, G, D], context value, block key [A, B, G, D], block
value) -> [A, B, N, D]``."""


@dataclass(frozen=True)
class Layout:
    """Where the blocks lie: all that visibility depends on, besides the layer's rule."""

    anchors: Tensor
    """``[A]`` int64 index of each anchor in the context axis."""

    context_start: Tensor
    """``[A]`` int64 index of the first context token of the anchor's document."""

    valid: Tensor
    """``[A]`` bool, False for padded blocks."""

    block_size: int
    context_length: int


@dataclass(frozen=True)
class Rule:
    """How far one layer sees."""

    window: int | None = None
    causal: bool = False


def make_attend(backend: str, layout: Layout, rule: Rule) -> Attend:
    """Prepare the attention of one forward; the result serves all layers with this rule."""
    match backend:
        case "eager":
            return _eager(layout, rule)
        case "sdpa":
            return _sdpa(layout, rule)
        case "flex":
            return _flex(layout, rule, compiled=layout.anchors.is_cuda)
    raise ValueError(f"unknown attention backend {backend!r}")


def visible_keys(layout: Layout, rule: Rule) -> Tensor:
    """The rule as a dense mask: ``[A, B, S + A * B]`` bool, context keys first."""
    blocks, size = layout.anchors.numel(), layout.block_size
    device = layout.anchors.device
    anchor = layout.anchors[:, None, None]  # [A, 1, 1]
    slot = torch.arange(size, device=device)[None, :, None]  # [1, B, 1]
    key = torch.arange(layout.context_length, device=device)  # [S]
    context = (key >= layout.context_start[:, None, None]) & (key < anchor)  # [A, 1, S]
    if rule.window is not None:
        context = context & (key >= anchor + slot - (rule.window - 1))  # [A, B, S]
    own = _visible_slots(size, rule, device)  # [B, B]
    same = torch.eye(blocks, dtype=torch.bool, device=device)  # [A, A]
    block = same[:, None, :, None] & own[None, :, None, :]  # [A, B, A, B]
    mask = torch.cat(
        [context.expand(blocks, size, -1), block.reshape(blocks, size, blocks * size)], dim=-1
    )
    return mask & layout.valid[:, None, None]


def _visible_slots(size: int, rule: Rule, device: torch.device) -> Tensor:
    """``[B, B]`` bool: which slots (columns) each slot of the same block sees."""
    slot = torch.arange(size, device=device)
    behind = slot[:, None] - slot[None, :]  # [B, B]
    seen = torch.ones_like(behind, dtype=torch.bool)
    if rule.causal:
        seen &= behind >= 0
    if rule.window is not None:
        seen &= behind.abs() < rule.window
    return seen


def _eager(layout: Layout, rule: Rule) -> Attend:
    """Plain softmax over the dense mask; the reference for the other two."""
    mask = visible_keys(layout, rule).flatten(0, 1)  # [A * B, S + A * B]

    def attend(
        query: Tensor, context_key: Tensor, context_value: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        keys = torch.cat([context_key, key.flatten(0, 1)])  # [S + A * B, G, D]
        values = torch.cat([context_value, value.flatten(0, 1)])
        repeats = query.shape[2] // keys.shape[1]
        keys = keys.repeat_interleave(repeats, dim=1)  # [S + A * B, N, D]
        values = values.repeat_interleave(repeats, dim=1)
        scores = torch.einsum("qnd,knd->nqk", query.flatten(0, 1), keys)
        scores = scores.float() * query.shape[-1] ** -0.5  # [N, A * B, S + A * B]
        # The lowest finite number, not -inf: a row that sees nothing must not become NaN.
        scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
        weights = scores.softmax(dim=-1) * mask
        out = torch.einsum("nqk,knd->qnd", weights.to(values.dtype), values)
        return out.view(query.shape)

    return attend


@dataclass(frozen=True)
class _Group:
    """``BLOCKS_PER_GROUP`` consecutive blocks that share one slice of the context."""

    context: slice
    mask: Tensor
    """``[rows, keys]`` bool over the group's block slots and its own keys."""


def _sdpa(layout: Layout, rule: Rule) -> Attend:
    """Groups of consecutive blocks, each with only the context its anchors can see.

    Cost follows the visible keys when anchors are sorted. A padded block keeps its own slots as
    keys, so that no softmax is empty, and its rows are zeroed afterwards.
    """
    groups = _groups(layout, rule)

    def attend(
        query: Tensor, context_key: Tensor, context_value: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        # split, not slices: the backward of a slice fills a whole tensor with zeros.
        parts = zip(*(t.split(BLOCKS_PER_GROUP) for t in (query, key, value)), strict=True)
        out = []
        for group, (own_query, own_key, own_value) in zip(groups, parts, strict=True):
            keys = torch.cat([context_key[group.context], own_key.flatten(0, 1)])
            values = torch.cat([context_value[group.context], own_value.flatten(0, 1)])
            out.append(_grouped_heads(own_query.flatten(0, 1), keys, values, group.mask))
        rows = torch.cat(out).view(query.shape)
        return torch.where(layout.valid[:, None, None, None], rows, 0.0)

    return attend


def _grouped_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention where query heads that share a key head are stacked as rows: no key is copied.

    ``query [R, N, D]``, ``key`` and ``value [K, G, D]``, ``mask [R, K]`` -> ``[R, N, D]``.
    """
    rows, heads, size = query.shape
    shared = key.shape[1]
    repeats = heads // shared
    stacked = query.view(rows, shared, repeats, size).permute(1, 2, 0, 3)
    stacked = stacked.reshape(1, shared, repeats * rows, size)  # [1, G, N / G * R, D]
    out = F.scaled_dot_product_attention(
        stacked,
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask.repeat(repeats, 1),
    )
    out = out.view(shared, repeats, rows, size).permute(2, 0, 1, 3)
    return out.reshape(rows, heads, size)


def _groups(layout: Layout, rule: Rule) -> list[_Group]:
    device = layout.anchors.device
    blocks, size = layout.anchors.numel(), layout.block_size
    starts, anchors = layout.context_start.tolist(), layout.anchors.tolist()
    valid = layout.valid.tolist()
    own = _visible_slots(size, rule, device)  # [B, B]
    slot = torch.arange(size, device=device)[None, :, None]
    groups = []
    for first in range(0, blocks, BLOCKS_PER_GROUP):
        members = slice(first, min(first + BLOCKS_PER_GROUP, blocks))
        count = members.stop - first
        real = [i for i in range(first, members.stop) if valid[i]]
        low = min((starts[i] for i in real), default=0)
        if rule.window is not None:
            low = max(low, min((anchors[i] for i in real), default=0) - (rule.window - 1))
        high = max((anchors[i] for i in real), default=low)
        key = torch.arange(low, high, device=device)
        anchor = layout.anchors[members, None, None]
        context = (key >= layout.context_start[members, None, None]) & (key < anchor)
        if rule.window is not None:
            context = context & (key >= anchor + slot - (rule.window - 1))
        block = torch.block_diag(*[own] * count).bool()  # [g * B, g * B]
        context = context.expand(count, size, -1).reshape(count * size, -1)
        groups.append(_Group(slice(low, high), torch.cat([context, block], dim=1)))
    return groups


def _flex(layout: Layout, rule: Rule, compiled: bool) -> Attend:
    """FlexAttention over a block-sparse mask. Compiled, it needs the same shapes at every step."""
    mask = _block_mask(layout, rule, compiled)
    kernel = _flex_kernel(compiled)

    def attend(
        query: Tensor, context_key: Tensor, context_value: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        keys = torch.cat([context_key, key.flatten(0, 1)]).transpose(0, 1)[None]
        values = torch.cat([context_value, value.flatten(0, 1)]).transpose(0, 1)[None]
        rows = query.flatten(0, 1).transpose(0, 1)[None]  # [1, N, A * B, D]
        out: Tensor = kernel(rows, keys, values, block_mask=mask, enable_gqa=True)
        out = out[0].transpose(0, 1).reshape(query.shape)
        return torch.where(layout.valid[:, None, None, None], out, 0.0)

    return attend


def _block_mask(layout: Layout, rule: Rule, compiled: bool) -> BlockMask:
    anchors, start, valid = layout.anchors, layout.context_start, layout.valid
    context_length, size = layout.context_length, layout.block_size
    rows = anchors.numel() * size
    window, causal = rule.window, rule.causal

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        # Lengths are rounded up to multiples of 128, so indices past the end do occur.
        row = row.clamp(max=rows - 1)
        block, slot = row // size, row % size
        anchor = anchors[block]
        other = key - context_length
        context = (key >= start[block]) & (key < anchor)
        own = (other >= 0) & (other // size == block)
        behind = slot - other % size
        if window is not None:
            context = context & (key >= anchor + slot - (window - 1))
            own = own & (behind.abs() < window)
        if causal:
            own = own & (behind >= 0)
        return (context | own) & valid[block]

    build = _block_mask_builder(compiled)
    mask: BlockMask = build(visible, None, None, rows, context_length + rows, device=anchors.device)
    return mask


@functools.cache
def _flex_kernel(compiled: bool) -> Callable[..., Any]:
    kernel: Callable[..., Any] = flex_attention
    return torch.compile(kernel, dynamic=False) if compiled else kernel


@functools.cache
def _block_mask_builder(compiled: bool) -> Callable[..., Any]:
    build: Callable[..., Any] = create_block_mask
    return torch.compile(build, dynamic=False) if compiled else build
