"""One optimizer step of a drafter: the sums over its micro-batches, one division, one update."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.drafter.step import BatchLoss, batch_loss
from dflash_mp.features import FeatureBatch
from dflash_mp.job import Job
from dflash_mp.roles.skips import Gate, Skips
from dflash_mp.sentinel import Sentinel
from dflash_mp.wire.plan import Frame, Kind, Plan


def take(
    frames: Iterator[tuple[Frame, FeatureBatch]], count: int
) -> Iterator[tuple[Frame, FeatureBatch]]:
    """The next ``count`` frames, without asking for the one after."""
    for _ in range(count):
        yield next(frames)


def watched(
    frames: Iterator[tuple[Frame, FeatureBatch]], plan: Plan, drafter: int, sentinel: Sentinel
) -> Iterator[tuple[Frame, FeatureBatch]]:
    """``frames`` of this drafter, with the waiting for each of them told to the sentinel."""
    for expected in plan.received(drafter):
        sentinel.wait(f"frame {expected.k}", frame=f"{drafter}/{expected.k}")
        item = next(frames)
        sentinel.phase("compute")
        yield item


def kept(batch: FeatureBatch) -> FeatureBatch:
    """A copy that outlives the wire slot."""
    tensors: dict[str, Any] = {
        name: value.clone() for name, value in vars(batch).items() if isinstance(value, Tensor)
    }
    return replace(batch, **tensors)


def due(step: int, interval: int, last: bool) -> bool:
    """Whether something with this interval (0 never, but at the end) happens at ``step``."""
    return last or (interval > 0 and step % interval == 0)


@dataclass(frozen=True)
class Learner:
    """A drafter in training; ``wrapped`` is ``model`` inside DDP."""

    accelerator: Accelerator
    model: DFlashDraftModel
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    head: FrozenHead
    gate: Gate
    skips: Skips


def empty_batch(job: Job, device: torch.device) -> FeatureBatch:
    """A micro-batch without documents: a loss of zero with a complete graph."""
    plain = job.layout.plain
    padding = plain.view(plain.allocate(device), -1)
    padding.document_ids.fill_(-1)
    return padding


def loss_of(learner: Learner, batch: FeatureBatch, job: Job) -> BatchLoss:
    """``batch_loss`` in this run's settings."""
    config = job.config
    with learner.accelerator.autocast():
        return batch_loss(
            learner.wrapped,
            learner.head,
            batch,
            job.mask_token_id,
            config.drafter,
            config.loss,
            config.seed,
        )


def warm_up(learner: Learner, job: Job) -> None:
    """A forward and a backward over nothing; all drafters.

    DDP puts gradients in buckets anew after its first backward, and the order in which three or
    more ranks add up depends on that: without this, the first step of a run would be added up in
    another order than the same step of a run that was continued.
    """
    accelerator = learner.accelerator
    accelerator.backward(loss_of(learner, empty_batch(job, accelerator.device), job).loss)
    learner.optimizer.zero_grad()


class StopVote:
    """Lets all drafters stop behind the same step, though they hear of it at different times.

    The question of one step is answered at the next, so nobody waits for it. All drafters call
    ``decided`` once a step; the exchange is on the CPU, also where gradients are not.
    """

    def __init__(self, sentinel: Sentinel) -> None:
        self.sentinel = sentinel
        self._open: tuple[dist.Work, Tensor] | None = None

    def decided(self) -> bool:
        """Whether the job ends behind this step."""
        stop = False
        if self._open is not None:
            work, asked = self._open
            work.wait()
            stop = bool(asked.item())
        asked = torch.tensor([float(self.sentinel.stop_reason is not None)])
        work = dist.all_reduce(asked, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._open = (work, asked)
        return stop


def train_step(
    learner: Learner,
    frames: Iterator[tuple[Frame, FeatureBatch]],
    job: Job,
    sentinel: Sentinel,
) -> Tensor:
    """One optimizer step over this drafter's share; returns the step's counts over all drafters.

    Losses are summed over micro-batches and ranks, and gradients divided once by the weight of
    the whole step, so the result does not depend on how the step was split. A micro-batch without
    a finite loss counts as if it were not there, on whichever drafter it is.

    Returns:
        ``[8]`` float64: loss, weight, correct slots, supervised slots, tokens, blocks, skipped
        micro-batches, gradient norm.
    """
    accelerator, wrapped = learner.accelerator, learner.wrapped
    counts = torch.zeros(7, dtype=torch.float64, device=accelerator.device)
    shares = job.plan.step_frames
    taken, losses = [], []
    for turn, (frame, batch) in enumerate(take(frames, shares)):
        last = turn == shares - 1
        # All drafters: the backward of a step's last frame is the one that averages gradients.
        with nullcontext() if last else accelerator.no_sync(wrapped):
            out = loss_of(learner, batch, job)
            usable = out.loss.detach().isfinite()
            if last:
                sentinel.wait("the other drafters' gradients")
            with learner.gate.open_if(usable):
                accelerator.backward(out.loss)
        counts[:6] += torch.where(usable, out.counts, 0.0)
        if frame.kind is not Kind.PAD:
            # What came as SKIP has nothing in it, and no loss that could tell.
            counts[6] += 1 if frame.kind is Kind.SKIP else ~usable
        taken.append(frame)
        losses.append(out.loss.detach())
    # All drafters.
    counts = accelerator.reduce(counts, "sum")
    weight = counts[1]
    # DDP averages over the drafters: their number undoes that.
    scale = torch.where(weight > 0, accelerator.num_processes / weight, 0.0).float()
    for parameter in wrapped.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    norm = accelerator.clip_grad_norm_(wrapped.parameters(), job.config.optim.max_grad_norm)
    learner.optimizer.step()
    learner.schedule.step()
    learner.optimizer.zero_grad()
    # Last: by now the device has all of this step to do.
    learner.skips.tell(taken, torch.stack(losses))
    return torch.cat([counts, norm.double().reshape(1)])
