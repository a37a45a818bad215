"""FLOPs of matrix products, and bytes of everything else, for one micro-batch on each side.

A product's own traffic hides behind its arithmetic; what is counted in bytes is elementwise work:
norms, rotations, activations, residuals, softmax, casts, the optimizer. It is counted as accesses
to memory of the eager operations.

Legend: S tokens of a micro-batch, L tokens of a document, A blocks, B block size, R supervised
rows, H hidden size, V vocabulary, n tapped layers, N query heads, G key heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from transformers import Qwen3Config

from dflash_mp.drafter.attention import BLOCKS_PER_GROUP
from dflash_mp.plan.shapes import ATTENTION, SLIDING, LayerShape, TargetShape
from dflash_mp.target.model import PADDED_ROW_MULTIPLE

CHUNK = 64
"""Tokens that linear attention handles at once (transformers, flash-linear-attention)."""

NORM_BYTES = 72
"""Two norms of a layer, for each of ``H``: read, to fp32, square, mean, scale, back, weight."""

ACCESSES = 5
"""Reads and writes of elementwise operations for each element that a product writes."""

STATE_ACCESSES = 12
"""The same for each element of queries, keys and values of linear attention, in fp32."""

LOGIT_BYTES = 12
"""For each logit: from one product, replaced by its gradient, into the other product."""

LOGIT_IN_PLACE_BYTES = 36
"""For each logit: the time of its maximum, softmax and gradient, which stay in the cache."""

MICRO_BATCH_BYTES = 24
"""For each parameter and micro-batch: cast to the type of products, gradient back, added up."""

STEP_BYTES = 48
"""For each parameter and step: scale and clip the gradient, AdamW with two moments."""


NEWTON_SCHULZ = 5
"""Iterations of Muon (torch's default)."""

PASSES_LEARNING = 3
"""A product's own and those of its two gradients; elementwise work is about as much."""

ATTENTION_PRODUCTS = 2
"""Queries with keys, and weights with values."""

ATTENTION_PRODUCTS_LEARNING = 7
"""The same and five in the backward, which makes the weights again."""


@dataclass(frozen=True)
class Work:
    """What is to be done."""

    flops: float = 0.0
    """In matrix products."""

    attention: float = 0.0
    """FLOPs inside attention kernels, which are slower."""

    bytes: float = 0.0
    """In elementwise operations that write new tensors."""

    in_place: float = 0.0
    """Bytes in elementwise operations that do not."""

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: float) -> "Work":
        return Work(*(value * times for value in astuple(self)))


@dataclass(frozen=True)
class Batch:
    """One packed micro-batch."""

    tokens: int
    document: int
    anchors: int
    supervised: float
    """Share of the drafted slots with a label."""

    fixed: bool
    """Whether shapes are fixed (GPU): then slots without a label cost as much as others."""


