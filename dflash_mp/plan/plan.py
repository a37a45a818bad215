"""The whole plan of a run: from its configuration to work, memory, splits, wire, time and disk."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import Qwen3Config

from dflash_mp.cast import cpu_has_bfloat16, split
from dflash_mp.plan.machine import Machine, Sample, make_machine
from dflash_mp.plan.memory import (
    CPU_RESERVE,
    GPU_RESERVE,
    Learning,
    Parts,
    decoding_memory,
    drafter_memory,
    refuse_if_too_large,
    target_memory,
)
from dflash_mp.plan.predict import Costs, Prediction, all_splits, fastest, predict
from dflash_mp.plan.settings import PlanRun
from dflash_mp.plan.shapes import TargetShape, drafter_shape, layer_ids, read_target
from dflash_mp.plan.work import (
    Batch,
    Work,
    drafter_rows,
    drafter_work,
    keys_seen,
    step_work,
    target_work,
)
from dflash_mp.target.model import target_dtype
from dflash_mp.wire.frame import DTYPES, Layout, size

BACKWARD = 2 / 3
"""Share of a micro-batch's time that is backward, behind which gradients are exchanged."""

MASTER_BYTES = 4
"""A checkpoint's bytes of each parameter itself, in fp32."""

MOMENT_BYTES = {"adamw": 8, "muon": 4}
"""An optimizer's bytes for each parameter, by ``optim.kind``: two moments or one."""

EXPORT_BYTES = 2


@dataclass(frozen=True)
class Sizes:
    """What is fixed by the models and the batch, whatever the machine."""

    target: TargetShape
    drafter: Qwen3Config
    drafter_parameters: int
    matrices: list[tuple[int, int]]
    """Shapes of the drafter's."""

    depth: int
    """Target layers that run."""

    taps: int
    frame: int
    """Bytes of a micro-batch on the wire."""

    kept: int
    """Bytes of a held-out micro-batch that a drafter keeps."""

    beside_ring: int
    """Bytes of a drafter's other frames, which are not in flight."""

    batch: Batch
    target_dtype: torch.dtype
    drafter_dtype: torch.dtype


def measure_sizes(run: PlanRun) -> Sizes:
    """Read both configurations; raises ``UserError`` where they do not fit together."""
    target, config = read_target(run.target)
    taps = layer_ids(run.target, run.drafter, len(target.layers))
    drafter, shapes = drafter_shape(config, run.drafter, taps)
    final = run.loss.reads_target
    layout = Layout(
        tokens=run.data.tokens_per_batch,
        taps=len(taps),
        hidden_width=len(taps) * target.hidden,
        final_width=target.hidden if final else 0,
        dtype=DTYPES[run.wire.dtype],
    )
    batch = Batch(
        tokens=run.data.tokens_per_batch,
        document=run.document,
        anchors=run.drafter.anchors_per_batch,
        supervised=run.supervised,
        fixed=not run.gpu.cpu,
    )
    return Sizes(
        target=target,
        drafter=drafter,
        drafter_parameters=sum(shape.numel() for shape in shapes),
        matrices=[(shape[0], shape[1]) for shape in shapes if len(shape) == 2],
        depth=len(target.layers) if final else taps[-1] + 1,
        taps=len(taps),
        frame=layout.nbytes,
        kept=sum(size(dtype, shape) for _, dtype, shape in layout.plain.sections),
        # Padding, and where a quantised frame's values go.
        beside_ring=layout.plain.nbytes * (2 if layout.quantised else 1),
        batch=batch,
        target_dtype=target_dtype(run.target, torch.device("cpu" if run.gpu.cpu else "cuda")),
        drafter_dtype=product_dtype(run),
    )


def product_dtype(run: PlanRun) -> torch.dtype:
    """Type of the drafter's matrix products."""
    asked = run.drafter.precision
    low = asked == "bfloat16" if asked != "auto" else not run.gpu.cpu or cpu_has_bfloat16()
    return torch.bfloat16 if low else torch.float32


def work_of_target(sizes: Sizes) -> Work:
    """One micro-batch on a target."""
    return target_work(sizes.target, sizes.depth, sizes.batch, sizes.target_dtype.itemsize)


