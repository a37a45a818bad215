"""The optimizer and its learning-rate schedule."""

import math
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from dflash_mp.config import OptimConfig, ScheduleConfig


class Combined(torch.optim.Optimizer):
    """Optimizers of different parameters as one: its groups and its state are theirs.

    Args:
        parts: without a state yet.
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # load_state_dict has made new groups and a new state.
        self._share()

    def _share(self) -> None:
        first = 0
        for part in self.parts:
            last = first + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[first:last], self.state
            first = last

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure here
        """A step of each part."""
        for part in self.parts:
            part.step(closure)


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """``optim.kind`` over float32 master weights; only matrices decay.

    Muon orthogonalises what it moves a matrix by (Jordan 2024) and scales that to the size of
    AdamW's moves, so that one learning rate fits both (arXiv 2502.16982); vectors are AdamW's.
    """
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    moved = {"params": matrices, "weight_decay": config.weight_decay}
    rest = {"params": vectors, "weight_decay": 0.0}
    betas = (config.beta1, config.beta2)
    if config.kind == "adamw":
        return torch.optim.AdamW([moved, rest], lr=config.lr, betas=betas, fused=True)
    return Combined(
        torch.optim.Muon(
            [moved], lr=config.lr, momentum=config.momentum, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW([rest], lr=config.lr, betas=betas, fused=True),
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
