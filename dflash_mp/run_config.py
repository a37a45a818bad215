"""The configuration sections that keep a long run alive, or show what it does."""

from dataclasses import dataclass

from omegaconf import MISSING

from dflash_mp.errors import one_of, require


@dataclass
class CheckpointConfig:
    """What is kept of a run."""

    interval: int = MISSING
    keep: int = MISSING
    keep_best: bool = MISSING
    keep_every: int = MISSING

    def __post_init__(self) -> None:
        require(self.interval >= 0, "checkpoint.interval must not be negative")
        require(self.keep >= 1, "checkpoint.keep must be at least 1")
        require(self.keep_every >= 0, "checkpoint.keep_every must not be negative")


@dataclass
class FailureConfig:
    """When a rank counts as failed, and what is forgiven. Times are in seconds."""

    beat_s: float = MISSING
    silent_s: float = MISSING
    gil_s: float = MISSING
    setup_s: float = MISSING
    step_s: float = MISSING
    save_s: float = MISSING
    wait_s: float = MISSING
    stop_s: float = MISSING
    max_skips: int = MISSING

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            require(value > 0, f"failure.{key}={value}: must be positive")
        require(
            self.gil_s > self.beat_s,
            f"failure.gil_s={self.gil_s}: must be greater than failure.beat_s={self.beat_s}",
        )
        require(
            self.silent_s > self.gil_s,
            f"failure.silent_s={self.silent_s}: must be greater than failure.gil_s={self.gil_s}, "
            "so that a rank whose interpreter is stuck can show where",
        )


@dataclass
class ProfileConfig:
    """What is recorded of the first steps."""

    kind: str = MISSING
    skip: int = MISSING
    record: int = MISSING

    def __post_init__(self) -> None:
        one_of("profile.kind", self.kind, ("none", "steps", "memory"))
        require(self.skip >= 1, f"profile.skip={self.skip}: must be at least 1, the first warms up")
        require(self.record >= 1, f"profile.record={self.record}: must be at least 1")
