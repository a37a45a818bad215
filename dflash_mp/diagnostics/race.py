"""Show the torch.compile race of threads on the installed torch.

    python -m dflash_mp.diagnostics.race
    python -m dflash_mp.diagnostics.race scenario=call-in-compile treatment=lock

matrix=quick           quick takes about a minute, full about an hour
scenario=...           only this one; an unknown name is answered with the list
treatment=...          what is done about the race; likewise
device=cpu             cuda adds attention with backwards
output=outputs/race.json

The matrix exits with 0 (as expected, or better), 20 (worse), 3 (inconclusive) or 4 (no results to
compare with); named cells with 0 (ok), 10 (loud), 11 (silent), 12 (both) or 3 (inconclusive). 2 is
a mistake in the arguments.
"""

import os
import platform
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from dflash_mp.command import run_command
from dflash_mp.config import one_of, require
from dflash_mp.diagnostics import text
from dflash_mp.diagnostics.probe import Cell, run_cell, start_context
from dflash_mp.diagnostics.verdict import (
    INCONCLUSIVE,
    LOUD,
    OK,
    SILENT,
    Tally,
    compare_all,
    overall,
    read_results,
    reference_for,
    tally,
    write_results,
)

CELL_EXIT = {OK: 0, LOUD: 10, SILENT: 11, INCONCLUSIVE: 3}
MATRIX_EXIT = {"as expected": 0, "better": 0, "worse": 20, INCONCLUSIVE: 3, "unknown version": 4}


@dataclass
class RaceConfig:
    """What to run; see conf/race.yaml."""

    scenario: str | None = MISSING
    treatment: str | None = MISSING
    matrix: str = MISSING
    repeats: int = MISSING
    random_repeats: int = MISSING
    threads: int = MISSING
    seconds: float = MISSING
    timeout_s: float = MISSING
    switch_interval: float = MISSING
    device: str = MISSING
    jobs: int = MISSING
    output: str = MISSING

    def __post_init__(self) -> None:
        one_of("matrix", self.matrix, ("quick", "full"))
        one_of("device", self.device, ("cpu", "cuda"))
        for key in ("repeats", "random_repeats", "threads", "jobs"):
            require(getattr(self, key) >= 1, f"{key}={getattr(self, key)}: must be at least 1")
        for key in ("seconds", "timeout_s", "switch_interval"):
            require(getattr(self, key) > 0, f"{key}={getattr(self, key)}: must be positive")

    def is_matrix(self) -> bool:
        """Tell whether no cells were asked for by name."""
        return self.scenario is None and self.treatment is None


ConfigStore.instance().store(name="race_schema", node=RaceConfig)


def plan(config: RaceConfig) -> list[tuple[Cell, int]]:
    """List the cells to run and how often, those that take longest first."""
    from dflash_mp.diagnostics.catalogue import SCENARIOS, TREATMENTS, full_matrix, quick_matrix

    if config.scenario is not None:
        one_of("scenario", config.scenario, tuple(SCENARIOS))
    if config.treatment is not None:
        one_of("treatment", config.treatment, tuple(TREATMENTS))
    if config.is_matrix():
        names = quick_matrix() if config.matrix == "quick" else full_matrix()
    else:
        scenarios = [config.scenario] if config.scenario else list(SCENARIOS)
        names = [(scenario, config.treatment or "none") for scenario in scenarios]
    settings = Cell(
        scenario="",
        treatment="",
        threads=config.threads,
        seconds=config.seconds,
        timeout=config.timeout_s,
        switch_interval=config.switch_interval,
        device=config.device,
    )
    planned = []
    for scenario, treatment in names:
        often = config.random_repeats if SCENARIOS[scenario].random else config.repeats
        many = config.is_matrix() and config.matrix == "full" and treatment in ("none", "processes")
        if SCENARIOS[scenario].random and many:
            often *= 4
        planned.append((replace(settings, scenario=scenario, treatment=treatment), often))
    return planned


def run_all(planned: list[tuple[Cell, int]], jobs: int, context: Any) -> Iterator[Tally]:
    """Run the cells, ``jobs`` probes at a time, and yield their tallies in the given order."""
    from dflash_mp.diagnostics.catalogue import SCENARIOS

    with ThreadPoolExecutor(jobs) as pool:
        futures = [
            [pool.submit(run_cell, cell, context) for _ in range(often)] for cell, often in planned
        ]
        for (cell, _), runs in zip(planned, futures, strict=True):
            yield tally([run.result() for run in runs], SCENARIOS[cell.scenario].random)


def about_run(config: RaceConfig) -> dict[str, Any]:
    """Describe the machine and the settings, for the results file."""
    import torch

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "config": {key: value for key, value in asdict(config).items() if key != "output"},
    }


def race(config: RaceConfig) -> int:
    """Run what ``config`` asks for, print the report, and return the exit code."""
    begin = time.monotonic()
    context = start_context()
    from dflash_mp.diagnostics import mechanism
    from dflash_mp.diagnostics.catalogue import SCENARIOS, TREATMENTS

    planned = plan(config)
    about = about_run(config)
    show(text.heading(about))
    show(text.mechanism(mechanism.explanation()))
    tallies: list[Tally] = []
    for done in run_all(planned, config.jobs, context):
        if config.is_matrix() and done.treatment != "none":
            # One traceback per scenario says enough.
            done.example = None
        tallies.append(done)
        progress(f"{len(tallies)}/{len(planned)} cells")
    progress("")
    write_results(Path(config.output), about, tallies)
    summaries = {name: scenario.about for name, scenario in SCENARIOS.items()}
    show(text.matrix(tallies))
    show(text.outcomes(tallies, summaries))
    if not config.is_matrix():
        for cell in tallies:
            show(text.details(cell, TREATMENTS[cell.treatment].about))
        show(f"Results: {config.output}\n")
        return cell_exit(tallies)
    path = reference_for(about["torch"])
    compared = compare_all(tallies, read_results(path)[1]) if path else None
    word = overall(compared)
    show(text.verdict(word, compared, tallies, mechanism.features(), about["torch"]))
    show(f"Results: {config.output} ({time.monotonic() - begin:.0f} s)\n")
    return MATRIX_EXIT[word]


def cell_exit(tallies: list[Tally]) -> int:
    """Condense the outcomes of the cells that were asked for to an exit code."""
    seen = {outcome for t in tallies for outcome, count in t.outcomes.items() if count}
    if {LOUD, SILENT} <= seen:
        return 12
    return next(CELL_EXIT[o] for o in (LOUD, SILENT, INCONCLUSIVE, OK) if o in seen)


def show(report: str) -> None:
    """Print a part of the report."""
    sys.stdout.write(report)
    sys.stdout.flush()


def progress(message: str) -> None:
    """Show how far it is, where somebody looks."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{message}")
        sys.stderr.flush()


def _leave(config: RaceConfig, _: Path) -> None:
    sys.exit(race(config))


if __name__ == "__main__":
    run_command("race", RaceConfig, _leave)
