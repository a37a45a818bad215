"""The tables and the plot of BENCH.md, made from the committed results.

    python -m dflash_mp.bench.tables BENCH.md

rewrites them in place: the tables in the page, the plot in docs/ beside it.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_mp.bench.machine import RESULTS
from dflash_mp.markdown import table, with_tables

OURS = "dflash_mp"
PLOT = "docs/bench_stream.svg"
MIB = 2**20

Row = dict[str, Any]


def load(name: str) -> Row | None:
    """This result, if it was committed."""
    path = RESULTS / f"{name}.json"
    found: Row | None = json.loads(path.read_text()) if path.is_file() else None
    return found


def tables() -> str:
    """All tables as Markdown."""
    lines: list[str] = []
    stream, data, plan, gpu = load("stream-full"), load("data"), load("plan"), load("gpu")
    for form in ("short", "full"):
        if (step := load(f"step-{form}")) is not None:
            lines += [f"## The drafter step, {form} form", "", *made_with(step), ""]
            lines += bars(step["rows"])
            lines += [line for group in groups(step["rows"]) for line in step_table(group)]
    if stream is not None:
        lines += ["## The stream", "", *made_with(stream), "", *stream_tables(stream)]
    if data is not None:
        lines += ["## The data", "", *made_with(data), "", *data_table(data)]
    if plan is not None:
        lines += ["## The planner", "", *made_with(plan), "", *plan_table(plan)]
    if gpu is not None:
        lines += [f"## One {gpu['gpu']}", "", *made_with(gpu), "", *gpu_tables(gpu)]
    return "\n".join(lines).rstrip()


def made_with(result: Row) -> list[str]:
    """One line about machine, versions and commit."""
    about = result["about"]
    return [
        f"Commit {about['commit']}, torch {about['torch']}, Python {about['python']}, "
        f"{about['cores']} cores of an {about['cpu']}, {about['memory_gib']} GiB."
    ]


def groups(rows: list[Row]) -> list[list[Row]]:
    """Rows of one case and dtype together: ours and the peers', in the order of the run."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row["anchors"], row["supervision"], row["dtype"]), []).append(row)
    return list(found.values())


def seconds(row: Row) -> float:
    """Median CPU seconds of a step."""
    return statistics.median(row["cpu_s"])


def ours(group: list[Row]) -> Row:
    """This project's row of a group."""
    return next(row for row in group if row["who"] == OURS)


def peers(group: list[Row]) -> list[Row]:
    """The others'."""
    return [row for row in group if row["who"] != OURS]


def speedup(group: list[Row]) -> float:
    """How often our step fits into the fastest peer's."""
    return min(map(seconds, peers(group))) / seconds(ours(group))


def memory_ratio(group: list[Row]) -> float:
    """Extra memory of the leanest peer by ours."""
    return min(row["peak_mib"] for row in peers(group)) / ours(group)["peak_mib"]


def product_share(group: list[Row]) -> float:
    """Useful operations per second in our step by those of a plain matrix product."""
    row = ours(group)
    share: float = row["useful_gflop"] / seconds(row) / row["product_gflop_per_s"]
    return share


GOALS: tuple[tuple[str, int, str, Callable[[list[Row]], float], float], ...] = (
    ("times as fast as the fastest peer", 128, "ragged", speedup, 2.0),
    ("times as fast as the fastest peer", 128, "full", speedup, 1.4),
    ("times as fast as the fastest peer", 512, "full", speedup, 2.5),
    ("of the leanest peer's extra memory, one part in", 128, "full", memory_ratio, 8.0),
    ("of a plain product's rate", 128, "full", product_share, 0.8),
)


