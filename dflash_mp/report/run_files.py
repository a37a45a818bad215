"""What a run folder holds for a report; whatever is not there yet is empty.

A run that was killed may leave a last line that is not finished.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from dflash_mp.config import config_dir, flat, require

REPORT = "report.html"
WALK = "heldout.json"
Row = dict[str, Any]


@dataclass(frozen=True)
class RunFiles:
    """What is known of one run.

    ``decoded`` has the rows of the newest decoding with a trained drafter, which was at
    ``decoded_step``; ``settings`` are dotted keys.
    """

    folder: Path
    facts: Row
    settings: Row
    data: Row
    metrics: list[Row]
    walk: Row
    decoded_step: int
    decoded: list[Row]
    results: Row

    def points(self, key: str) -> list[tuple[float, float]]:
        """``(step, value)`` of a metric, where it has a value."""
        return [(row["step"], row[key]) for row in self.metrics if row.get(key) is not None]

    def last(self, key: str) -> float | None:
        """The newest value of a metric."""
        points = self.points(key)
        return points[-1][1] if points else None

    @property
    def last_step(self) -> int:
        """The newest step that anything is known of."""
        return max((int(row["step"]) for row in self.metrics), default=0)

    @property
    def name(self) -> str:
        """The folder's."""
        return self.folder.resolve().name


def read_run(folder: Path) -> RunFiles:
    """Everything a report shows of the run in ``folder``.

    Raises:
        UserError: there is no run in it.
    """
    known = (folder / "run.json", folder / "config.yaml", folder / "metrics.jsonl")
    require(
        any(path.exists() for path in known),
        f"{folder} is no run folder: it holds none of {', '.join(path.name for path in known)}",
    )
    config = folder / "config.yaml"
    step, rows = _newest_decoding(folder / "decode")
    return RunFiles(
        folder=folder,
        facts=_object(folder / "run.json"),
        settings=flat(OmegaConf.to_container(OmegaConf.load(config))) if config.exists() else {},
        data=_object(folder / "data.json"),
        metrics=_lines(folder / "metrics.jsonl"),
        walk=_object(folder / WALK),
        decoded_step=step,
        decoded=rows,
        results=_object(folder / "results.json"),
    )


def _newest_decoding(folder: Path) -> tuple[int, list[Row]]:
    for path in sorted(folder.glob("step-*.jsonl"), reverse=True):
        step = int(path.stem.removeprefix("step-"))
        if step and (rows := _lines(path)):
            return step, rows
    return 0, []


def _object(path: Path) -> Row:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def _lines(path: Path) -> list[Row]:
    return list(_whole_lines(path)) if path.exists() else []


def _whole_lines(path: Path) -> Iterator[Row]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


@functools.cache
def default_settings() -> dict[str, Any]:
    """The dotted keys of ``conf/train.yaml`` as they are without any override."""
    # Inside of a training Hydra has been set up with the same folder.
    running = GlobalHydra.instance().is_initialized()
    with nullcontext() if running else initialize_config_dir(config_dir(), version_base="1.3"):
        return flat(OmegaConf.to_container(compose("train"), resolve=True))


def changes(settings: Mapping[str, Any]) -> list[str]:
    """What of ``settings``, by dotted keys, is not as in ``conf/train.yaml``, and what is there."""
    default = default_settings()
    return [
        f"{key}={as_yaml(value)} (default {as_yaml(default.get(key))})"
        for key, value in settings.items()
        if value != default.get(key)
    ]


def as_yaml(value: Any) -> str:
    """``value`` as it is written in a configuration, near enough."""
    return value if isinstance(value, str) else json.dumps(value)
