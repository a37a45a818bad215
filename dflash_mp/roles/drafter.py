"""The drafter's loop: take frames, add up losses, step, look, save.

It reads an iterator of feature batches and does not know where they come from.
"""

import logging
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator

from dflash_mp import checkpoint
from dflash_mp.cast import Cast
from dflash_mp.checkpoint import CheckpointWriter
from dflash_mp.config import TrainConfig, flat
from dflash_mp.drafter.checkpoint_format import load_drafter
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.hf_config import config_json
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.export_folder import write_export
from dflash_mp.features import FeatureBatch
from dflash_mp.job import Job
from dflash_mp.metrics import BlockCounts, empty_counts, unpack_counts
from dflash_mp.plan.machine import peak_rate
from dflash_mp.progress import progress_bar
from dflash_mp.resume import CHECKPOINTS, refuse_other_target
from dflash_mp.roles.decoding import Decoding
from dflash_mp.roles.live_report import LiveReport
from dflash_mp.roles.means import Means
from dflash_mp.roles.meter import Meter
from dflash_mp.roles.results import export_facts, write_results
from dflash_mp.roles.setup import frozen_head, head_dtype, make_learner, untrained
from dflash_mp.roles.step import due, kept, take, train_step, warm_up, watched
from dflash_mp.roles.target import TARGET_FINGERPRINT
from dflash_mp.sentinel import Sentinel
from dflash_mp.simulate import simulate
from dflash_mp.target.model import target_dtype
from dflash_mp.tracking import Tracker, run_facts
from dflash_mp.wire.edge import Edge
from dflash_mp.wire.receiver import Receiver
from dflash_mp.wire.takeover import Debts

log = logging.getLogger(__name__)

TARGET_LOADS = timedelta(days=1)


def run_drafter(cast: Cast, job: Job, sentinel: Sentinel, means: Means) -> None:
    """Play the drafter's part from the initial or restored weights to the export."""
    config, start, steps = job.config, job.start, job.plan.steps
    limits = config.failure
    sentinel.phase("load the drafter", limits.setup_s)
    accelerator = means.make_accelerator(cast, config, job.folder)
    model = untrained(job, cast.device)
    sentinel.wait("the target to be loaded")
    writer = make_writer(cast, job)
    sentinel.phase("restore", limits.setup_s)
    tracker = Tracker(accelerator, job.folder, steps, start.step, settings(config))
    decoding = Decoding(cast, job, tracker)
    # With the untrained weights: a continued run may have to ask for these, too.
    decoding.ask_before(model)
    # Participants of every collective below: all drafters. This one compiles, too.
    sentinel.wait("the other drafters to begin", limits.setup_s)
    learner = make_learner(accelerator, model, job)
    warm_up(learner, job)

    sentinel.wait("the edges")
    edges = means.open_edges(cast, job)
    receiver = make_receiver(cast, job, edges)
    frames = watched(iter(receiver), job.plan, cast.place.role_rank, sentinel)
    heldout = [kept(batch) for _, batch in take(frames, job.plan.heldout_frames)]

    meter = make_meter(cast, job, receiver, head_dtype(accelerator))
    vote, page = means.make_vote(sentinel), LiveReport(job.folder, cast.place.is_main)
    if cast.place.is_main:
        sentinel.training(True)
    for step in range(start.step + 1, steps + 1):
        sentinel.phase("step")
        meter.add(lambda: train_step(learner, frames, job, sentinel))

        # Once in a while, all drafters: walk over the held-out text.
        values: dict[str, float] = {}
        last = step == steps
        stopping = vote.decided() and not last
        if last or stopping:
            learner.skips.settle()
        sentinel.phase("evaluate, log, save", limits.save_s)
        if due(step, config.evaluate.interval, last) and job.heldout_packs:
            with accelerator.autocast():
                counted = evaluate_heldout(accelerator, model, learner.head, heldout, job, sentinel)
            values |= heldout_values(counted)
            page.walked(step, counted)
            meter.walked(values["eval/acceptance_length"])
        # Once in a while, the main drafter: log, save, ask the targets to decode.
        if due(step, config.log_interval, last):
            values |= meter.values(step, learner.schedule)
            if line := meter.split_advice():
                tracker.write(line)
        if values:
            tracker.log(step, values)
        tracker.show(step, meter.shown())
        if writer is not None and (stopping or due(step, config.checkpoint.interval, last)):
            writer.save(step, model, learner.optimizer, facts_of_step(job, step, values, meter))
        if not last and due(step, config.evaluate.decode_interval, last):
            decoding.ask(model, step)
        decoding.collect(wait=False)
        page.update(stopping, last)
        if stopping:
            leave_early(sentinel, writer, tracker, step)

    if writer is not None:
        sentinel.training(False)
        writer.close()
    finish(accelerator, job, model, heldout, decoding, tracker, sentinel)
    page.write()
    for edge in edges.values():
        edge.close()


def make_receiver(cast: Cast, job: Job, edges: dict[int, Edge]) -> Receiver:
    """This drafter's end of the stream; begins to receive."""
    config, timeout = job.config, timedelta(seconds=job.config.wire.timeout_s)
    debts = Debts(cast, job.plan, timeout) if config.topology.elastic else None
    return Receiver(cast, job.plan, job.layout, config.wire.slots, edges, timeout, debts)


