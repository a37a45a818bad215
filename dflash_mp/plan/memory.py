"""Bytes that a rank of each role needs, part by part, and what to do when they are too many.

Legend as in ``work``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import Qwen3Config

from dflash_mp.config import UserError
from dflash_mp.drafter.attention import BLOCKS_PER_GROUP
from dflash_mp.drafter.model import BLOCKS_PER_SLICE
from dflash_mp.plan.shapes import TargetShape
from dflash_mp.plan.work import Rows
from dflash_mp.wire.stream import SENDER_SLOTS

GPU_RESERVE = 2.0e9
"""CUDA context, workspaces of libraries, and what the allocator cannot use."""

CPU_RESERVE = 0.6e9
"""Interpreter and libraries."""

ADVICE = {
    "weights": "take a GPU with more memory, a smaller target, or target.dtype=bfloat16",
    "ring": "lower wire.slots or tokens_per_batch, or use wire.dtype=bfloat16 or fp8",
    "activations": "lower tokens_per_batch or drafter.anchors_per_batch; a drafter with flex: also "
    "drafter.activation_checkpointing=true",
    "optimizer": "lower drafter.layers, or take a GPU with more memory",
    "head": "take a GPU with more memory, or drafter.precision=bfloat16",
    "logits": "lower loss.rows_per_chunk",
    "reserve": "take a GPU with more memory",
}
"""What to change, by the largest part."""

Parts = dict[str, float]
"""Bytes by part."""


def target_memory(
    shape: TargetShape, frame: int, tokens: int, taps: int, itemsize: int, reserve: float
) -> Parts:
    """A target rank: the whole model, two frames, and one forward.

    Args:
        shape: of the target.
        frame: bytes of a frame.
        tokens: of a micro-batch.
        taps: tapped layers, whose outputs live until the forward ends.
        itemsize: of weights and activations.
        reserve: bytes that nothing can use.
    """
    widest = max(layer.outputs for layer in shape.layers)
    # A norm holds its input in fp32, squared and scaled, beside it.
    forward = tokens * (itemsize * (widest + taps * shape.hidden) + 16 * shape.hidden)
    mask = tokens * tokens * itemsize
    return {
        "weights": float(shape.parameters * itemsize),
        "ring": float(SENDER_SLOTS * frame),
        "activations": float(forward + mask),
        "reserve": reserve,
    }


@dataclass(frozen=True)
class Learning:
    """How a drafter makes its gradient."""

    rows: Rows
    """Of a micro-batch."""

    keys: float
    """That a block slot is multiplied with."""

    itemsize: int
    """Of matrix products."""

    sliced: bool
    """Whether a few blocks go through forward and backward at a time (all do with flex)."""

    recomputed: bool
    """Whether the backward makes the activations of a layer again."""

    def at_a_time(self, block_size: int) -> Rows:
        """Rows whose activations exist together."""
        slots = BLOCKS_PER_SLICE * block_size
        if not self.sliced or self.rows.block <= slots:
            return self.rows
        last = round(self.rows.last * slots / self.rows.block)
        return Rows(self.rows.context, slots, last)


def drafter_memory(
    config: Qwen3Config,
    parameters: int,
    learning: Learning,
    ring: int,
    chunk: int,
    tied: bool,
    reserve: float,
) -> Parts:
    """A drafter rank in the middle of a backward.

    Args:
        config: of the drafter.
        parameters: their number.
        learning: how it makes its gradient.
        ring: bytes of all frames that it holds.
        chunk: rows of logits at a time.
        tied: whether head and embedding of the target are one.
        reserve: bytes that nothing can use.
    """
    vocabulary, hidden, itemsize = config.vocab_size, config.hidden_size, learning.itemsize
    # fp32 weights, gradients, their copy in the all-reduce, two moments; a cast of the weights.
    held = 4 * 5 + (itemsize if itemsize < 4 else 0)
    if learning.sliced:
        # The gradients of the micro-batch and of a slice, before they are added up.
        held += 2 * 4
    last = learning.at_a_time(config.block_size).last
    return {
        "optimizer": float(parameters * held),
        "head": float(vocabulary * hidden * itemsize * (1 if tied else 2)),
        "ring": float(ring),
        "activations": saved_activations(config, learning),
        "logits": float(min(chunk, last) * vocabulary * (8 + itemsize)),
        "reserve": reserve,
    }


def saved_activations(config: Qwen3Config, learning: Learning) -> float:
    """Bytes that the forward keeps for the backward.

    A block row of a layer: inputs and outputs of its products, and around norms and rotations
    fp32 copies. A context row: the projected features, and a layer's keys and values. A group of
    blocks: the keys and values that it sees, and a mask for its rows. A layer that is made again
    keeps its input.
    """
    rows, itemsize = learning.at_a_time(config.block_size), learning.itemsize
    hidden, size, inner = config.hidden_size, config.head_dim, config.intermediate_size
    query, shared = config.num_attention_heads * size, config.num_key_value_heads * size
    taps = len(config.dflash_config["target_layer_ids"])
    front = itemsize * (hidden + 2 * query + 4 * shared) + 4 * (3 * hidden + 3 * (query + shared))
    back = itemsize * (query + hidden + 4 * inner) + 4 * 3 * hidden
    context = itemsize * (taps + 1) * hidden + 4 * 2 * hidden
    keys = itemsize * 4 * shared + 4 * 3 * shared
    layers = config.num_hidden_layers
    if learning.sliced:
        group = BLOCKS_PER_GROUP * config.block_size
        repeats = config.num_attention_heads // config.num_key_value_heads
        front += learning.keys * itemsize * (2 * shared / group + repeats)
    if learning.recomputed:
        total = rows.block * (front + back + layers * 4 * hidden)
    else:
        total = layers * rows.block * front + ((layers - 1) * rows.block + rows.last) * back
    total += rows.context * (context + layers * keys)
    return float(total + rows.last * hidden * 8)


def refuse_if_too_large(role: str, parts: Mapping[str, float], available: float) -> None:
    """Raise ``UserError`` with numbers and advice if ``parts`` do not fit."""
    needed = sum(parts.values())
    if needed <= available:
        return
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in ordered)
    raise UserError(
        f"a {role} rank needs {needed / 1e9:.1f} GB ({listed}), but has {available / 1e9:.1f}: "
        f"{ADVICE[ordered[0][0]]}"
    )
