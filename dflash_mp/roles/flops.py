"""How many FLOPs a running training asks of each role, counted with the planner's formulas.

Products with weights and attention, with the masked keys that kernels compute, too. Decoding, the
walk over held-out text and the optimizer are left out.
"""

from dataclasses import dataclass

from torch import nn
from transformers import Qwen3Config

from dflash_mp.job import Job
from dflash_mp.plan.shapes import target_shape
from dflash_mp.plan.work import Batch, drafter_rows, drafter_work, target_work


@dataclass(frozen=True)
class Trained:
    """What some micro-batches held, all of them together."""

    batches: float
    tokens: float
    blocks: float
    supervised: float
    """Slots with a label."""


def mean_document(job: Job) -> int:
    """Tokens of a training document."""
    return max(1, round(float(job.prepared.train.lengths.mean())))


def target_flops(model: nn.Module, job: Job) -> float:
    """A target's FLOPs for one token of a full micro-batch, up to the last layer that runs."""
    shape = target_shape(model, job.target_config)
    depth = len(shape.layers) if job.config.loss.reads_target else job.layer_ids[-1] + 1
    tokens = job.config.data.tokens_per_batch
    batch = Batch(tokens, mean_document(job), anchors=1, supervised=1.0, fixed=False)
    # How wide numbers are changes bytes only.
    work = target_work(shape, depth, batch, itemsize=4)
    return (work.flops + work.attention) / tokens


def drafter_flops(
    config: Qwen3Config, trained: Trained, document: int, reads_target: bool
) -> float:
    """FLOPs of forward and backward over ``trained``.

    Padded blocks and slots without a label do not count, though a GPU computes them.

    Args:
        config: of the drafter.
        trained: counts over micro-batches that are about alike.
        document: tokens of a document.
        reads_target: whether the objective needs the target's logits.
    """
    if not trained.blocks:
        return 0.0
    batch = Batch(
        tokens=round(trained.tokens / trained.batches),
        document=document,
        anchors=max(1, round(trained.blocks / trained.batches)),
        supervised=trained.supervised / (trained.blocks * (config.block_size - 1)),
        fixed=False,
    )
    rows = drafter_rows(batch, config.block_size)
    # The number of parameters and how wide numbers are change bytes only.
    work = drafter_work(config, 0, rows, batch, reads_target, itemsize=4)
    return (work.flops + work.attention) * trained.batches