def make_meter(cast: Cast, job: Job, receiver: Receiver, dtype: torch.dtype) -> Meter:
    """A meter that goes on with what an earlier process had counted.

    ``dtype`` is that of matrix products.
    """
    shape = job.drafter_config
    peak = peak_rate(cast.device, dtype, shape.hidden_size, shape.intermediate_size)
    meter = Meter(cast, job, receiver, peak)
    if job.start.checkpoint is not None:
        meter.restore(checkpoint.read_state(job.start.checkpoint)["meter"])
    return meter


def leave_early(
    sentinel: Sentinel, writer: CheckpointWriter | None, tracker: Tracker, step: int
) -> None:
    """End the job behind ``step``, as it was asked to; all drafters, the main one has saved."""
    tracker.close()
    if writer is not None:
        writer.close()
        sentinel.stopped(f"step {step} is saved; start again with resume=auto")
    sentinel.wait("the main drafter to save")
    sentinel.rest()


def make_writer(cast: Cast, job: Job) -> CheckpointWriter | None:
    """The main drafter's writer of checkpoints, once the target is known to be the right one."""
    if not cast.place.is_main:
        return None
    cast.store.wait([TARGET_FINGERPRINT], TARGET_LOADS)
    target = cast.store.get(TARGET_FINGERPRINT).decode()
    if job.start.checkpoint is not None:
        refuse_other_target(job.start.checkpoint, target)
    drafter = config_json(job.drafter_config, dtype="float32")
    facts = {
        "config": asdict(job.config),
        "drafter": config_json(job.drafter_config),
        "data": job.prepared.folder.name,
        "target": target,
        "versions": run_facts()["packages"],
    }
    return CheckpointWriter(job.folder / CHECKPOINTS, job.config.checkpoint, drafter, facts)


def facts_of_step(job: Job, step: int, values: dict[str, float], meter: Meter) -> dict[str, Any]:
    """What a checkpoint says beside its tensors."""
    return {
        "batches": job.plan.batches_done(step),
        "acceptance": values.get("eval/acceptance_length"),
        "meter": meter.state(),
    }


def finish(
    accelerator: Accelerator,
    job: Job,
    model: DFlashDraftModel,
    heldout: list[FeatureBatch],
    decoding: Decoding,
    tracker: Tracker,
    sentinel: Sentinel,
) -> None:
    """Export, measure the exported drafter in both ways, and tell where everything is."""
    steps, config = job.plan.steps, job.config
    sentinel.phase("export", config.failure.save_s)
    export = job.folder / "export"
    device = accelerator.device
    # As the targets decode: the exported weights, in the target's type.
    dtype = target_dtype(config.target, device)
    head = frozen_head(config, dtype, device)
    if accelerator.is_main_process:
        write_export(export, model, export_facts(job), head)
        decoding.ask_export(export, steps)
    # All drafters: the export is on disk.
    sentinel.wait("the main drafter to export", config.failure.save_s)
    accelerator.wait_for_everyone()
    sentinel.phase("evaluate the export", config.failure.save_s)
    exported = load_drafter(export, dtype, device, model.attention)
    counts = evaluate_heldout(accelerator, exported, head, heldout, job, sentinel)
    sentinel.wait("the targets to decode")
    decoding.collect(wait=True)
    decoding.end()
    if accelerator.is_main_process:
        sentinel.phase("write the results", config.failure.save_s)
        simulated = heldout_values(counts) if job.heldout_packs else {}
        results = {
            "simulated": simulated,
            "decoded_before": decoding.summaries.get(0),
            "decoded": decoding.summaries.get(steps),
        }
        tracker.log(steps, {f"final/{k[5:]}": v for k, v in simulated.items()})
        tracker.close()
        write_results(job, results)
    else:
        # NCCL destroys a group when all ranks do, and the main drafter waits for the decoding.
        sentinel.wait("the main drafter to write the results")
        tracker.close()


def evaluate_heldout(
    accelerator: Accelerator,
    model: DFlashDraftModel,
    head: FrozenHead,
    heldout: list[FeatureBatch],
    job: Job,
    sentinel: Sentinel,
) -> BlockCounts:
    """Walk over the held-out text; all drafters, each over its share of the micro-batches."""
    config = job.config
    counts = empty_counts(config.drafter.block_size)
    hidden = not accelerator.is_main_process
    for batch in progress_bar(
        iterable=heldout, desc="held-out", unit="batch", delay=1, leave=False, disable=hidden
    ):
        if bool((batch.document_ids >= 0).any()):
            anchors, rows = config.drafter.anchors_per_batch, config.loss.rows_per_chunk
            counts += simulate(batch, model, head, anchors, rows)[0]
    sentinel.wait("the other drafters' counts")
    total = accelerator.reduce(counts.pack().to(accelerator.device), "sum")
    return unpack_counts(total, job.config.drafter.block_size)


def heldout_values(counts: BlockCounts) -> dict[str, float]:
    """What is logged of a walk."""
    return {
        "eval/acceptance_length": counts.acceptance_length,
        "eval/uniform_anchor_length": counts.uniform_anchor_length,
        "eval/loss": counts.cross_entropy,
    }


def settings(config: TrainConfig) -> dict[str, Any]:
    """The configuration as dotted keys and plain values, for trackers."""
    return {
        key: value if isinstance(value, int | float | str) else str(value)
        for key, value in flat(asdict(config)).items()
    }
