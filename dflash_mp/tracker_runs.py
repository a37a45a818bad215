"""Accelerate's trackers, started so that a continued run is the same run to each of them."""

import json
import secrets
from pathlib import Path
from typing import Any

from accelerate import Accelerator

TRACKER_RUNS = "trackers.json"
"""In the run folder: ``id``, made by us, and ``mlflow``, the id that MLflow has made."""

PROJECT = "dflash_mp"


def open_trackers(
    accelerator: Accelerator, folder: Path, first_step: int, config: dict[str, Any]
) -> None:
    """Start the trackers, or go on with the runs that this folder's earlier processes had there.

    Args:
        accelerator: set up with the trackers of the run; of the main drafter.
        folder: the run folder.
        first_step: steps done before.
        config: what the trackers store as the run's settings (flat values).
    """
    path = folder / TRACKER_RUNS
    ids = json.loads(path.read_text()) if path.exists() else {"id": secrets.token_hex(4)}
    # MLflow refuses a setting that was stored before with another value, such as resume.
    settings = None if "mlflow" in ids else config
    accelerator.init_trackers(PROJECT, settings, tracker_settings(folder, ids, first_step))
    names = {tracker.name for tracker in accelerator.trackers}
    if "mlflow" in names:
        ids["mlflow"] = accelerator.get_tracker("mlflow", unwrap=True).info.run_id
    if names - {"tensorboard"}:
        path.write_text(json.dumps(ids) + "\n")


def tracker_settings(folder: Path, ids: dict[str, str], first_step: int) -> dict[str, Any]:
    """What goes to ``SummaryWriter``, ``wandb.init``, ``trackio.init`` and ``mlflow.start_run``."""
    name = folder.resolve().name
    return {
        # Hides what the killed process had written behind this step.
        "tensorboard": {"purge_step": first_step + 1} if first_step else {},
        "wandb": {
            "name": name,
            "id": ids["id"],
            "resume": "allow",
            "dir": str(folder.resolve()),
        },
        # It knows runs by their names only; folders of one name must not be one run.
        "trackio": {"name": f"{name}-{ids['id']}", "resume": "allow"},
        "mlflow": {"run_name": name, "run_id": ids.get("mlflow")},
    }
