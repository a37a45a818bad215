"""What a drafter rank works with: Accelerate, number types, attention, the target's frozen head."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dflash_mp import checkpoint
from dflash_mp.cast import Cast, cpu_has_bfloat16
from dflash_mp.config import TrainConfig, require
from dflash_mp.drafter.frozen_head import FrozenHead, load_frozen_head
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.job import Job
from dflash_mp.optim import build_optimizer, build_schedule
from dflash_mp.published import set_initial_weights
from dflash_mp.roles.skips import Gate, Skips
from dflash_mp.roles.step import Learner
from dflash_mp.target.model import resolve


def make_accelerator(cast: Cast, config: TrainConfig, folder: Path) -> Accelerator:
    """Accelerate over the drafters' world."""
    on_cpu = cast.device.type == "cpu"
    # In a sweep an earlier job of this process has left its world and its precision behind.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
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
    return cpu_has_bfloat16()


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
    chosen = config.drafter.attention
    require(
        chosen != "flex" or device.type == "cuda",
        "drafter.attention=flex: FlexAttention has no backward on a CPU; use sdpa or auto",
    )
    if chosen != "auto":
        return chosen
    return "flex" if device.type == "cuda" else "sdpa"


def untrained(job: Job, device: torch.device) -> DFlashDraftModel:
    """The drafter that a run begins with."""
    drafter = job.config.drafter
    attention = attention_backend(job.config, device)
    model = DFlashDraftModel(job.drafter_config, attention, drafter.activation_checkpointing)
    if not set_initial_weights(model, job.config):
        model.init_weights(job.config.seed)
    if drafter.compile is not None:
        for mlp in mlps(model):
            # Its number of rows is that of the micro-batch.
            mlp.compile(backend=drafter.compile, dynamic=True)
    return model.to(device)


def mlps(model: DFlashDraftModel) -> list[nn.Module]:
    """What ``drafter.compile`` is about: the part of each layer that works row by row."""
    return [module for name, module in model.named_modules() if name.endswith(".mlp")]


def make_learner(accelerator: Accelerator, model: DFlashDraftModel, job: Job) -> Learner:
    """``model`` with its optimizer, as they were at the start of this run; all drafters."""
    config, start = job.config, job.start
    optimizer = build_optimizer(model, config.optim)
    if start.checkpoint is not None:
        checkpoint.load(start.checkpoint, model, optimizer)
    schedule = build_schedule(optimizer, job.plan.steps, config.schedule, start.step)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    if isinstance(wrapped, DistributedDataParallel):
        # Its buffers are constants: no broadcast in each step. Accelerate could only pass an
        # argument of which torch says that it is deprecated.
        wrapped.forward_sync_buffers = False
    head = frozen_head(config, head_dtype(accelerator), accelerator.device)
    gate, skips = Gate(model.parameters(), accelerator.device), Skips(config.failure.max_skips)
    return Learner(accelerator, model, wrapped, optimizer, schedule, head, gate, skips)
