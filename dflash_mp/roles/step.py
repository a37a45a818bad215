"""One optimizer step of a drafter: the sums over its micro-batches, one division, one update."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.step import batch_loss
from dflash_mp.features import FeatureBatch
from dflash_mp.job import Job
from dflash_mp.wire.plan import Frame


def take(
    frames: Iterator[tuple[Frame, FeatureBatch]], count: int
) -> Iterator[tuple[Frame, FeatureBatch]]:
    """The next ``count`` frames, without asking for the one after."""
    for _ in range(count):
        yield next(frames)


def kept(batch: FeatureBatch) -> FeatureBatch:
    """A copy that outlives the wire slot."""
    tensors = {
        name: value.clone() for name, value in vars(batch).items() if isinstance(value, Tensor)
    }
    return replace(batch, **tensors)


def due(step: int, interval: int, last: bool) -> bool:
    """Whether something with this interval (0 never, but at the end) happens at ``step``."""
    return last or (interval > 0 and step % interval == 0)


def warm_up(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    head: FrozenHead,
    job: Job,
) -> None:
    """A forward and a backward over nothing; all drafters.

    DDP puts gradients in buckets anew after its first backward, and the order in which three or
    more ranks add up depends on that: without this, the first step of a run would be added up in
    another order than the same step of a run that was continued.
    """
    padding = job.layout.view(job.layout.allocate(accelerator.device), -1)
    padding.document_ids.fill_(-1)
    config = job.config
    with accelerator.autocast():
        out = batch_loss(
            model, head, padding, job.mask_token_id, config.drafter, config.loss, config.seed
        )
    accelerator.backward(out.loss)
    optimizer.zero_grad()


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: LambdaLR,
    head: FrozenHead,
    frames: Iterator[tuple[Frame, FeatureBatch]],
    job: Job,
) -> Tensor:
    """One optimizer step over this drafter's share; returns the step's counts over all drafters.

    Losses are summed over micro-batches and ranks, and gradients divided once by the weight of
    the whole step, so the result does not depend on how the step was split.

    Returns:
        ``[6]`` float64: loss, weight, correct slots, supervised slots, tokens, gradient norm.
    """
    config = job.config
    counts = torch.zeros(5, dtype=torch.float64, device=accelerator.device)
    shares = job.plan.step_frames
    for turn, (_, batch) in enumerate(take(frames, shares)):
        last = turn == shares - 1
        # All drafters: the backward of a step's last frame is the one that averages gradients.
        with nullcontext() if last else accelerator.no_sync(model), accelerator.autocast():
            out = batch_loss(
                model, head, batch, job.mask_token_id, config.drafter, config.loss, config.seed
            )
        with nullcontext() if last else accelerator.no_sync(model):
            accelerator.backward(out.loss)
        counts += out.counts
    # All drafters.
    counts = accelerator.reduce(counts, "sum")
    weight = counts[1]
    # DDP averages over the drafters: their number undoes that.
    scale = torch.where(weight > 0, accelerator.num_processes / weight, 0.0).float()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    norm = accelerator.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return torch.cat([counts, norm.double().reshape(1)])
