"""The configuration sections of learning: objective, optimizer, learning rate."""

import math
from dataclasses import dataclass

from omegaconf import MISSING

from dflash_mp.errors import one_of, require

CROSS_ENTROPY = "cross-entropy"
OBJECTIVES = {
    "ce": CROSS_ENTROPY,
    "dpace": "cross-entropy with D-PACE weights",
    "kl": "KL divergence from the target",
    "tv": "total variation from the target",
    "ce+kl": "cross-entropy plus KL divergence",
}
"""What ``loss.kind`` takes, and how plots call the training loss; all but ``tv`` are in nats."""


@dataclass
class LossConfig:
    """The training objective."""

    kind: str = MISSING
    labels: str = MISSING
    decay: bool = MISSING
    gamma: float | None = MISSING
    dpace_alpha: float = MISSING
    rows_per_chunk: int = MISSING

    def __post_init__(self) -> None:
        one_of("loss.kind", self.kind, tuple(OBJECTIVES))
        one_of("loss.labels", self.labels, ("data", "target"))
        require(
            not (self.decay and self.kind == "dpace"),
            "loss.kind=dpace weighs the slots itself: use loss=dpace, or set loss.decay=false",
        )
        require(self.gamma is None or self.gamma > 0, f"loss.gamma={self.gamma}: must be positive")
        require(0 < self.dpace_alpha <= 1, f"loss.dpace_alpha={self.dpace_alpha}: not in (0, 1]")
        require(self.rows_per_chunk >= 1, "loss.rows_per_chunk must be at least 1")

    @property
    def reads_target(self) -> bool:
        """Whether the objective needs the target's own prediction at each slot."""
        return self.labels == "target" or self.kind not in ("ce", "dpace")


@dataclass
class OptimConfig:
    """How gradients become steps."""

    kind: str = MISSING
    lr: float = MISSING
    weight_decay: float = MISSING
    beta1: float = MISSING
    beta2: float = MISSING
    momentum: float = MISSING
    max_grad_norm: float = MISSING

    def __post_init__(self) -> None:
        one_of("optim.kind", self.kind, ("adamw", "muon"))
        require(self.lr > 0, f"optim.lr={self.lr}: must be positive")
        require(math.isfinite(self.lr), f"optim.lr={self.lr}: must be finite")
        require(self.weight_decay >= 0, f"optim.weight_decay={self.weight_decay}: negative")
        for key in ("beta1", "beta2", "momentum"):
            value = getattr(self, key)
            require(0 <= value < 1, f"optim.{key}={value}: must be at least 0 and below 1")
        require(self.max_grad_norm > 0, "optim.max_grad_norm must be positive")


@dataclass
class ScheduleConfig:
    """Learning rate over the run."""

    kind: str = MISSING
    warmup: float = MISSING
    decay: float = MISSING
    min_ratio: float = MISSING

    def __post_init__(self) -> None:
        one_of("schedule.kind", self.kind, ("cosine", "wsd", "constant"))
        for key in ("warmup", "decay", "min_ratio"):
            value = getattr(self, key)
            require(0 <= value <= 1, f"schedule.{key}={value}: must be between 0 and 1")
