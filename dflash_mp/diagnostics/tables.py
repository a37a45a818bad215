"""The tables of docs/race.md, made from the committed results.

    python -m dflash_mp.diagnostics.tables docs/race.md

rewrites them in place.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from dflash_mp.diagnostics.verdict import Tally, read_results
from dflash_mp.markdown import table, with_tables

RESULTS = Path(__file__).parent / "results"

# The scenarios in which the flag or the module hooks decide, in the order of the story.
ABOUT_FLAG = (
    "call-in-compile",
    "call-in-make-fx",
    "flex-threads",
    "block-threads",
    "past-recompile-limit",
    "lost-update",
    "lost-update-flex",
    "call-in-symbolic-trace",
    "leaked-hooks",
    "trace-over-inductor",
)
ABOUT_REST = (
    "rewound-draws",
    "branch-on-compiling",
    "optimizer-in-compile",
    "adamw-threads",
    "stuck-annotation",
    "mask-threads",
    "fullgraph-threads",
)
REST_TREATMENTS = ("none", "backport-hooks", "lock", "gate", "processes")

Cells = dict[tuple[str, str], Tally]


def load() -> list[tuple[dict[str, Any], Cells]]:
    """Read all committed results, oldest torch first."""
    found = []
    for path in sorted(RESULTS.glob("torch-*.json"), key=_minor):
        about, tallies = read_results(path)
        found.append((about, {(t.scenario, t.treatment): t for t in tallies}))
    return found


def _minor(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.stem.removeprefix("torch-").split("."))


def entry(cell: Tally | None) -> str:
    """Say "loud 3/3 FX error", "ok 0/20 (<14 %)", or nothing for a cell that was not run."""
    if cell is None:
        return ""
    labels = ", ".join(cell.labels)
    outcome = cell.outcome if cell.outcome == "ok" else f"**{cell.outcome}**"
    return " ".join(part for part in (outcome, cell.in_short(), labels) if part)


def tables() -> str:
    """Return all tables as Markdown."""
    results = load()
    names = [about["torch"].split("+")[0] for about, _ in results]
    lines = [_made_with(about) for about, _ in results]
    lines += ["", "### Without treatment", ""]
    lines += table(
        ["scenario", *(f"torch {name}" for name in names)],
        [
            [f"`{s}`", *(entry(cells.get((s, "none"))) for _, cells in results)]
            for s in (*ABOUT_FLAG, *ABOUT_REST)
        ],
    )
    for name, (_, cells) in zip(names, results, strict=True):
        # The one scenario that every matrix runs under every treatment, in their order.
        treatments = [t for s, t in cells if s == "call-in-make-fx"]
        lines += [f"### torch {name}: the flag and the hooks", ""]
        lines += table(
            ["treatment", *(f"`{s}`" for s in ABOUT_FLAG)],
            [[f"`{t}`", *(entry(cells.get((s, t))) for s in ABOUT_FLAG)] for t in treatments],
        )
        lines += [f"### torch {name}: other state of the process", ""]
        lines += table(
            ["scenario", *(f"`{t}`" for t in REST_TREATMENTS)],
            [[f"`{s}`", *(entry(cells.get((s, t))) for t in REST_TREATMENTS)] for s in ABOUT_REST],
        )
    return "\n".join(lines).rstrip()


def _made_with(about: dict[str, Any]) -> str:
    config = about["config"]
    random = config["random_repeats"]
    often = f"{random} of each random one"
    if config["matrix"] == "full":
        often += f", {4 * random} of it without treatment and in processes"
    return (
        f"- torch {about['torch']}: {config['matrix']} matrix, {config['repeats']} run(s) of each "
        f"deterministic cell, {often}; {config['threads']} drafters, switch interval "
        f"{config['switch_interval']} s; Python {about['python']}, {about['platform']}"
    )


def main(arguments: list[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash_mp.diagnostics.tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("page", type=Path, help="the page with the marks of the tables")
    path = parser.parse_args(arguments).page
    path.write_text(with_tables(path.read_text(), tables()))


if __name__ == "__main__":
    main(sys.argv[1:])
