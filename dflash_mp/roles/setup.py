"""What a drafter rank works with: Accelerate, number types, attention, the target's frozen head."""

from pathlib import Path

import torch
from accelerate import Accelerator

from dflash_mp.cast import Cast
from dflash_mp.config import TrainConfig
from dflash_mp.drafter.frozen_head import FrozenHead, load_frozen_head
from dflash_mp.target.model import resolve


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