def bars(rows: list[Row]) -> list[str]:
    """What was to be reached in fp32, and what was, in bf16 as well."""
    found = {(g[0]["anchors"], g[0]["supervision"], g[0]["dtype"]): g for g in groups(rows)}
    lines = []
    for what, anchors, supervision, measure, least in GOALS:
        pair = [found.get((anchors, supervision, dtype)) for dtype in ("float32", "bfloat16")]
        reached = [f"{measure(group):.2f}" if group and peers(group) else "" for group in pair]
        if any(reached):
            lines.append([f"{anchors} anchors, {supervision}", what, f"{least:g}", *reached])
    return table(["", "", "to reach in fp32", "fp32", "bf16"], lines)


def step_table(group: list[Row]) -> list[str]:
    """One case and dtype: everybody beside each other."""
    first, own = group[0], seconds(ours(group))
    rows = []
    for row in group:
        rate = row["useful_gflop"] / seconds(row)
        rows.append(
            [
                row["who"],
                f"{seconds(row):.2f} ({min(row['cpu_s']):.2f}-{max(row['cpu_s']):.2f})",
                f"{seconds(row) / own:.2f}",
                f"{rate:.0f} ({rate / row['product_gflop_per_s']:.0%})",
                f"{row['peak_mib']:,}",
                f"{row['loss']:.5f}",
                f"{row['grad_norm']:.4f}",
            ]
        )
    title = f"### {first['anchors']} anchors, {first['supervision']} supervision, {first['dtype']}"
    said = (
        f"{first['useful_gflop']:,.0f} GFLOP are useful; a plain product makes "
        f"{first['product_gflop_per_s']:.0f} GFLOP/s."
    )
    header = [
        *("", "CPU-s a step", "by ours", "useful GFLOP/s (of a product)", "extra MiB"),
        *("loss", "gradient norm"),
    ]
    return [title, "", said, "", *table(header, rows)]


def stream_tables(stream: Row) -> list[str]:
    """Efficiency by W, and cost by size and by number of targets, for each edge."""
    windows = [
        [
            row["edge"],
            f"{row['targets']}+{row['drafters']}",
            str(row["slots"]),
            " / ".join(f"{value:.2f}" for value in row["alone_frames_per_s"]),
            f"{row['frames_per_s']:.2f}",
            f"{row['efficiency']:.3f}",
        ]
        for row in stream["windows"]
    ]
    sizes = [
        [
            row["edge"],
            f"{row['nbytes'] / MIB:.0f} MiB",
            *(
                f"{row[key]:.2f}"
                for key in ("memcpy_gb_per_s", "edge_gb_per_s", "stream_gb_per_s", "cpu_s_per_gb")
            ),
        ]
        for row in stream["sizes"]
    ]
    counts = [
        [
            row["edge"],
            str(row["targets"]),
            *(f"{row[key]:.2f}" for key in ("stream_gb_per_s", "cpu_s_per_gb")),
        ]
        for row in stream["targets"]
    ]
    alone = "targets / drafters alone"
    return [
        *table(["edge", "processes", "W", alone, "frames/s", "efficiency"], windows),
        *table(["edge", "frame", "memcpy GB/s", "edge GB/s", "stream GB/s", "CPU-s a GB"], sizes),
        *table(["edge", "targets of one drafter", "stream GB/s", "CPU-s a GB"], counts),
        f"![What a byte costs by size of its frame and by number of targets]({PLOT})",
        "",
    ]


def data_table(data: Row) -> list[str]:
    """Preparation and packing."""
    return table(
        ["", ""],
        [
            ["rows/s of one core", f"{data['rows_per_core_s']:,.0f}"],
            ["MB/s of one core", f"{data['mb_per_core_s']:.2f}"],
            ["tokens/s of one core", f"{data['tokens_per_core_s']:,.0f}"],
            ["all cores", f"{data['rows']:,} rows in {data['prepare_s']:.1f} s"],
            ["memory above the start", f"{data['peak_mib']:,.0f} MiB"],
            ["packing", f"{data['fill']:.1%} filled; {data['pack_s']:.2f} s"],
            ["collating", f"{data['collate_us']:.0f} us a micro-batch"],
        ],
    )


