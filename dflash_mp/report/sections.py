"""The parts of a report that one run and a comparison of several have in common.

Each takes runs by their labels, so one run is a comparison of one.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from statistics import median
from typing import Any

from dflash_mp.acceptance_summary import merge_results
from dflash_mp.charts import Points, areas, bars, lines
from dflash_mp.learning_config import CROSS_ENTROPY, OBJECTIVES
from dflash_mp.markup import Html, cell, code, table
from dflash_mp.report.run_files import RunFiles, as_yaml, default_settings

Runs = Mapping[str, RunFiles]

CURVES = {
    "Acceptance length": {
        "simulated on held-out text": "eval/acceptance_length",
        "real decoding": "eval/decoded_acceptance_length",
    },
    "Learning rate": {"learning rate": "train/lr"},
    "Gradient norm": {"gradient norm": "train/grad_norm"},
    "Tokens per second": {"tokens per second": "perf/tokens_per_s"},
    "Share of peak FLOP/s (MFU)": {"drafters": "perf/drafter_mfu", "targets": "perf/target_mfu"},
}
TIMES = {
    "targets": {
        "forward": "perf/target_forward",
        "decoding": "perf/target_decode",
        "waiting for the wire": "perf/target_wait",
    },
    "main drafter": {
        "training": "perf/drafter_train",
        "waiting for frames": "perf/drafter_wait",
    },
}
REST = {
    "targets": "everything else",
    "main drafter": "evaluating, logging, saving",
}
ABSENT = "-"
NAMES = ("run_name", "output_dir")
"""Settings that say nothing of a run but how it is called."""
COMPARED_BY = {
    "target.name": "acceptance lengths and speeds",
    "data.heldout": "acceptance lengths and held-out losses",
    "evaluate.max_rows": "simulated acceptance lengths and held-out losses",
    "evaluate.decode_prompts": "decoded acceptance lengths",
    "evaluate.max_new_tokens": "decoded acceptance lengths",
    "loss.kind": "training losses",
}
"""Settings that have to be the same, and for what."""


def curves(runs: Runs) -> list[Html]:
    """One chart per kind of value, over the steps, with the lines of all runs."""
    charts = [_curve(runs, title, series) for title, series in (losses(runs) | CURVES).items()]
    return [chart for chart in charts if chart]


def losses(runs: Runs) -> dict[str, dict[str, str]]:
    """Curves of the losses: one chart where all of them are cross-entropies, else two."""
    kinds = [files.settings.get("loss.kind") for files in runs.values()]
    trained = list(dict.fromkeys(OBJECTIVES[kind] for kind in kinds if kind in OBJECTIVES))
    training, held_out = {"training": "train/loss"}, {"held out": "eval/loss"}
    if trained in ([], [CROSS_ENTROPY]):
        return {f"Loss: {CROSS_ENTROPY}": training | held_out}
    return {
        f"Training loss: {', '.join(trained)}": training,
        f"Held-out loss: {CROSS_ENTROPY}": held_out,
    }


def _curve(runs: Runs, title: str, series: Mapping[str, str]) -> Html:
    named = {
        _label(run, label, alone=len(series) == 1): files.points(key)
        for label, key in series.items()
        for run, files in runs.items()
    }
    return lines(title, named, kinds=_kinds(runs, len(series)))


def _label(run: str, label: str, alone: bool) -> str:
    """Of a line: what it shows, and of which run where there are several."""
    if not run:
        return label
    return run if alone else f"{run}, {label}"


def _kinds(runs: Runs, count: int) -> int:
    """Kinds of lines: with several runs the colours are the runs'."""
    return count if len(runs) > 1 else 1


def times(runs: Runs) -> list[Html]:
    """Where the time of each role went, as stacked shares; one chart per role and run."""
    charts = []
    for role, series in TIMES.items():
        for run, files in runs.items():
            title = f"Time of the {role}" + (f": {run}" if run else "")
            charts.append(areas(title, _shares(files, series, REST[role])))
    return [chart for chart in charts if chart]


def _shares(files: RunFiles, series: Mapping[str, str], rest: str) -> dict[str, Points]:
    rows = [row for row in files.metrics if all(key in row for key in series.values())]
    shares: dict[str, Points] = {
        label: [(row["step"], row[key]) for row in rows] for label, key in series.items()
    }
    shares[rest] = [
        (row["step"], max(0.0, 1.0 - sum(row[key] for key in series.values()))) for row in rows
    ]
    return shares


