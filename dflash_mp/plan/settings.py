"""The root of ``conf/plan.yaml``; importable without torch."""

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from dflash_mp.config import (
    CheckpointConfig,
    DrafterConfig,
    LossConfig,
    TargetConfig,
    WireConfig,
    require,
)


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
class PlanRun:
    """The root of ``conf/plan.yaml``."""

    target: TargetConfig = MISSING
    drafter: DrafterConfig = MISSING
    loss: LossConfig = MISSING
    wire: WireConfig = MISSING
    checkpoint: CheckpointConfig = MISSING
    gpu: GpuConfig = MISSING
    scaling: ScalingConfig = MISSING
    gpus: int = MISSING
    nodes: int = MISSING
    simulate: bool = MISSING
    tokens: float = MISSING
    epochs: int = MISSING
    tokens_per_batch: int = MISSING
    document_tokens: int = MISSING
    supervised: float = MISSING
    micro_batches_per_step: int | None = MISSING
    run_name: str = MISSING

    def __post_init__(self) -> None:
        require(self.gpus >= 2, f"gpus={self.gpus}: a target and a drafter need at least 2")
        for key in ("nodes", "tokens", "epochs"):
            value = getattr(self, key)
            require(value >= 1, f"{key}={value}: must be at least 1")
        require(
            2 <= self.document_tokens <= self.tokens_per_batch,
            f"document_tokens={self.document_tokens}: must be between 2 and "
            f"tokens_per_batch={self.tokens_per_batch}",
        )
        require(0 < self.supervised <= 1, f"supervised={self.supervised}: must be in (0, 1]")
        per_step = self.micro_batches_per_step
        require(
            per_step is None or per_step >= self.nodes,
            f"micro_batches_per_step={per_step}: leaves some of nodes={self.nodes} without work",
        )


ConfigStore.instance().store(name="plan_schema", node=PlanRun)