def plan_table(plan: Row) -> list[str]:
    """What was predicted and what was measured, of each shape."""
    what = {
        "target": "target's forward",
        "drafter": "drafter's loss and backward",
        "step": "optimizer's step",
    }
    rows = [
        [
            row["shape"],
            what[row["side"]],
            f"{row['predicted_s']:.3f}",
            f"{row['measured_s']:.3f}",
            f"{row['predicted_s'] / row['measured_s'] - 1:+.0%}",
        ]
        for row in plan["rows"]
    ]
    return table(["shape", "", "predicted CPU-s", "measured CPU-s", "off by"], rows)


def gpu_tables(gpu: Row) -> list[str]:
    """The drafter's step by attention and anchors, the target's forward, and the edges."""
    steps = []
    for row in gpu["drafter"]:
        checkpointing = ", checkpointing" if row["checkpointing"] else ""
        steps.append(
            [
                f"{row['attention']}{checkpointing}",
                str(row["anchors"]),
                *speed(row),
                str(row["recompiles"]),
                f"{row['first_s']:.1f}",
                f"{row['loss']:.4f}",
            ]
        )
    target = gpu["target"]
    layers = f"{target['layers_run']} of {target['layers']}"
    edges = [[edge["name"], edge["said"]] for edge in gpu["edges"]]
    times = ["ms (fastest-slowest)", "tokens/s", "TFLOP/s", "MFU", "extra GiB"]
    header = ["drafter step", "anchors", *times, "recompiles", "first step s", "loss"]
    again = [
        f"**Compiled again after the first step, which must not be:** {row['attention']} at "
        f"{row['anchors']} anchors, {row['recompiles']} times.\n"
        for row in gpu["drafter"]
        if row["recompiles"]
    ]
    left_out = [
        f"Left out: {row['attention']} at {row['anchors']} anchors"
        f"{' with checkpointing' if row['checkpointing'] else ''}: {row['problem']}.\n"
        for row in gpu["left_out"]
    ]
    return [
        *table(header, steps),
        *again,
        *left_out,
        *table(["target forward", *times], [[f"{layers} layers", *speed(target)]]),
        *table(["edge of two processes", ""], edges),
    ]


def speed(row: Row) -> list[str]:
    """Time, tokens/s, FLOP/s, MFU and memory of one line."""
    times = [1e3 * value for value in row["seconds"]]
    return [
        f"{statistics.median(times):.1f} ({min(times):.1f}-{max(times):.1f})",
        f"{row['tokens_per_s']:,.0f}",
        f"{row['flop_per_s'] / 1e12:.1f}",
        "-" if row["mfu"] is None else f"{row['mfu']:.0%}",
        "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}",
    ]


def plot(stream: Row, path: Path) -> None:
    """CPU seconds of a byte by size of its frame and by number of targets."""
    import matplotlib

    matplotlib.use("svg")
    # Otherwise two runs on the same results differ.
    matplotlib.rcParams["svg.hashsalt"] = "bench"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for edge in dict.fromkeys(row["edge"] for row in stream["sizes"]):
        sizes, counts = (
            [row for row in stream[part] if row["edge"] == edge] for part in ("sizes", "targets")
        )
        left.plot(
            [row["nbytes"] / MIB for row in sizes],
            [row["cpu_s_per_gb"] for row in sizes],
            "o-",
            label=edge,
        )
        right.plot(
            [row["targets"] for row in counts], [row["cpu_s_per_gb"] for row in counts], "o-"
        )
    left.set_xscale("log", base=2)
    left.legend()
    left.set(xlabel="MiB of a frame", ylabel="CPU-s a GB, all processes", ylim=(0, None))
    right.set(xlabel="targets of one drafter")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main(arguments: list[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash_mp.bench.tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("page", type=Path, help="the page with the marks of the tables")
    path = parser.parse_args(arguments).page
    path.write_text(with_tables(path.read_text(), tables()))
    stream = load("stream-full")
    if stream is not None:
        plot(stream, path.parent / PLOT)


if __name__ == "__main__":
    main(sys.argv[1:])
