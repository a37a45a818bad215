"""The report that the diagnostic prints."""

import re
from collections import defaultdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from dflash_mp.diagnostics.verdict import INCONCLUSIVE, LOUD, OK, SILENT, Tally

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


def outcomes(tallies: list[Tally], summaries: dict[str, str]) -> str:
    """Group, for each scenario, the treatments that had the same outcome."""
    lines = ["Outcomes (bad runs / runs; for a random scenario without any, the 95 % bound):"]
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


def in_words(tallies: list[Tally], features: "Features") -> list[str]:
    """Derive the sentences of the verdict from the outcomes of this run."""
    seen = {(t.scenario, t.treatment): t for t in tallies if t.runs}

    def bad(scenario: str, treatment: str = "none") -> bool | None:
        cell = seen.get((scenario, treatment))
        return cell.bad > 0 if cell else None

    sentences = []
    if bad("call-in-compile"):
        sentences.append("A call of a compiled function fails while another thread compiles.")
    elif bad("call-in-compile") is False and not features.flag_per_thread:
        sentences.append(
            "The flag is shared by all threads. A compile in another thread does no harm, only "
            "because is_compiling() is True in all threads meanwhile; a trace outside a compile "
            + ("does." if bad("call-in-make-fx") else "did none in this run.")
        )
    elif bad("call-in-make-fx") is False and features.flag_per_thread:
        sentences.append("The flag is kept per thread: another thread's trace does not raise.")
    if bad("call-in-make-fx", "patch-after"):
        sentences.append("Patching the function after torch.compile() has no effect.")
    if bad("call-in-make-fx", "patch-before") is False and bad(
        "trace-over-inductor", "patch-before"
    ):
        sentences.append(
            "Patching it before does, and takes away the check for everybody: make_fx over a "
            "compiled function then returns a wrong graph without an error."
        )
    if bad("trace-over-inductor", "backport") is False:
        sentences.append("A thread-local flag keeps that check.")
    # With the flag out of the way, whatever still fails is other state.
    best = ("backport-hooks", "backport", "none")
    rest = [
        name
        for name in dict.fromkeys(t.scenario for t in tallies)
        if next((bad(name, t) for t in best if (name, t) in seen), False)
    ]
    if rest:
        sentences.append(f"Still process-wide whatever is done to the flag: {', '.join(rest)}.")
    processes = [t for t in tallies if t.treatment == "processes" and t.runs]
    runs, failed = sum(t.runs for t in processes), sum(t.bad for t in processes)
    if processes:
        sentences.append(
            f"One process per drafter: {failed} bad of {runs} runs in {len(processes)} scenarios."
        )
    return sentences
