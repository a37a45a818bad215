"""From what the probes saw to words: outcomes, counts with their bounds, and a comparison.

Nothing here imports torch.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

from dflash_mp.diagnostics.probe import Probe

OK, LOUD, SILENT, INCONCLUSIVE = "ok", "loud", "silent", "inconclusive"

# A short label for each thing that can be wrong without an exception.
_FINDINGS = {
    "ran uncompiled": "uncompiled",
    "wrong by": "wrong numbers",
    "drawn again": "draws repeated",
    "do not compile": "compiled as eager",
    "was counted": "half a step",
    "flag is stuck": "flag stuck",
    "hooks stay": "hooks left",
    "metadata stays": "metadata left",
    "is_compiling() is stuck": "is_compiling stuck",
}
FX_LABEL = "FX error"


@dataclass(frozen=True)
class Judgement:
    """The outcome of one run of a cell and short labels of what was wrong."""

    outcome: str
    labels: tuple[str, ...]
    why: tuple[str, ...] = ()


def judge(probe: Probe) -> Judgement:
    """Classify one run.

    ``loud``: an exception where there should be none. ``silent``: none, but code ran uncompiled,
    numbers are wrong or process-wide state was left behind. ``inconclusive``: a process died or
    did not finish, or the moment that the scenario is about never came. Otherwise ``ok``.
    """
    actors = [actor for report in probe.reports for actor in report["actors"]]
    failures = [actor["failure"] for actor in actors if actor["failure"]]
    late = [f"{actor['name']}: {actor['late']}" for actor in actors if actor["late"]]
    quiet = [text for actor in actors for text in actor["findings"]]
    quiet += [text for report in probe.reports for text in report["left_behind"]]
    labels = _unique([*map(_failure_label, failures), *map(_finding_label, quiet)])
    refused = [f["message"] for f in failures if f["kind"] == "TreatmentRefused"]
    if refused:
        return Judgement(INCONCLUSIVE, (), tuple(refused))
    if failures:
        return Judgement(LOUD, labels, tuple(f"{f['kind']}: {f['message']}" for f in failures))
    if probe.lost or late:
        return Judgement(INCONCLUSIVE, (), (*probe.lost, *late))
    if quiet:
        return Judgement(SILENT, labels, tuple(quiet))
    # Only a treatment that keeps the actors apart may prevent the moment.
    apart = any(r["serialised"] for r in probe.reports) or probe.cell.treatment in (
        "warm",
        "warm-partial",
        "processes",
    )
    if not apart and not any(report["reached"] for report in probe.reports):
        return Judgement(INCONCLUSIVE, (), ("the moment that the scenario is about never came",))
    return Judgement(OK, ())


def _failure_label(failure: dict[str, Any]) -> str:
    if failure["message"].startswith("Detected that you are using FX"):
        return FX_LABEL
    if "found no compiled frames" in failure["message"]:
        return "no compiled frames"
    return str(failure["kind"])


def _finding_label(finding: str) -> str:
    return next((label for text, label in _FINDINGS.items() if text in finding), finding)


def _unique(labels: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(labels))


@dataclass
class Tally:
    """All runs of one cell."""

    scenario: str
    treatment: str
    random: bool
    outcomes: dict[str, int] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    # Seconds of a run, its process's start included.
    median_wall: float = 0.0
    # Calls of compiled code in all threads of a run.
    median_calls: float = 0.0
    # One of the exceptions, with both stacks.
    example: dict[str, Any] | None = None
    why: list[str] = field(default_factory=list)

    @property
    def runs(self) -> int:
        """Runs that say something."""
        return sum(n for outcome, n in self.outcomes.items() if outcome != INCONCLUSIVE)

    @property
    def bad(self) -> int:
        """Runs that were loud or silent."""
        return self.outcomes.get(LOUD, 0) + self.outcomes.get(SILENT, 0)

    @property
    def outcome(self) -> str:
        """The worst outcome seen."""
        for outcome in (SILENT, LOUD, OK):
            if self.outcomes.get(outcome):
                return outcome
        return INCONCLUSIVE

    def in_short(self) -> str:
        """Say "3/3", or for a random scenario that never failed "0/20 (<14 %)"."""
        if not self.runs:
            return "?"
        counts = f"{self.bad}/{self.runs}"
        if self.random and not self.bad:
            return f"{counts} (<{100 * upper_bound(0, self.runs):.0f} %)"
        return counts


def tally(probes: list[Probe], random: bool) -> Tally:
    """Count the outcomes of the runs of one cell."""
    judged = [judge(probe) for probe in probes]
    cell = probes[0].cell
    failures = [
        {"actor": actor["name"], **actor["failure"]}
        for probe in probes
        for report in probe.reports
        for actor in report["actors"]
        if actor["failure"]
    ]
    # The most telling example is one that shows the tracing thread too.
    failures.sort(key=lambda f: not f["tracing"])
    return Tally(
        cell.scenario,
        cell.treatment,
        random,
        dict(Counter(j.outcome for j in judged)),
        dict(Counter(label for j in judged for label in j.labels)),
        round(median(probe.wall for probe in probes), 1),
        median(_calls(probe) for probe in probes),
        failures[0] if failures else None,
        sorted({why for j in judged for why in j.why}),
    )


def _calls(probe: Probe) -> int:
    return sum(actor["calls"] for report in probe.reports for actor in report["actors"])


def upper_bound(bad: int, runs: int, confidence: float = 0.95) -> float:
    """Return the largest failure probability that ``bad`` of ``runs`` does not rule out.

    The exact one-sided binomial bound (Clopper and Pearson, 1934). For ``bad == 0`` it is close
    to 3 / runs, the rule of three.
    """
    if bad >= runs:
        return 1.0
    low, high = bad / runs, 1.0
    for _ in range(60):
        p = (low + high) / 2
        at_most = sum(comb(runs, k) * p**k * (1 - p) ** (runs - k) for k in range(bad + 1))
        low, high = (p, high) if at_most > 1 - confidence else (low, p)
    return high


def write_results(path: Path, about: dict[str, Any], tallies: list[Tally]) -> None:
    """Write what was run on which torch, and all tallies, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {**about, "cells": [asdict(t) for t in tallies]}
    path.write_text(json.dumps(data, indent=1) + "\n")