def acceptance(runs: Runs) -> list[Html]:
    """Accepted lengths as a histogram, and acceptance by position, as last measured."""
    summaries = {_label(run, "simulated", False): files.walk for run, files in runs.items()} | {
        _label(run, "decoded", False): merge_results(files.decoded) if files.decoded else {}
        for run, files in runs.items()
    }
    most = max(len(one.get("histogram", [])) for one in summaries.values())
    if most == 0:
        return []
    shares = {
        label: [count / max(1, sum(one["histogram"])) for count in one["histogram"]] if one else []
        for label, one in summaries.items()
    }
    rates = {
        label: [
            (k, r) for k, r in enumerate(one.get("slot_acceptance_rate", []), 1) if r is not None
        ]
        for label, one in summaries.items()
    }
    kinds = _kinds(runs, 2)
    committed = "Share of target forwards by tokens committed"
    return [
        bars(committed, range(1, most + 1), shares, kinds),
        lines("Accepted once all before it are", rates, "position in the block", True, kinds),
    ]


def overview(runs: Runs) -> Html:
    """The numbers that say how a run went, one column per run."""
    rows: list[list[Any]] = []
    for label, values in _numbers(runs).items():
        if any(value is not None for value in values):
            rows.append([label, *(ABSENT if v is None else cell(v) for v in values)])
    return table(["", *runs], rows)


def _numbers(runs: Runs) -> dict[str, list[Any]]:
    def each(value: Any) -> list[Any]:
        return [value(files) for files in runs.values()]

    def state(files: RunFiles) -> str:
        return f"{files.last_step:,}" + ("" if files.results else " (running, or cut short)")

    def decoded(files: RunFiles, key: str) -> Any:
        return merge_results(files.decoded)[key] if files.decoded else None

    def before(files: RunFiles) -> Any:
        return next((y for x, y in files.points("eval/decoded_acceptance_length") if not x), None)

    def same(files: RunFiles) -> str | None:
        count = decoded(files, "same")
        return None if count is None else f"{count} of {len(files.decoded)}"

    def time(files: RunFiles) -> str | None:
        seconds = round(files.metrics[-1]["seconds"]) if files.metrics else None
        return None if seconds is None else str(timedelta(seconds=seconds))

    def speed(files: RunFiles) -> float | None:
        values = [value for _, value in files.points("perf/tokens_per_s")]
        return median(values) if values else None

    return {
        "steps": each(state),
        "time": each(time),
        "objective": each(lambda f: f.settings.get("loss.kind")),
        "training loss": each(lambda f: f.last("train/loss")),
        "held-out cross-entropy": each(lambda f: f.last("eval/loss")),
        "acceptance length, simulated": each(lambda f: f.last("eval/acceptance_length")),
        "acceptance length, decoded, before training": each(before),
        "acceptance length, decoded": each(lambda f: decoded(f, "acceptance_length")),
        "prompts decoded with the target's own text": each(same),
        "micro-batches skipped": each(lambda f: int(sum(y for _, y in f.points("train/skipped")))),
        "tokens per second, median": each(speed),
        "target": each(lambda f: f.settings.get("target.name")),
        "started": each(lambda f: f.facts.get("started")),
        "commit": each(lambda f: (f.facts.get("commit") or "")[:12] or None),
        "torch": each(lambda f: f.facts.get("packages", {}).get("torch")),
    }


def changed_settings(runs: Runs) -> Html:
    """Keys with another value than the default, or than in another run; a column per run."""
    columns = {"default": default_settings(), **{n: r.settings for n, r in runs.items()}}
    return settings_table({n: values for n, values in columns.items() if values})


def different_settings(runs: Runs) -> Html:
    """Keys on which runs do not agree, but for their own names; empty if there are none."""
    columns = {
        name: {key: value for key, value in run.settings.items() if key not in NAMES}
        for name, run in runs.items()
        if run.settings
    }
    alike = all(values == next(iter(columns.values())) for values in columns.values())
    return "" if alike else settings_table(columns)


def not_comparable(runs: Runs) -> list[str]:
    """Why numbers of these runs cannot be held against each other."""
    found = []
    for key, what in COMPARED_BY.items():
        values = [str(run.settings[key]) for run in runs.values() if key in run.settings]
        if len(set(values)) > 1:
            found.append(f"{key} differs: {what} of these runs do not compare")
    unknown = [name for name, run in runs.items() if not run.settings]
    if unknown:
        found.append(f"the settings of {', '.join(unknown)} are not known: no config.yaml")
    return found


def settings_table(columns: Mapping[str, Mapping[str, Any]]) -> Html:
    """The keys on which ``columns`` do not agree."""
    keys: Sequence[str] = list(dict.fromkeys(key for values in columns.values() for key in values))
    rows = []
    for key in keys:
        values = [as_yaml(values.get(key, ABSENT)) for values in columns.values()]
        if len(set(values)) > 1:
            rows.append([code(key), *map(code, values)])
    return table(["key", *columns], rows)
