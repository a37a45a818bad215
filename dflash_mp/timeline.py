"""Draw what the ranks of a run with profile=steps did: ``python -m dflash_mp.timeline RUN_FOLDER``.

Each rank has two lines: what its main thread does, and below it what its wire moves. The time is
that of the main drafter's recorded steps; ranks on other nodes are as far off as their clocks.
"""

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mp.charts import COLOURS
from dflash_mp.command import fail
from dflash_mp.config import UserError, require
from dflash_mp.run_folder import PROFILE

ENDING = ".trace.json.gz"
STEP_MARK = "ProfilerStep#"

MAIN = {
    "forward": "target: forward",
    "compute": "drafter: micro-batches",
    "wait for the other drafters' gradients": "drafter: last backward, gradients, update",
}
"""Phases of the main threads that have a colour of their own, and what the picture calls them."""
WIRE = {"send": "sending", "receive": "receiving"}
WAITING, REST = "waiting for others", "everything else"
KINDS = (*MAIN.values(), *WIRE.values())


@dataclass(frozen=True)
class Lane:
    """One line of the picture: ``(begin, length)`` in milliseconds by kind."""

    name: str
    bars: dict[str, list[tuple[float, float]]]


def main() -> None:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash_mp.timeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python -m dflash_mp.timeline outputs/smollm2_narrow --output timeline.png",
    )
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--output", type=Path, help="default: profile/timeline.png in the folder")
    arguments = parser.parse_args()
    path = arguments.output or arguments.folder / PROFILE / "timeline.png"
    try:
        draw(read_lanes(arguments.folder / PROFILE), path)
    except UserError as error:
        fail(str(error))
    sys.stdout.write(f"{path}\n")


def read_lanes(folder: Path) -> list[Lane]:
    """The lines of all ranks whose traces lie in ``folder``, by rank.

    Raises:
        UserError: there are none, or none of a step.
    """
    files = sorted(folder.glob(f"*{ENDING}"), key=lambda path: int(path.name.split("-")[0][4:]))
    traces = {path.name.removesuffix(ENDING).split("-")[1]: read_spans(path) for path in files}
    require(
        "drafter0" in traces,
        f"{folder} has no trace of drafter0: train with profile=steps",
    )
    # The main thread's, to which the marks belong.
    steps = [span for span in traces["drafter0"] if span["name"].startswith(STEP_MARK)]
    require(
        bool(steps),
        f"{folder}: the trace of drafter0 holds no step: train with more profile.record",
    )
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    lanes: list[Lane] = []
    for name, spans in traces.items():
        # A target that has begun no frame in that time has no mark, and nothing to show.
        marks = (span["tid"] for span in spans if span["name"].startswith(STEP_MARK))
        thread = next(marks, None)
        mine = [span for span in spans if span["tid"] == thread]
        others = [span for span in spans if span["tid"] != thread]
        lanes += [
            Lane(name, bars(mine, main_kind, begin, end)),
            Lane("wire", bars(others, WIRE.get, begin, end)),
        ]
    return lanes


def read_spans(path: Path) -> list[dict[str, Any]]:
    """The named spans of a trace, by time; ``ts`` and ``dur`` in microseconds of the clock."""
    with gzip.open(path) as file:
        trace = json.load(file)
    base = trace["baseTimeNanoseconds"] / 1000
    spans = [
        span | {"ts": base + span["ts"]}
        for span in trace["traceEvents"]
        if span.get("cat") == "user_annotation" and span["ph"] == "X"
    ]
    return sorted(spans, key=lambda span: float(span["ts"]))


def main_kind(phase: str) -> str | None:
    """The kind of a span of a main thread; None for one inside a phase."""
    if phase in MAIN:
        return MAIN[phase]
    if phase.startswith("wait for "):
        return WAITING
    return REST if phase in ("step", "evaluate, log, save", "decode") else None


def bars(
    spans: Sequence[dict[str, Any]], kind_of: Any, begin: float, end: float
) -> dict[str, list[tuple[float, float]]]:
    """What of ``spans`` lies between ``begin`` and ``end``, by kind, in milliseconds from there."""
    found: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        kind = kind_of(span["name"])
        first, last = max(begin, span["ts"]), min(end, span["ts"] + span["dur"])
        if kind is not None and first < last:
            found.setdefault(kind, []).append(((first - begin) / 1000, (last - first) / 1000))
    return found


def draw(lanes: Sequence[Lane], path: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    colours = dict(zip(KINDS, COLOURS, strict=False)) | {WAITING: "#e3e6ea", REST: "#9aa4b0"}
    size = (10, 1.4 + 0.34 * len(lanes))
    figure, axes = pyplot.subplots(figsize=size, constrained_layout=True)
    for row, lane in enumerate(lanes):
        thick = 0.8 if lane.name != "wire" else 0.4
        for kind, spans in lane.bars.items():
            axes.broken_barh(spans, (row - thick / 2, thick), color=colours[kind], linewidth=0.5)
    axes.set_yticks(range(len(lanes)), [lane.name for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlim(0, max(b + d for lane in lanes for row in lane.bars.values() for b, d in row))
    axes.set_xlabel("milliseconds since the first recorded step")
    axes.spines[["top", "right"]].set_visible(False)
    shown = [kind for kind in colours if any(kind in lane.bars for lane in lanes)]
    patches = [Patch(color=colours[kind], label=kind) for kind in shown]
    figure.legend(handles=patches, loc="outside upper left", ncols=4, fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
