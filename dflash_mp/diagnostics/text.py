"""The report that the diagnostic prints."""

import re
from collections import Counter, defaultdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from dflash_mp.diagnostics.verdict import INCONCLUSIVE, LOUD, OK, SILENT, Tally
from dflash_mp.diagnostics.words import in_words

if TYPE_CHECKING:
    from dflash_mp.diagnostics.mechanism import Features

WIDTH = 100
ORDER = (LOUD, SILENT, OK, INCONCLUSIVE)


def heading(about: dict[str, Any]) -> str:
    """Say on what the diagnostic runs."""
    config = about["config"]
    return (
        f"torch {about['torch']}, Python {about['python']}, {about['platform']}, "
        f"{config['device']}; {config['threads']} drafters; "
        f"thread switch interval {config['switch_interval']} s\n\n"
    )


def mechanism(statements: list[tuple[str, str]]) -> str:
    """Show each statement with the line of torch that it rests on."""
    lines = ["How it works here:"]
    for number, (statement, source) in enumerate(statements, start=1):
        lines += [f" {number}. {statement}", f"      {source}"]
    return "\n".join(lines) + "\n\n"


def matrix(tallies: list[Tally]) -> str:
    """Show scenarios as rows and treatments as columns, in as many parts as the width asks for.

    The treatments that most scenarios were run under come first; a part has the rows with a cell.
    """
    cells = {(c.scenario, c.treatment): f"{c.outcome} {c.in_short()}" for c in tallies}
    scenarios = list(dict.fromkeys(scenario for scenario, _ in cells))
    often = Counter(treatment for _, treatment in cells)
    widths = {
        treatment: 2
        + max(len(treatment), *(len(v) for (_, t), v in cells.items() if t == treatment))
        for treatment, _ in often.most_common()
    }
    first = 2 + max(map(len, scenarios))
    parts: list[list[str]] = [[]]
    for treatment, width in widths.items():
        if parts[-1] and first + width + sum(widths[t] for t in parts[-1]) > WIDTH:
            parts.append([])
        parts[-1].append(treatment)
    lines = ["Scenario x treatment, bad runs / runs (empty: not run):"]
    for part in parts:
        rows = [("", part)]
        for name in scenarios:
            row = [cells.get((name, treatment), "") for treatment in part]
            rows += [(name, row)] if any(row) else []
        lines.append("")
        for head, row in rows:
            line = "".join(f"{v:<{widths[t]}}" for t, v in zip(part, row, strict=True))
            lines.append(f" {head:<{first}}{line}".rstrip())
    return "\n".join(lines) + "\n\n"


def outcomes(tallies: list[Tally], summaries: dict[str, str]) -> str:
    """Group, for each scenario, the treatments that had the same outcome."""
    lines = ["The same by outcome (for a random scenario without a bad run, the 95 % bound):"]
    by_scenario: dict[str, list[Tally]] = defaultdict(list)
    for cell in tallies:
        by_scenario[cell.scenario].append(cell)
    for name, cells in by_scenario.items():
        lines.append(f"\n {name}: {summaries[name]}")
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for cell in cells:
            labels = ", ".join(cell.labels)
            groups[cell.outcome, labels].append(f"{cell.treatment} {cell.in_short()}")
        for outcome, labels in sorted(groups, key=lambda g: ORDER.index(g[0])):
            what = f"{outcome}: {labels}" if labels else outcome
            lines += _wrapped(f"   {what:<36} ", groups[outcome, labels])
        lines += [f"   inconclusive: {why}" for c in cells for why in c.why if _lost(c)]
    return "\n".join(lines) + "\n\n"


def _lost(cell: Tally) -> bool:
    return bool(cell.outcomes.get(INCONCLUSIVE))


def _wrapped(head: str, members: list[str]) -> list[str]:
    lines = [head]
    for member in members:
        if len(lines[-1]) + len(member) + 2 > WIDTH and lines[-1].strip():
            lines.append(" " * len(head))
        lines[-1] += member + "; "
    return [line.rstrip("; ") for line in lines]


def details(cell: Tally, about: str) -> str:
    """Show one exception: the failing thread beside the thread that was tracing."""
    lines = [f"{cell.scenario}, treatment {cell.treatment}: {about}"]
    lines += [f"  {outcome}: {count}" for outcome, count in cell.outcomes.items()]
    lines += [f"  {why}" for why in cell.why]
    if cell.example is None:
        return "\n".join(lines) + "\n\n"
    failing = [f"{cell.example['actor']} fails", *cell.example["frames"]]
    tracing = next(iter(cell.example["tracing"].items()), None)
    beside = (
        [f"{tracing[0]} is tracing", *tracing[1]] if tracing else ["no thread was tracing then"]
    )
    width = max(map(len, failing)) + 2
    pairs = zip_longest(failing, _from_tracer(beside), fillvalue="")
    lines += ["", *(f"  {left:<{width}}| {right}".rstrip() for left, right in pairs)]
    lines += ["", f"  {cell.example['kind']}: {cell.example['message']}"]
    lines += _two_wrappers(cell.example["frames"])
    return "\n".join(lines) + "\n\n"


def _two_wrappers(frames: list[str]) -> list[str]:
    """Explain why a traceback shows compile_wrapper twice, if it does."""
    wrappers = [i for i, frame in enumerate(frames) if frame.endswith(" compile_wrapper")]
    if len(wrappers) < 2:
        return []
    lines = [
        "",
        "  Two compile_wrapper frames are two compiled calls, one inside the other: an exception",
        "  shows a frame once.",
    ]
    if "flex_attention" in frames[wrappers[0] + 1]:
        lines += [
            "  The outer call found no room for one more compiled version (the recompile limit):",
            "  torch ran flex_attention as it is written. Uncompiled, it compiles a helper of its",
            "  own, and that inner call met the other thread's trace.",
        ]
    return lines


def _from_tracer(stack: list[str]) -> list[str]:
    """Leave out what the tracing thread did before it entered torch's tracer."""
    tracer = re.compile(r"fx/_symbolic_trace\.py:\d+ trace$")
    inside = [i for i, frame in enumerate(stack) if tracer.search(frame)]
    return [stack[0], *stack[inside[0] :]] if inside else stack


def verdict(
    word: str,
    compared: dict[str, list[str]] | None,
    tallies: list[Tally],
    features: "Features",
    torch_version: str,
) -> str:
    """Say in plain words what this torch does."""
    if compared is None:
        lines = [f"Verdict for torch {torch_version}: unknown version, nothing to compare with."]
    else:
        lines = [f"Verdict for torch {torch_version}: {word}."]
        for relation in ("worse", "better", INCONCLUSIVE):
            lines += [f"  {relation}: {cell}" for cell in compared.get(relation, [])]
    lines += [f" - {sentence}" for sentence in in_words(tallies, features)]
    return "\n".join(lines) + "\n\n"
