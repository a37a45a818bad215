"""Every configuration key, its type, and the checks that need nothing but the configuration.

Hydra composes ``conf/``; ``to_config`` turns the result into these dataclasses and validates it.
Past that point there is no ``DictConfig``. Defaults live in the YAML files, each with a comment;
this module must stay importable without torch.
"""

import difflib
import os
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_mp.errors import UserError, one_of, require
from dflash_mp.learning_config import LossConfig, OptimConfig, ScheduleConfig
from dflash_mp.run_config import CheckpointConfig, FailureConfig, ProfileConfig

ROLES = ("system", "user", "assistant", "tool")
"""What a turn of a conversation may be."""

COLUMN_NAMES = (
    *("messages", "role", "content", "prompt", "completion", "instruction", "input", "output"),
    *("text", "input_ids", "loss_mask", "tools"),
)
"""Names of a row's parts that ``data.columns`` may map to the names in the user's file."""


@dataclass
class TargetConfig:
    """The frozen model whose greedy output must not change."""

    name: str = MISSING
    revision: str | None = MISSING
    dtype: str = MISSING
    attention: str = MISSING
    layer_ids: list[int] | None = MISSING
    trust_remote_code: bool = MISSING
    # Whoever builds a target in code seldom cares.
    compile: bool = False

    def __post_init__(self) -> None:
        one_of("target.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        one_of("target.attention", self.attention, ("sdpa", "eager", "flash_attention_2"))
        require(
            not (self.compile and self.attention == "flash_attention_2"),
            "target.compile=true: with target.attention=flash_attention_2 shapes vary with the "
            "documents of a row, and each would be compiled: use sdpa",
        )
        ids = self.layer_ids
        if ids is not None:
            require(len(ids) > 0, "target.layer_ids is empty: name at least one layer, or null")
            require(min(ids) >= 0, f"target.layer_ids={ids}: layers count from 0")
            require(len(set(ids)) == len(ids), f"target.layer_ids={ids}: a layer is repeated")
            require(sorted(ids) == ids, f"target.layer_ids={ids}: must increase")


@dataclass
class DrafterConfig:
    """The shape of the draft model; everything else comes from the target's config."""

    layers: int = MISSING
    block_size: int = MISSING
    tapped_layers: int = MISSING
    sliding_layers: int = MISSING
    sliding_window: int = MISSING
    mask_token_id: int | None = MISSING
    anchors_per_batch: int = MISSING
    attention: str = MISSING
    precision: str = MISSING
    # Whoever builds a drafter in code seldom cares.
    attention_heads: int | None = None
    key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    compile: str | None = None
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        require(self.layers >= 1, f"drafter.layers={self.layers}: must be at least 1")
        require(
            self.block_size >= 2,
            f"drafter.block_size={self.block_size}: must be at least 2 "
            "(the anchor and one drafted token)",
        )
        require(self.tapped_layers >= 1, "drafter.tapped_layers must be at least 1")
        require(
            0 <= self.sliding_layers <= self.layers,
            f"drafter.sliding_layers={self.sliding_layers}: must be between 0 and "
            f"drafter.layers={self.layers}",
        )
        require(
            self.sliding_layers == 0 or self.sliding_window > self.block_size,
            f"drafter.sliding_window={self.sliding_window}: must be greater than "
            f"drafter.block_size={self.block_size}",
        )
        require(self.anchors_per_batch >= 1, "drafter.anchors_per_batch must be at least 1")
        for key in ("attention_heads", "key_value_heads", "head_dim", "intermediate_size"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"drafter.{key}={value}: must be at least 1")
        one_of("drafter.attention", self.attention, ("auto", "sdpa", "flex", "eager"))
        one_of("drafter.precision", self.precision, ("auto", "float32", "bfloat16"))
        if self.compile is not None:
            one_of("drafter.compile", self.compile, ("inductor", "aot_eager"))


@dataclass
class DataConfig:
    """Conversations, and how they become packed micro-batches."""

    train: Any = MISSING
    heldout: Any = MISSING
    max_length: int = MISSING
    tokens_per_batch: int = MISSING
    over_length: str = MISSING
    min_supervised_tokens: int = MISSING
    last_turn_only: bool = MISSING
    train_thinking: bool = MISSING
    control_tokens: str = MISSING
    max_bad_fraction: float = MISSING
    chat_template: str | None = MISSING
    template_kwargs: Any = MISSING
    columns: Any = MISSING
    roles: Any = MISSING
    near_copy_threshold: float | None = MISSING
    cache_dir: str | None = MISSING

    def __post_init__(self) -> None:
        require(self.max_length >= 2, f"data.max_length={self.max_length}: must be at least 2")
        require(
            self.tokens_per_batch >= self.max_length,
            f"data.tokens_per_batch={self.tokens_per_batch} cannot hold a conversation of "
            f"data.max_length={self.max_length} tokens: raise the first or lower the second",
        )
        one_of("data.over_length", self.over_length, ("truncate", "drop", "split"))
        require(
            2 <= self.min_supervised_tokens <= self.max_length,
            f"data.min_supervised_tokens={self.min_supervised_tokens}: must be between 2 (an "
            f"anchor and one label) and data.max_length={self.max_length}",
        )
        one_of("data.control_tokens", self.control_tokens, ("drop", "escape"))
        require(
            0.0 <= self.max_bad_fraction <= 1.0,
            f"data.max_bad_fraction={self.max_bad_fraction}: must be between 0 and 1",
        )
        for key in ("template_kwargs", "columns", "roles"):
            # Not typed as dicts: OmegaConf would refuse new keys from the command line.
            value = getattr(self, key)
            require(value is None or isinstance(value, dict), f"data.{key}={value}: not a mapping")
        for ours, theirs in (self.columns or {}).items():
            one_of("data.columns", ours, COLUMN_NAMES)
            require(isinstance(theirs, str), f"data.columns.{ours}={theirs}: must be a name")
        for name, role in (self.roles or {}).items():
            one_of(f"data.roles.{name}", role, ROLES)
        require(
            self.near_copy_threshold is None or 0.0 < self.near_copy_threshold <= 1.0,
            f"data.near_copy_threshold={self.near_copy_threshold}: must be in (0, 1]; "
            "1 removes exact copies only",
        )


@dataclass
class TopologyConfig:
    """How many ranks of a node are targets and how many are drafters."""

    targets: int | None = MISSING
    drafters: int | None = MISSING
    elastic: bool = MISSING

    def __post_init__(self) -> None:
        for key in ("targets", "drafters"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"topology.{key}={value}: must be at least 1")


@dataclass
class WireConfig:
    """The stream between the roles."""

    edge: str = MISSING
    slots: int = MISSING
    dtype: str = MISSING
    timeout_s: float = MISSING

    def __post_init__(self) -> None:
        one_of("wire.edge", self.edge, ("auto", "gloo", "nccl", "shm"))
        require(self.slots >= 1, f"wire.slots={self.slots}: must be at least 1")
        one_of("wire.dtype", self.dtype, ("bfloat16", "float32", "fp8", "int8"))
        require(self.timeout_s > 0, f"wire.timeout_s={self.timeout_s}: must be positive")


@dataclass
class FeaturesConfig:
    """Captured frames that are kept for later epochs."""

    cache: str = MISSING
    cache_gb: float = MISSING

    def __post_init__(self) -> None:
        one_of("features.cache", self.cache, ("off", "ram", "disk"))
        require(self.cache_gb > 0, f"features.cache_gb={self.cache_gb}: must be positive")


@dataclass
class EvaluateConfig:
    """Held-out measurements during and after training."""

    interval: int = MISSING
    max_rows: int = MISSING
    decode_interval: int = MISSING
    decode_prompts: int = MISSING
    max_new_tokens: int = MISSING

    def __post_init__(self) -> None:
        for key in ("interval", "max_rows", "decode_interval", "decode_prompts"):
            value = getattr(self, key)
            require(value >= 0, f"evaluate.{key}={value}: must not be negative")
        require(
            self.max_new_tokens >= 2,
            f"evaluate.max_new_tokens={self.max_new_tokens}: must be at least 2 (the first token "
            "comes from the prompt)",
        )


@dataclass
class RaceConfig:
    """For ``isolation=threads`` only."""

    treatment: str = MISSING
    i_know: bool = MISSING


@dataclass
class TrainConfig:
    """The root of ``conf/train.yaml``."""

    target: TargetConfig = MISSING
    drafter: DrafterConfig = MISSING
    data: DataConfig = MISSING
    topology: TopologyConfig = MISSING
    wire: WireConfig = MISSING
    features: FeaturesConfig = MISSING
    loss: LossConfig = MISSING
    optim: OptimConfig = MISSING
    schedule: ScheduleConfig = MISSING
    evaluate: EvaluateConfig = MISSING
    checkpoint: CheckpointConfig = MISSING
    failure: FailureConfig = MISSING
    profile: ProfileConfig = MISSING
    race: RaceConfig = MISSING
    # No section of its own: "from" cannot be the name of a field.
    init: dict[str, str | None] = MISSING
    isolation: str = MISSING
    run_name: str = MISSING
    output_dir: str | None = MISSING
    overwrite: bool = MISSING
    resume: str | None = MISSING
    seed: int = MISSING
    steps: int | None = MISSING
    epochs: int = MISSING
    micro_batches_per_step: int = MISSING
    log_interval: int = MISSING
    trackers: list[str] = MISSING
    threads: int | None = MISSING

    def __post_init__(self) -> None:
        require(self.steps is None or self.steps >= 1, f"steps={self.steps}: must be at least 1")
        require(self.epochs >= 1, f"epochs={self.epochs}: must be at least 1")
        require(self.micro_batches_per_step >= 1, "micro_batches_per_step must be at least 1")
        require(self.log_interval >= 1, "log_interval must be at least 1")
        require(self.seed >= 0, f"seed={self.seed}: must not be negative")
        require(
            self.threads is None or self.threads >= 1, f"threads={self.threads}: must be at least 1"
        )
        one_of("isolation", self.isolation, ("processes", "threads"))
        require(
            self.isolation == "threads" or self.race.treatment == "none",
            f"race.treatment={self.race.treatment} treats threads; with isolation=processes "
            "nothing in torch is touched",
        )
        require(
            self.isolation == "processes" or self.wire.edge == "auto",
            f"wire.edge={self.wire.edge} joins processes; with isolation=threads use auto",
        )
        require(
            self.isolation == "processes" or self.profile.kind == "none",
            f"profile={self.profile.kind} is of one rank in a process of its own: leave "
            "isolation=processes",
        )
        for key in self.init:
            one_of("init", key, ("from", "revision"))
        ids = self.target.layer_ids
        require(
            ids is None or len(ids) == self.drafter.tapped_layers,
            f"target.layer_ids={ids} names {len(ids or [])} layers, but "
            f"drafter.tapped_layers={self.drafter.tapped_layers}: make them agree",
        )
        require(
            self.wire.timeout_s > self.failure.save_s,
            f"wire.timeout_s={self.wire.timeout_s}: must be greater than "
            f"failure.save_s={self.failure.save_s}: for so long one role may evaluate or decode "
            "while the other waits",
        )


ConfigT = TypeVar("ConfigT")


def to_config(raw: DictConfig, kind: type[ConfigT]) -> ConfigT:
    """Resolve, type and validate ``raw`` as ``kind``; plain dataclasses from here on.

    Raises ``UserError`` for whatever is wrong with it.
    """
    # ``+new.key=1`` passes Hydra's own check; nothing would read it.
    # Keys below a known one belong to a free mapping, such as ``data.roles``.
    known = set(config_keys(kind))
    extra = sorted(
        key
        for key in flat(OmegaConf.to_container(raw))
        if not any(".".join(key.split(".")[: n + 1]) in known for n in range(key.count(".") + 1))
    )
    require(not extra, f"unknown configuration key {', '.join(extra)}")
    try:
        config = OmegaConf.to_object(raw)
    except OmegaConfBaseException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise UserError(explain(str(error), kind)) from None
    assert isinstance(config, kind)
    return config


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        found |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def config_keys(kind: type[Any], prefix: str = "") -> list[str]:
    """All dotted keys of a configuration dataclass."""
    keys = []
    hints = get_type_hints(kind)
    for item in fields(kind):
        key = prefix + item.name
        nested: Any = hints[item.name]
        is_section = isinstance(nested, type) and is_dataclass(nested)
        keys += config_keys(nested, key + ".") if is_section else [key]
    return keys


def explain(message: str, kind: type[Any]) -> str:
    """One line for an error of Hydra or OmegaConf; an unknown key gets the nearest known one.

    Those libraries write "Key 'lrr' not in 'OptimConfig'" and the dotted key on a later line
    ("full_key: optim.lrr"), or "Could not override 'optim.lrr'" when the command line names it;
    "Could not find 'target/x'" is followed by a line "Available options" and one line each.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    full_key = next((line[9:].strip() for line in lines if line.startswith("full_key:")), "")
    if not full_key and "Could not override '" in message:
        full_key = message.split("Could not override '")[1].split("'")[0]
    if full_key and ("not in" in message or "No match in the defaults list" in message):
        keys = config_keys(kind)
        known = sorted({*keys, *(key.split(".")[0] for key in keys)})
        near = difflib.get_close_matches(full_key, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"unknown configuration key {full_key}{hint}"
    if "Available options" in message:
        start = next(i for i, line in enumerate(lines) if line.startswith("Available options"))
        options = [line for line in lines[start + 1 :] if not line.startswith("Config search")]
        names = ", ".join(option for option in options if " " not in option)
        return f"{lines[0]}; there are: {names}"
    dull = ("Could not override", "Error merging override", "full_key:", "object_type=")
    text = next((line for line in lines if not line.startswith(dull)), message)
    return f"{full_key}: {text}" if full_key and full_key not in text else text


def config_dir() -> str:
    """``conf/``: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent
    return str(next(p for p in (package / "conf", package.parent / "conf") if p.is_dir()))


def cache_dir() -> Path:
    """``$DFLASH_MP_CACHE``, else ``~/.cache/dflash_mp``."""
    chosen = os.environ.get("DFLASH_MP_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "dflash_mp"


ConfigStore.instance().store(name="train_schema", node=TrainConfig)
