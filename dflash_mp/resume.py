"""Which checkpoint a run continues from, and what must be the same for that.

Everything that decides the result must be; what a user may want to change on the way may not
refuse the start: learning rate, length, logging, evaluation, topology, where things lie.
"""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_mp.checkpoint import Start, checkpoints, read_state, step_of
from dflash_mp.config import TrainConfig, UserError, flat, require

log = logging.getLogger(__name__)

AUTO = "auto"
CHECKPOINTS = "checkpoints"
MAY_CHANGE = (
    *("run_name", "output_dir", "overwrite", "resume", "threads", "log_interval", "trackers"),
    *("steps", "epochs", "optim.lr", "schedule", "evaluate", "checkpoint", "failure"),
    *("features", "topology", "wire.edge", "wire.slots", "wire.timeout_s"),
    *("drafter.activation_checkpointing", "profile"),
    # What these name is compared by content.
    *("data.train", "data.heldout", "data.cache_dir", "data.chat_template"),
    *("target.name", "target.revision", "target.trust_remote_code", "drafter.mask_token_id"),
)
"""Keys, and sections, that may differ from those of the checkpoint."""


def choose_checkpoint(config: TrainConfig, folder: Path, restarted: bool) -> Path | None:
    """The checkpoint to continue from; None starts afresh.

    Args:
        config: says where to look (``resume``).
        folder: the run folder.
        restarted: the launcher has started this run before: its own checkpoints come first.

    Raises:
        UserError: ``resume`` names something without a complete checkpoint.
    """
    own = checkpoints(folder / CHECKPOINTS)
    if own and (restarted or config.resume == AUTO):
        return own[-1]
    if config.resume is None:
        return None
    if config.resume == AUTO:
        log.warning(
            "resume=auto: no complete checkpoint in %s yet, starting afresh; if there should be "
            "one, stop and look at run_name and output_dir",
            folder,
        )
        return None
    named = Path(config.resume).expanduser()
    inside = checkpoints(named / CHECKPOINTS) or checkpoints(named)
    chosen = named if named.name.startswith("step-") else inside[-1] if inside else None
    require(
        chosen is not None and chosen.is_dir(),
        f"resume={config.resume}: no complete checkpoint there; name a run folder or a folder "
        "step-<n> in its checkpoints",
    )
    return chosen


def start_of(path: Path | None, config: TrainConfig) -> Start:
    """Where the run begins, after comparing its configuration with the checkpoint's.

    Raises:
        UserError: the checkpoint is unreadable or of another configuration; says what differs.
    """
    if path is None:
        return Start()
    state = read_state(path)
    recorded = state.get("config")
    if not isinstance(recorded, dict) or not isinstance(state.get("batches"), int):
        raise UserError(f"{path} does not say how it was made: no checkpoint of this release")
    require(state["step"] == step_of(path), f"{path} holds the state of step {state['step']}")
    old, new = flat(recorded), flat(asdict(config))
    differ = [
        f"{key} {old[key]} -> {new[key]}"
        for key in sorted(old.keys() & new.keys())
        if old[key] != new[key] and not may_change(key)
    ]
    require(
        not differ,
        f"{path} was made with another configuration: {', '.join(differ)}; set these back, or "
        "start another run",
    )
    require(
        config.steps is None or config.steps >= state["step"],
        f"steps={config.steps}, but {path} has done {state['step']} already",
    )
    return Start(path, state["step"], state["batches"])


def may_change(key: str) -> bool:
    """Whether a run may continue with another value of ``key``."""
    return any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)


def refuse_other_data(path: Path, fingerprint: str, drafter: dict[str, Any]) -> None:
    """Refuse a checkpoint of another dataset or drafter shape.

    Args:
        path: the checkpoint.
        fingerprint: of this run's prepared data.
        drafter: this run's draft model as JSON values.

    Raises:
        UserError: says what differs.
    """
    state = read_state(path)
    require(
        state.get("data") == fingerprint,
        f"{path} was trained on other data ({state.get('data')}, this run has {fingerprint}): "
        "other files, data settings, chat template, tokenizer, or release of the data code",
    )
    recorded = state.get("drafter") or {}
    differ = sorted(
        key for key in recorded.keys() | drafter.keys() if recorded.get(key) != drafter.get(key)
    )
    if differ:
        listed = ", ".join(f"{key} {recorded.get(key)} -> {drafter.get(key)}" for key in differ)
        raise UserError(f"{path} holds another drafter: {listed}")


def refuse_other_target(path: Path, fingerprint: str) -> None:
    """Refuse a checkpoint of another target; ``fingerprint`` is of this run's target weights."""
    recorded = read_state(path).get("target")
    require(
        recorded == fingerprint,
        f"{path} was trained for another target: its weights have fingerprint {recorded}, those "
        f"of target.name {fingerprint}",
    )
