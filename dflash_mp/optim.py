"""The optimizer and its learning-rate schedule."""

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from dflash_mp.config import OptimConfig, ScheduleConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over float32 master weights; only matrices decay."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def learning_rate_ratio(step: int, steps: int, config: ScheduleConfig) -> float:
    """Learning rate over its peak in optimizer step ``step`` (1-based) of ``steps``."""
    warmup = max(1, round(config.warmup * steps))
    if step <= warmup:
        return step / warmup
    match config.kind:
        case "constant":
            return 1.0
        case "wsd":
            start = max(warmup, steps - round(config.decay * steps))
        case _:
            start = warmup
    # The step after the last one would have the lowest rate: no step is spent on min_ratio = 0.
    progress = min(1.0, max(0.0, (step - start) / (steps - start + 1)))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_ratio + (1.0 - config.min_ratio) * cosine


def build_schedule(
    optimizer: torch.optim.Optimizer, steps: int, config: ScheduleConfig, done: int = 0
) -> LambdaLR:
    """``learning_rate_ratio`` as a torch scheduler, stepped once per optimizer step.

    ``done`` steps lie behind; the peak is the learning rate that the optimizer has now.
    """
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return LambdaLR(
        optimizer, lambda step: learning_rate_ratio(step + 1, steps, config), last_epoch=done - 1
    )
