"""The root of ``conf/plan.yaml``; importable without torch."""

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from dflash_mp.config import TrainConfig, require

TYPICAL_TOKENS = 1024
"""Of a conversation, where nothing is said and so long ones are allowed."""


@dataclass
class GpuConfig:
    """One rank's device and its links. Rates that are null are measured on this machine."""

    name: str = MISSING
    cpu: bool = MISSING
    bfloat16_tflops: float | None = MISSING
    float32_tflops: float | None = MISSING
    attention_share: float | None = MISSING
    memory_gb: float | None = MISSING
    memory_gb_s: float | None = MISSING
    link_gb_s: float = MISSING
    exchange_gb_s: float = MISSING
    host_gb_s: float = MISSING
    network_gb_s: float = MISSING
    efficiency: float = MISSING

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if isinstance(value, float):
                require(value > 0, f"gpu.{key}={value}: must be positive")
        require(self.efficiency <= 1, f"gpu.efficiency={self.efficiency}: must be at most 1")


@dataclass
class ScalingConfig:
    """What the simulation of many nodes assumes."""

    step_spread: float = MISSING
    network_latency_us: float = MISSING
    store_frames_per_s: float = MISSING

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            require(value >= 0, f"scaling.{key}={value}: must not be negative")
        require(self.store_frames_per_s > 0, "scaling.store_frames_per_s must be positive")


@dataclass
class PlanRun(TrainConfig):
    """The root of ``conf/plan.yaml``: a training, and where it is to run."""

    gpu: GpuConfig = MISSING
    scaling: ScalingConfig = MISSING
    gpus: int = MISSING
    nodes: int = MISSING
    simulate: bool = MISSING
    tokens: float = MISSING
    document_tokens: int | None = MISSING
    supervised: float = MISSING
    output: str = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.gpus >= 2, f"gpus={self.gpus}: a target and a drafter need at least 2")
        for key in ("nodes", "tokens"):
            value = getattr(self, key)
            require(value >= 1, f"{key}={value}: must be at least 1")
        slots = self.data.tokens_per_batch
        require(
            2 <= self.document <= slots,
            f"document_tokens={self.document}: must be between 2 and data.tokens_per_batch={slots}",
        )
        require(0 < self.supervised <= 1, f"supervised={self.supervised}: must be in (0, 1]")
        require(
            self.init["from"] is None,
            f"init.from={self.init['from']}: the plan does not read a published drafter; state its "
            "shape in drafter.layers, drafter.block_size and so on instead",
        )
        require(
            self.isolation == "processes",
            f"isolation={self.isolation}: the plan is of a process for each rank",
        )

    @property
    def document(self) -> int:
        """Tokens of a typical conversation."""
        stated = self.document_tokens
        return min(TYPICAL_TOKENS, self.data.max_length) if stated is None else stated


ConfigStore.instance().store(name="plan_schema", node=PlanRun)
