"""The drafter's loop: take frames, add up losses, step, look, save.

It reads an iterator of feature batches and does not know where they come from.
"""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from dflash_mp import checkpoint
from dflash_mp.cast import Cast
from dflash_mp.config import TrainConfig
from dflash_mp.drafter.checkpoint_format import load_drafter, save_drafter
from dflash_mp.drafter.frozen_head import FrozenHead, load_frozen_head
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.drafter.step import batch_loss
from dflash_mp.features import FeatureBatch
from dflash_mp.job import Job
from dflash_mp.metrics import BlockCounts, empty_counts, unpack_counts
from dflash_mp.optim import build_optimizer, build_schedule
from dflash_mp.roles.decoding import Decoding
from dflash_mp.roles.meter import Meter
from dflash_mp.roles.results import write_results
from dflash_mp.simulate import simulate
from dflash_mp.target.model import resolve, target_dtype
from dflash_mp.tracking import Tracker
from dflash_mp.wire.plan import Frame
from dflash_mp.wire.stream import Receiver, open_edges

log = logging.getLogger(__name__)


def run_drafter(cast: Cast, job: Job) -> None:
    """Play the drafter's part from the initial weights to the export."""
    config = job.config
    timeout = timedelta(seconds=config.wire.timeout_s)
    accelerator = make_accelerator(cast, config, job.folder)
    model = DFlashDraftModel(job.drafter_config, attention_backend(config, cast.device))
    model.init_weights(config.seed)
    model.to(cast.device)
    head = frozen_head(config, head_dtype(accelerator), cast.device)
    # Participants of every collective below: all drafters.
    optimizer = build_optimizer(model, config.optim)
    schedule = build_schedule(optimizer, job.plan.steps, config.schedule)
    wrapped, optimizer = accelerator.prepare(model, optimizer)

    edges = open_edges(cast, timeout)
    receiver = Receiver(cast, job.plan, job.layout, config.wire.slots, edges, timeout)
    frames = iter(receiver)
    tracker = Tracker(accelerator, job.folder, job.plan.steps, 0, flat(config))
    decoding = Decoding(cast, job, tracker)
    decoding.ask_before(model)
    heldout = [kept(batch) for _, batch in take(frames, job.plan.heldout_frames)]

    meter = Meter(cast, job, receiver)
    for step in range(1, job.plan.steps + 1):
        counts = train_step(accelerator, wrapped, optimizer, schedule, head, frames, job)
        meter.add(counts)

        # Once in a while, all drafters: walk over the held-out text.
        values: dict[str, float] = {}
        last = step == job.plan.steps
        if due(step, config.evaluate.interval, last) and job.heldout_packs:
            with accelerator.autocast():
                counted = evaluate_heldout(accelerator, model, head, heldout, job)
            values |= heldout_values(counted)
            meter.acceptance = values["eval/acceptance_length"]
        # Once in a while, the main drafter: log, save, ask the targets to decode.
        if due(step, config.log_interval, last):
            values |= meter.values(accelerator, schedule)
        if values:
            tracker.log(step, values)
        tracker.show(step, meter.shown())
        if accelerator.is_main_process and due(step, config.checkpoint.interval, last):
            save_checkpoint(job, step, model, optimizer)
        if not last and due(step, config.evaluate.decode_interval, last):
            decoding.ask(model, step)
        decoding.collect(wait=False)

    finish(accelerator, job, model, heldout, decoding, tracker)
    for edge in edges.values():
        edge.close()