def read_results(path: Path) -> tuple[dict[str, Any], list[Tally]]:
    """Read what ``write_results`` wrote."""
    data = json.loads(path.read_text())
    cells = [Tally(**cell) for cell in data.pop("cells")]
    return data, cells


def reference_for(torch_version: str) -> Path | None:
    """Return the committed results of the same torch, up to its second number."""
    minor = ".".join(torch_version.split(".")[:2])
    path = Path(__file__).parent / "results" / f"torch-{minor}.json"
    return path if path.is_file() else None


_SEVERITY = {OK: 0, LOUD: 1, SILENT: 2}


def compare(now: Tally, before: Tally) -> str:
    """Return "as expected", "better", "worse" or "inconclusive" for one cell."""
    if OK not in now.outcomes and not now.bad:
        return INCONCLUSIVE
    if not now.random:
        difference = _SEVERITY[now.outcome] - _SEVERITY.get(before.outcome, 0)
        return "worse" if difference > 0 else "better" if difference < 0 else "as expected"
    if now.bad and not before.bad:
        return "worse"
    if before.bad and not now.bad:
        # Would so many clean runs be a surprise at the earlier rate?
        luck = (1 - before.bad / before.runs) ** now.runs
        return "better" if luck < 0.05 else "as expected"
    return "as expected"


def compare_all(now: list[Tally], before: list[Tally]) -> dict[str, list[str]]:
    """Sort the cells by how they compare; a cell without a counterpart is "new"."""
    known = {(t.scenario, t.treatment): t for t in before}
    sorted_: dict[str, list[str]] = {}
    for cell in now:
        counterpart = known.get((cell.scenario, cell.treatment))
        relation = compare(cell, counterpart) if counterpart else "new"
        sorted_.setdefault(relation, []).append(f"{cell.scenario} under {cell.treatment}")
    return sorted_


def overall(compared: dict[str, list[str]] | None) -> str:
    """Condense a comparison to one of the words a user looks for."""
    if compared is None:
        return "unknown version"
    return next((w for w in ("worse", INCONCLUSIVE, "better") if compared.get(w)), "as expected")