def work_of_drafter(sizes: Sizes, run: PlanRun) -> Work:
    """One micro-batch on a drafter, without its share of the optimizer."""
    rows = drafter_rows(sizes.batch, run.drafter.block_size)
    return drafter_work(
        sizes.drafter,
        sizes.drafter_parameters,
        rows,
        sizes.batch,
        run.loss.reads_target,
        sizes.drafter_dtype.itemsize,
        run.drafter.activation_checkpointing,
    )


def machine_for(sizes: Sizes, run: PlanRun) -> Machine:
    """``run.gpu``; what it does not state is measured on products of these models' sizes."""
    hidden, inner = sizes.target.hidden, sizes.drafter.intermediate_size
    head = sizes.drafter.head_dim
    return make_machine(
        run.gpu,
        run.gpus,
        Sample(sizes.target_dtype, hidden, inner, head, learns=False),
        Sample(sizes.drafter_dtype, hidden, inner, head, learns=True),
    )


def costs_of(sizes: Sizes, run: PlanRun, machine: Machine) -> Costs:
    """Seconds of a micro-batch on each side.

    Blocks that go through in slices have all gradients ready in the forward (``drafter.slices``):
    the backward hands them over at once, and nothing is left to exchange them behind.
    """
    drafter_s = machine.drafter.seconds(work_of_drafter(sizes, run))
    muon = run.optim.kind == "muon"
    return Costs(
        tokens=run.data.tokens_per_batch,
        target_s=machine.target.seconds(work_of_target(sizes)),
        drafter_s=drafter_s,
        hidden_s=0.0 if learning_of(sizes, run).sliced else BACKWARD * drafter_s,
        per_step_s=machine.drafter.seconds(
            step_work(sizes.drafter_parameters, sizes.matrices if muon else ())
        ),
        gradient=4.0 * sizes.drafter_parameters,
        exchange=machine.exchange,
        network=machine.network,
        latency_s=run.scaling.network_latency_us * 1e-6,
        per_step=run.micro_batches_per_step,
    )


def learning_of(sizes: Sizes, run: PlanRun) -> Learning:
    """How a drafter will make its gradient."""
    attention = run.drafter.attention
    return Learning(
        rows=drafter_rows(sizes.batch, run.drafter.block_size),
        keys=keys_seen(sizes.batch, run.drafter.block_size, None),
        itemsize=sizes.drafter_dtype.itemsize,
        sliced=attention != "flex" and (run.gpu.cpu or attention != "auto"),
        recomputed=run.drafter.activation_checkpointing,
        chunk=run.loss.rows_per_chunk,
        reads_target=run.loss.reads_target,
        objective=run.loss.kind,
        cpu=run.gpu.cpu,
        # Muon has one momentum; the two of its vectors do not count.
        moments=MOMENT_BYTES[run.optim.kind],
    )


