"""Bytes that a rank of each role needs, part by part, and what to do when they are too many.

Legend as in ``work``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from transformers import Qwen3Config

from dflash_mp.config import UserError
from dflash_mp.drafter.attention import BLOCKS_PER_GROUP
from dflash_mp.drafter.model import BLOCKS_PER_SLICE
from dflash_mp.losses import GPU_PIECE, PIECE
from dflash_mp.plan.shapes import TargetShape
from dflash_mp.plan.work import Rows
from dflash_mp.wire.stream import SENDER_SLOTS

GPU_RESERVE = 2.0e9
"""CUDA context, workspaces of libraries, and what the allocator cannot use."""

CPU_RESERVE = 0.6e9
"""Interpreter and libraries."""

OBJECTIVE_BYTES = {"ce": 4, "dpace": 4, "kl": 8, "ce+kl": 8, "tv": 20}
"""For each logit of a piece, what each ``loss.kind`` holds in fp32 beside them, in fp32 too."""

STORED_BYTES = 2
"""Of a parameter in a file of a drafter (bfloat16)."""

ADVICE = {
    "weights": "take a GPU with more memory, a smaller target, or target.dtype=bfloat16",
    "ring": "lower wire.slots or data.tokens_per_batch, or use wire.dtype=bfloat16 or fp8",
    "activations": "lower data.tokens_per_batch or drafter.anchors_per_batch; a drafter with flex: "
    "also drafter.activation_checkpointing=true",
    "optimizer": "lower drafter.layers, or take a GPU with more memory",
    "head": "take a GPU with more memory, or drafter.precision=bfloat16",
    "logits": "lower loss.rows_per_chunk",
    "held-out": "lower evaluate.max_rows",
    "decoding": "lower evaluate.max_new_tokens, or say evaluate.decode_prompts=0",
    "export": "lower drafter.layers, or take a GPU with more memory",
    "reserve": "take a GPU with more memory",
}
"""What to change, by the largest part."""

Parts = dict[str, float]
"""Bytes by part."""


def target_memory(
    shape: TargetShape,
    frame: int,
    tokens: int,
    taps: int,
    itemsize: int,
    decoding: float,
    reserve: float,
) -> Parts:
    """A target rank: the whole model, two frames, and one forward or what decoding needs.

    Between two frames held-out prompts are decoded: the larger of both counts.

    Args:
        shape: of the target.
        frame: bytes of a frame.
        tokens: of a micro-batch.
        taps: tapped layers, whose outputs live until the forward ends.
        itemsize: of weights and activations.
        decoding: bytes, of ``decoding_memory``.
        reserve: bytes that nothing can use.
    """
    widest = max(layer.outputs for layer in shape.layers)
    # A norm holds its input in fp32, squared and scaled, beside it.
    forward = tokens * (itemsize * (widest + taps * shape.hidden) + 16 * shape.hidden)
    mask = tokens * tokens * itemsize
    busy = {"activations": float(forward + mask)}
    return {
        "weights": float(shape.parameters * itemsize),
        "ring": float(SENDER_SLOTS * frame),
        **(busy if busy["activations"] >= decoding else {"decoding": decoding}),
        "reserve": reserve,
    }


def decoding_memory(
    shape: TargetShape, parameters: int, prompt: int, new: int, itemsize: int, cpu: bool
) -> float:
    """Bytes that a target needs to decode one prompt with a drafter, beside its own weights.

    The drafter in the target's type, keys and values of all tokens, and the logits of the new
    ones, with an fp32 copy: the text is checked by one forward. A drafter is loaded in fp32, on the
    host, beside what was read.

    Args:
        shape: of the target.
        parameters: of the drafter.
        prompt: tokens.
        new: tokens, at most.
        itemsize: of the target's weights.
        cpu: whether the host's memory is that of the rank.
    """
    cache = (prompt + new) * len(shape.layers) * 2 * shape.key_value_width * itemsize
    logits = new * shape.vocabulary * (itemsize + (4 if itemsize < 4 else 0))
    loading = parameters * (4 + STORED_BYTES) if cpu else 0
    return float(max(loading, parameters * itemsize + cache + logits))


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

    chunk: int
    """Rows of logits at a time."""

    reads_target: bool
    """Whether the objective needs the target's logits."""

    objective: str
    """``loss.kind``."""

    cpu: bool
    """Whether the drafter is a CPU process."""

    moments: int
    """Bytes of a parameter's state in the optimizer."""

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
    frames: Parts,
    tied: bool,
    exported: int,
    reserve: float,
) -> Parts:
    """A drafter rank in the middle of a backward, or behind the last one if that takes more.

    Then gradients and their activations are gone. The head is loaded once more, in the target's
    type, the export is written and read, and the held-out text goes through all blocks at once.
    Walks over it during the training take less.

    Args:
        config: of the drafter.
        parameters: their number.
        learning: how it makes its gradient.
        frames: what it holds of frames all the time.
        tied: whether head and embedding of the target are one.
        exported: bytes of a parameter, and of a weight of the head, in the target's type.
        reserve: bytes that nothing can use.
    """
    vocabulary, hidden, itemsize = config.vocab_size, config.hidden_size, learning.itemsize
    # fp32 weights, moments, and the memory in which gradients are exchanged.
    held = 4 * 2 + learning.moments
    # Gradients, and a cast of the weights.
    learns = 4 + (itemsize if itemsize < 4 else 0)
    if learning.sliced:
        # The gradients of the micro-batch and of a slice, before they are added up.
        learns += 2 * 4
    head = float(vocabulary * hidden * (1 if tied else 2))
    rows = learning.at_a_time(config.block_size)
    step = {
        "optimizer": float(parameters * (held + learns)),
        "head": head * itemsize,
        **frames,
        "activations": saved_activations(config, learning),
        "logits": logits_memory(vocabulary, rows.last, learning),
        "reserve": reserve,
    }
    # On the host: the trained weights, those that were written, and those as they were read.
    written = parameters * (4 + 4 + STORED_BYTES) if learning.cpu else 0
    walk = walk_activations(config, learning) + logits_memory(
        vocabulary, learning.rows.last, replace(learning, reads_target=False, objective="ce")
    )
    end = {
        "optimizer": float(parameters * held),
        "head": head * (itemsize + exported),
        **frames,
        "export": float(max(written, parameters * exported + walk)),
        "reserve": reserve,
    }
    return max(step, end, key=lambda parts: sum(parts.values()))


def logits_memory(vocabulary: int, rows: int, learning: Learning) -> float:
    """Bytes of a chunk of logits, the target's as well where they are read, and of its objective.

    The objective is made in fp32, of a piece of logits at a time (of one row at least),
    while the last piece's gradient is still there.
    """
    count = min(learning.chunk, rows) * vocabulary
    piece = min(count, max(PIECE if learning.cpu else GPU_PIECE, vocabulary))
    buffers = 2 if learning.reads_target else 1
    each = OBJECTIVE_BYTES[learning.objective]
    each += 4 * buffers if learning.itemsize < 4 else 0
    each += 4 if piece < count else 0
    return float(count * learning.itemsize * buffers + piece * each)


def walk_activations(config: Qwen3Config, learning: Learning) -> float:
    """Bytes of one layer for all blocks at once, which is what a walk without gradients holds."""
    whole = replace(learning, sliced=False, recomputed=False)
    return saved_activations(config, whole, layers=1)


def saved_activations(config: Qwen3Config, learning: Learning, layers: int | None = None) -> float:
    """Bytes that the forward keeps for the backward, of ``layers`` layers (all of them).

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
    layers = layers or config.num_hidden_layers
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