def finish(
    accelerator: Accelerator,
    job: Job,
    model: DFlashDraftModel,
    heldout: list[FeatureBatch],
    decoding: Decoding,
    tracker: Tracker,
) -> None:
    """Export, measure the exported drafter in both ways, and tell where everything is."""
    steps, config = job.plan.steps, job.config
    export = job.folder / "export"
    if accelerator.is_main_process:
        save_drafter(model, export)
        decoding.ask_export(export, steps)
    # All drafters: the export is on disk.
    accelerator.wait_for_everyone()
    device = accelerator.device
    # As the targets decode: the exported weights, in the target's type.
    dtype = target_dtype(config.target, device)
    exported = load_drafter(export, dtype, device, model.attention)
    head = frozen_head(config, dtype, device)
    counts = evaluate_heldout(accelerator, exported, head, heldout, job)
    decoding.collect(wait=True)
    decoding.end()
    if accelerator.is_main_process:
        results = {
            "simulated": heldout_values(counts) if job.heldout_packs else {},
            "decoded_before": decoding.summaries.get(0),
            "decoded": decoding.summaries.get(steps),
        }
        tracker.log(steps, {f"final/{k[5:]}": v for k, v in results["simulated"].items()})
        tracker.close()
        write_results(job, results)
    else:
        tracker.close()


def make_accelerator(cast: Cast, config: TrainConfig, folder: Path) -> Accelerator:
    """Accelerate over the drafters' world."""
    on_cpu = cast.device.type == "cpu"
    return Accelerator(
        cpu=on_cpu,
        mixed_precision="bf16" if use_bfloat16(config, cast.device) else "no",
        log_with=list(config.trackers) or None,
        project_dir=folder,
    )


def use_bfloat16(config: TrainConfig, device: torch.device) -> bool:
    """Whether matrix products run in bfloat16: where asked, or where the processor has it."""
    if config.drafter.precision != "auto":
        return config.drafter.precision == "bfloat16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def frozen_head(config: TrainConfig, dtype: torch.dtype, device: torch.device) -> FrozenHead:
    """The target's embedding and head, from its checkpoint."""
    target = config.target
    return load_frozen_head(
        resolve(target), dtype, device, target.revision, target.trust_remote_code
    )


def head_dtype(accelerator: Accelerator) -> torch.dtype:
    """The frozen head is stored in the type in which it is multiplied."""
    return torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32


def attention_backend(config: TrainConfig, device: torch.device) -> str:
    """``drafter.attention``; auto is flex on CUDA and sdpa elsewhere."""
    if config.drafter.attention != "auto":
        return config.drafter.attention
    return "flex" if device.type == "cuda" else "sdpa"


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


def evaluate_heldout(
    accelerator: Accelerator,
    model: DFlashDraftModel,
    head: FrozenHead,
    heldout: list[FeatureBatch],
    job: Job,
) -> BlockCounts:
    """Walk over the held-out text; all drafters, each over its share of the micro-batches."""
    config = job.config
    counts = empty_counts(config.drafter.block_size)
    for batch in heldout:
        if bool((batch.document_ids >= 0).any()):
            anchors, rows = config.drafter.anchors_per_batch, config.loss.rows_per_chunk
            counts += simulate(batch, model, head, anchors, rows)[0]
    total = accelerator.reduce(counts.pack().to(accelerator.device), "sum")
    return unpack_counts(total, job.config.drafter.block_size)


def heldout_values(counts: BlockCounts) -> dict[str, float]:
    """What is logged of a walk."""
    return {
        "eval/acceptance_length": counts.acceptance_length,
        "eval/uniform_anchor_length": counts.uniform_anchor_length,
        "eval/loss": counts.cross_entropy,
    }


def save_checkpoint(
    job: Job, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write a checkpoint and drop the oldest; the main drafter only."""
    folder = job.folder / "checkpoints"
    facts = {"drafter": job.drafter_config.to_dict(), "data": job.prepared.folder.name}
    checkpoint.save(folder, step, model, optimizer, facts)
    checkpoint.prune(folder, job.config.checkpoint.keep)


def flat(config: TrainConfig) -> dict[str, Any]:
    """The configuration as dotted keys and plain values, for trackers."""
    values: dict[str, Any] = {}
    for key, section in vars(config).items():
        nested = vars(section) if hasattr(section, "__dict__") else {None: section}
        for name, value in nested.items():
            full = key if name is None else f"{key}.{name}"
            values[full] = value if isinstance(value, int | float | str) else str(value)
    return values