def kept_frames(run: PlanRun) -> int:
    """Held-out micro-batches that each drafter keeps, if conversations are as long as stated."""
    if run.data.heldout is None:
        return 0
    drafters = split(run.gpus, run.topology)[1] * run.nodes
    packs = math.ceil(run.evaluate.max_rows / (run.data.tokens_per_batch // run.document))
    return math.ceil(packs / drafters)


def decoding_of(sizes: Sizes, run: PlanRun) -> float:
    """Bytes that a target needs to decode a held-out prompt; 0 if none is decoded."""
    if run.data.heldout is None or run.evaluate.decode_prompts == 0:
        return 0.0
    return decoding_memory(
        sizes.target,
        sizes.drafter_parameters,
        run.data.max_length,
        run.evaluate.max_new_tokens,
        sizes.target_dtype.itemsize,
        run.gpu.cpu,
    )


def memory_of(sizes: Sizes, run: PlanRun) -> dict[str, Parts]:
    """Bytes of a rank of each role by part."""
    reserve = CPU_RESERVE if run.gpu.cpu else GPU_RESERVE
    return {
        "target": target_memory(
            sizes.target,
            sizes.frame,
            run.data.tokens_per_batch,
            sizes.taps,
            sizes.target_dtype.itemsize,
            decoding_of(sizes, run),
            reserve,
        ),
        "drafter": drafter_memory(
            sizes.drafter,
            sizes.drafter_parameters,
            learning_of(sizes, run),
            {
                "ring": float(run.wire.slots * sizes.frame + sizes.beside_ring),
                "held-out": float(kept_frames(run) * sizes.kept),
            },
            sizes.target.tied,
            sizes.target_dtype.itemsize,
            reserve,
        ),
    }


def wire_load(best: Prediction, sizes: Sizes, run: PlanRun, machine: Machine) -> dict[str, float]:
    """Bytes/s on each kind of link, and its share of that link's speed."""
    per_node = best.rate / best.nodes * sizes.frame / sizes.batch.tokens
    sent, received = per_node / best.targets, per_node / best.drafters
    between = 2 * (best.nodes - 1) / best.nodes * 4.0 * sizes.drafter_parameters / best.drafters
    exchanged = between * best.rate / best.step_tokens
    busiest = max(sent, received)
    # Between CPU ranks this is what gradients take, too.
    link = machine.exchange if run.wire.edge == "gloo" else machine.link
    return {
        "target_sends": sent,
        "drafter_receives": received,
        "drafter_exchanges_between_nodes": exchanged,
        "share_of_link": busiest / link,
        "share_of_host": busiest / machine.host,
        "share_of_network": exchanged / machine.network,
    }


def disk(run: PlanRun, parameters: int, steps: int) -> dict[str, float]:
    """Bytes of one checkpoint, of all that are there at once, and of the export."""
    policy = run.checkpoint
    kept = policy.keep + policy.keep_best
    if policy.keep_every:
        kept += steps // policy.keep_every
    one = float((MASTER_BYTES + MOMENT_BYTES[run.optim.kind]) * parameters)
    # One more is being written before the oldest goes.
    return {"checkpoint": one, "checkpoints": one * (kept + 1), "export": EXPORT_BYTES * parameters}


def make_plan(run: PlanRun) -> dict[str, Any]:
    """All that is predicted, as JSON values; times in seconds, sizes in bytes.

    Raises:
        UserError: a configuration that cannot be read, or a rank that does not fit.
    """
    sizes = measure_sizes(run)
    machine = machine_for(sizes, run)
    memory = memory_of(sizes, run)
    for role, parts in memory.items():
        refuse_if_too_large(role, parts, machine.memory)
    costs = costs_of(sizes, run, machine)
    splits = all_splits(costs, run.gpus, run.nodes)
    best = fastest(splits)
    usual = predict(costs, *split(run.gpus, run.topology), nodes=run.nodes)
    read = run.steps * best.step_tokens if run.steps else run.tokens * run.epochs
    seconds, steps = read / best.rate, math.ceil(read / best.step_tokens)
    target, drafter = work_of_target(sizes), work_of_drafter(sizes, run)
    return {
        "target": {
            "name": run.target.name,
            "parameters": sizes.target.parameters,
            "layers_run": sizes.depth,
            "layers": len(sizes.target.layers),
            "flops_per_token": (target.flops + target.attention) / costs.tokens,
            "bytes_per_token": (target.bytes + target.in_place) / costs.tokens,
            "rate": costs.tokens / costs.target_s,
        },
        "drafter": {
            "parameters": sizes.drafter_parameters,
            "layers": sizes.drafter.num_hidden_layers,
            "flops_per_token": (drafter.flops + drafter.attention) / costs.tokens,
            "bytes_per_token": (drafter.bytes + drafter.in_place) / costs.tokens,
            "rate": costs.tokens / costs.drafter_s,
        },
        "machine": {"name": run.gpu.name, **asdict(machine)},
        "memory": memory,
        "costs": asdict(costs),
        "splits": [asdict(prediction) for prediction in splits],
        "best": asdict(best),
        "default": asdict(usual),
        "wire": wire_load(best, sizes, run, machine),
        "steps": steps,
        "hours": seconds / 3600,
        "gpu_hours": seconds / 3600 * run.gpus * run.nodes,
        "disk": disk(run, sizes.drafter_parameters, steps),
    }