def target_work(shape: TargetShape, depth: int, batch: Batch, itemsize: int) -> Work:
    """The target's forward through its first ``depth`` layers; ``itemsize`` of activations."""
    tokens, keys = batch.tokens, batch.tokens
    if not shape.packs:
        keys = -(-batch.document // PADDED_ROW_MULTIPLE) * PADDED_ROW_MULTIPLE
        tokens = round(batch.tokens * keys / batch.document)
    layers = (layer_work(layer, shape, keys, itemsize) for layer in shape.layers[:depth])
    return sum(layers, Work()) * tokens


def layer_work(layer: LayerShape, shape: TargetShape, keys: int, itemsize: int) -> Work:
    """One layer for one token that is handed ``keys`` keys.

    Masked keys cost as much as others, as kernels with a mask compute them. A window cuts nothing
    for the same reason.
    """
    flops, attention = 2.0 * layer.products, 0.0
    nbytes = float(NORM_BYTES * shape.hidden + ACCESSES * itemsize * layer.outputs)
    if layer.kind in ATTENTION:
        attention = ATTENTION_PRODUCTS * 2.0 * keys * shape.attention_width
    else:
        heads, key, value = shape.state
        # The delta rule in chunks: three products of c x c with keys, two with values, three of
        # keys with values (Yang et al. 2024, arXiv 2412.06464).
        flops += 2.0 * heads * (CHUNK * (3 * key + 2 * value) + 3 * key * value)
        nbytes += 4 * STATE_ACCESSES * heads * (2 * key + value)
    return Work(flops, attention, nbytes)


@dataclass(frozen=True)
class Rows:
    """Rows of one micro-batch on the drafter's side."""

    context: int
    """Tokens whose features are projected."""

    block: int
    """Block slots, ``A * B``."""

    last: int
    """Slots that go through the end of the last layer and the head, R."""


def drafter_rows(batch: Batch, block_size: int) -> Rows:
    """How many rows ``batch`` has on the drafter's side."""
    drafted = batch.anchors * (block_size - 1)
    return Rows(
        context=batch.tokens,
        block=batch.anchors * block_size,
        last=drafted if batch.fixed else round(drafted * batch.supervised),
    )


def keys_seen(batch: Batch, block_size: int, window: int | None) -> float:
    """Mean number of keys that a block slot is multiplied with.

    Sorted blocks are handled in groups, each with the context from the start of its first anchor's
    document to its last anchor, and its own slots. Anchors are spread evenly over the row.
    """
    group = min(BLOCKS_PER_GROUP, batch.anchors)
    span = (group - 1) * batch.tokens / batch.anchors
    context = min(batch.document, batch.tokens - span) / 2 + span
    if window is not None:
        context = min(context, window + span)
    return context + group * block_size


def drafter_work(
    config: Qwen3Config,
    parameters: int,
    rows: Rows,
    batch: Batch,
    reads_target: bool,
    itemsize: int,
    recomputed: bool = False,
) -> Work:
    """Forward and backward of one micro-batch, without the optimizer.

    Args:
        config: of the drafter.
        parameters: their number.
        rows: of the micro-batch.
        batch: the micro-batch.
        reads_target: whether the objective needs the target's logits.
        itemsize: of the inputs of products.
        recomputed: with activation checkpointing, a second forward of the layers.
    """
    passes_of_blocks = PASSES_LEARNING + recomputed
    products = ATTENTION_PRODUCTS_LEARNING + recomputed * ATTENTION_PRODUCTS
    hidden, size = config.hidden_size, config.head_dim
    taps = len(config.dflash_config["target_layer_ids"])
    query, shared = config.num_attention_heads * size, config.num_key_value_heads * size
    inner = config.intermediate_size
    # No gradient flows into the target's features: two products instead of three.
    flops, attention = 2.0 * 2 * rows.context * taps * hidden * hidden, 0.0
    nbytes = float(PASSES_LEARNING) * rows.context * hidden * (NORM_BYTES / 2 + 4 * ACCESSES)
    nbytes += parameters * MICRO_BATCH_BYTES
    for i, kind in enumerate(config.layer_types):
        window = config.sliding_window if kind == SLIDING else None
        ends = rows.last if i == config.num_hidden_layers - 1 else rows.block
        flops += PASSES_LEARNING * 2.0 * rows.context * hidden * 2 * shared
        flops += passes_of_blocks * 2.0 * rows.block * hidden * (query + 2 * shared)
        flops += passes_of_blocks * 2.0 * ends * (query * hidden + 3 * hidden * inner)
        keys = keys_seen(batch, config.block_size, window)
        attention += products * 2.0 * rows.block * keys * query
        elements = rows.block * (query + 2 * shared) + ends * (2 * hidden + 2 * inner)
        nbytes += PASSES_LEARNING * ACCESSES * itemsize * rows.context * 2 * shared
        nbytes += passes_of_blocks * (ACCESSES * itemsize * elements + NORM_BYTES * ends * hidden)
    # The head is frozen: logits forward, and the rows' gradient; the target's own logits if asked.
    passes = 3 if reads_target else 2
    flops += passes * 2.0 * rows.last * config.vocab_size * hidden
    logits = (passes - 1) * rows.last * config.vocab_size
    nbytes += logits * LOGIT_BYTES
    return Work(flops, attention, nbytes, float(logits * LOGIT_IN_PLACE_BYTES))


def step_work(parameters: int, orthogonalised: Sequence[tuple[int, int]] = ()) -> Work:
    """What a drafter does once in a step.

    Args:
        parameters: of the drafter.
        orthogonalised: shapes of the matrices that Muon moves: five Newton-Schulz iterations of
            three products each (Jordan 2024), of which all drafters make all.
    """
    flops = 0.0
    for shape in orthogonalised:
        short, long = sorted(shape)
        flops += NEWTON_SCHULZ * (4.0 * short * short * long + 2.0 * short**3)
    return Work(flops, in_place=float(parameters * STEP_BYTES))
