"""What a run tells: progress line, trackers, metrics.jsonl, plots, the run folder's facts."""

import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

import dflash_mp
from dflash_mp.config import require
from dflash_mp.learning_config import CROSS_ENTROPY
from dflash_mp.progress import progress_bar
from dflash_mp.tracker_runs import open_trackers

METRICS = "metrics.jsonl"


def check_trackers(names: list[str]) -> None:
    """Refuse trackers that Accelerate does not know or whose package is missing.

    Raises:
        UserError: names the tracker and those that would work here.
    """
    available = [str(tracker) for tracker in get_available_trackers()]
    for name in names:
        require(
            name in available,
            f"trackers: {name} is unknown or not installed; here there are {', '.join(available)}",
        )


class Tracker:
    """Writes on the main drafter rank; does nothing on the other ranks.

    Args:
        accelerator: set up with the trackers of the run.
        folder: the run folder.
        steps: optimizer steps of the run.
        first_step: steps done before; rows of later steps, left by the process that did them
            and was killed, are dropped.
        config: what the trackers store as the run's settings (flat values).
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        steps: int,
        first_step: int,
        config: dict[str, Any],
    ) -> None:
        self.main = accelerator.is_main_process
        self.accelerator = accelerator
        if not self.main:
            return
        open_trackers(accelerator, folder, first_step, config)
        self.path = folder / METRICS
        before = keep_metrics(self.path, first_step, first_step == steps) if first_step else 0.0
        self.start = time.perf_counter() - before
        self.bar = progress_bar(total=steps, initial=first_step, unit="step", desc="train")

    def show(self, step: int, shown: dict[str, str]) -> None:
        """Move the progress line to ``step``."""
        if self.main:
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update(step - self.bar.n)

    def write(self, line: str) -> None:
        """A line above the progress line."""
        if self.main:
            self.bar.write(line, file=sys.stderr)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Send ``values`` to the trackers and append them to metrics.jsonl."""
        self.accelerator.log(values, step=step)
        if self.main:
            seconds = round(time.perf_counter() - self.start, 3)
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, "seconds": seconds, **values}) + "\n")

    def close(self) -> None:
        """Finish the line and the trackers."""
        if self.main:
            self.bar.close()
        self.accelerator.end_training()


def keep_metrics(path: Path, step: int, finished: bool) -> float:
    """Keep the rows of metrics.jsonl up to ``step``; returns the seconds they took.

    Rows of the end of the run, which will be written again, go: all ``final/`` rows and, when
    ``step`` was the last one (``finished``), its decoding.
    """
    kept = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            # A line that the killed process did not finish; the step is done again.
            continue
        ended = any(key.startswith("final/") for key in row)
        decoded = finished and row["step"] == step and "eval/decoded_acceptance_length" in row
        if row["step"] <= step and not ended and not decoded:
            kept.append(row)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
    partial.replace(path)
    return float(kept[-1]["seconds"]) if kept else 0.0


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def run_facts() -> dict[str, Any]:
    """Versions, commit and command of this run: what somebody needs to repeat it."""
    packages = ("torch", "transformers", "accelerate", "datasets", "safetensors", "hydra-core")
    return {
        "command": command_line(),
        "commit": git_commit(),
        "dflash_mp": dflash_mp.__version__,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "host": platform.node(),
        "cores": os.cpu_count(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def command_line() -> list[str]:
    """The command that starts this job again on this node, as typed for the launcher it ran under.

    Needs the launcher's environment: the ranks of a node, and which launcher it was.
    """
    if "RANK" not in os.environ:
        return ["python", "-m", "dflash_mp.train", *sys.argv[1:]]
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if os.environ.get("TORCHELASTIC_RUN_ID") == "spawn":
        return ["python", "-m", "launch.spawn", "--nproc", ranks, *sys.argv[1:]]
    return ["torchrun", "--nproc_per_node", ranks, "-m", "dflash_mp.train", *sys.argv[1:]]


def git_commit() -> str | None:
    """Commit of the checkout this package runs from; None outside of one. ``+`` marks changes."""
    source = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(source), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != source.parent:
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def plot(folder: Path, objective: str) -> list[Path]:
    """Draw loss.png and acceptance.png from metrics.jsonl; returns the files written.

    ``objective`` is what the training loss is, one of ``OBJECTIVES``.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_metrics(folder)
    charts = {
        "loss.png": loss_panels(objective),
        "acceptance.png": {
            "tokens per target forward": {
                "eval/acceptance_length": "simulated (walk)",
                "eval/decoded_acceptance_length": "decoded",
                "eval/uniform_anchor_length": "uniform anchors (not an acceptance length)",
            }
        },
    }
    written = []
    for name, panels in charts.items():
        size = (7, 1 + 3 * len(panels))
        figure, grid = pyplot.subplots(
            len(panels), figsize=size, sharex=True, squeeze=False, constrained_layout=True
        )
        for axes, (unit, series) in zip(grid[:, 0], panels.items(), strict=True):
            for key, label in series.items():
                points = [(row["step"], row[key]) for row in rows if key in row]
                if points:
                    steps, values = zip(*points, strict=True)
                    axes.plot(steps, values, label=label, marker="o" if len(points) < 40 else None)
            axes.set_ylabel(unit)
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend()
        grid[-1, 0].set_xlabel("optimizer step")
        figure.savefig(folder / name, dpi=120)
        pyplot.close(figure)
        written.append(folder / name)
    return written


def loss_panels(objective: str) -> dict[str, dict[str, str]]:
    """What loss.png shows: the lines by what they measure, so that no axis mixes two measures."""
    panels: dict[str, dict[str, str]] = {objective: {"train/loss": "training"}}
    panels.setdefault(CROSS_ENTROPY, {})["eval/loss"] = "held out"
    return panels
