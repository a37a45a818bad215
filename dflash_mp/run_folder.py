"""The run folder: whose it is, and what of it stays when a run is continued."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dflash_mp.checkpoint import Start, checkpoints, step_of
from dflash_mp.config import TrainConfig, require
from dflash_mp.resume import AUTO, CHECKPOINTS, choose_checkpoint, start_of
from dflash_mp.tracking import run_facts

RUN_FACTS = "run.json"
PROFILE = "profile"
KEPT_BY_OVERWRITE = (".hydra", "rank*.log")


def claim_folder(folder: Path, config: TrainConfig, restarted: bool) -> Start:
    """Make ``folder`` this run's own, write down what is being run, and say where it begins.

    Args:
        folder: the run folder.
        config: of this run.
        restarted: the launcher has claimed this folder before and starts the run once more.

    Raises:
        UserError: the folder holds another run, or there is nothing to continue as asked.
    """
    start = start_of(choose_checkpoint(config, folder, restarted), config)
    inside = start.checkpoint is not None and start.checkpoint.resolve().is_relative_to(
        folder.resolve()
    )
    facts = run_facts()
    if inside:
        drop_newer(folder, start, config.overwrite)
        facts = read_facts(folder) | {"continued": [*continuations(folder), facts | step(start)]}
    elif (folder / RUN_FACTS).exists():
        lost = config.resume == AUTO or restarted
        require(
            config.overwrite or (lost and not checkpoints(folder / CHECKPOINTS)),
            f"{folder} already holds a run: choose another run_name or output_dir, say resume=auto "
            "to continue it, or overwrite=true to delete it",
        )
        empty(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_FACTS).write_text(json.dumps(facts, indent=2) + "\n")
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))
    return start


def drop_newer(folder: Path, start: Start, allowed: bool) -> None:
    """Delete the checkpoints behind ``start``: they belong to another continuation."""
    newer = [path for path in checkpoints(folder / CHECKPOINTS) if step_of(path) > start.step]
    require(
        not newer or allowed,
        f"resume={start.checkpoint}: {folder} goes on to {newer[-1].name if newer else ''}; choose "
        "another output_dir, or say overwrite=true to delete what is behind that step",
    )
    for path in newer:
        shutil.rmtree(path)


def empty(folder: Path) -> None:
    """Delete what another run has left, but not what Hydra has written for this one."""
    keep = {path for pattern in KEPT_BY_OVERWRITE for path in folder.glob(pattern)}
    for path in set(folder.iterdir()) - keep:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def read_facts(folder: Path) -> dict[str, Any]:
    """run.json; empty when there is none."""
    path = folder / RUN_FACTS
    return dict(json.loads(path.read_text())) if path.exists() else {}


def continuations(folder: Path) -> list[dict[str, Any]]:
    """What run.json says about earlier continuations."""
    return list(read_facts(folder).get("continued", []))


def step(start: Start) -> dict[str, int]:
    """The fact where a continuation began."""
    return {"from_step": start.step}
