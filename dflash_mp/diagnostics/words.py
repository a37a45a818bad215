"""The verdict in words. Each sentence follows from cells that were run and stands by itself."""

from typing import TYPE_CHECKING

from dflash_mp.diagnostics.verdict import LOUD, OK, SILENT, Tally

if TYPE_CHECKING:
    from dflash_mp.diagnostics.mechanism import Features

Seen = dict[tuple[str, str], Tally]


def in_words(tallies: list[Tally], features: "Features") -> list[str]:
    """Derive the sentences of the verdict from the outcomes of this run."""
    seen = {(t.scenario, t.treatment): t for t in tallies if t.runs}
    return [
        *_about_calls(seen, features),
        *_about_patches(seen),
        *_about_the_rest(seen, features),
        *_about_processes(seen),
    ]


def _outcome(seen: Seen, scenario: str, treatment: str = "none") -> str | None:
    """Return the worst outcome of a cell, or None for one that was not run."""
    cell = seen.get((scenario, treatment))
    return cell.outcome if cell else None


def _about_calls(seen: Seen, features: "Features") -> list[str]:
    sentences = []
    hidden = features.compile_marks_process and not features.flag_per_thread
    beside_compile = _outcome(seen, "call-in-compile")
    if beside_compile == LOUD:
        sentences.append("A call of a compiled function fails while another thread compiles.")
    elif beside_compile == OK and hidden:
        sentences.append(
            "A call of a compiled function survives another thread's compile, although all threads "
            "share the flag: is_compiling() is True in all of them meanwhile, which hides it."
        )
    beside_trace = _outcome(seen, "call-in-make-fx")
    if beside_trace == LOUD:
        sentences.append("A call of a compiled function fails while another thread is in make_fx.")
    elif beside_trace == OK and features.flag_per_thread:
        sentences.append(
            "The flag is kept per thread: a call of a compiled function survives another thread's "
            "make_fx."
        )
    return sentences


def _about_patches(seen: Seen) -> list[str]:
    sentences = []
    untreated, after, before = (
        _outcome(seen, "call-in-make-fx", t) for t in ("none", "patch-after", "patch-before")
    )
    if untreated == LOUD and after == LOUD:
        sentences.append(
            "Patching the function after torch.compile() does not help: a call beside make_fx "
            "still fails."
        )
    if untreated == LOUD and before == OK:
        sentences.append(
            "Patching the function before torch.compile() lets a call beside make_fx through."
        )
    unchecked = seen.get(("trace-over-inductor", "patch-before"))
    if _outcome(seen, "trace-over-inductor") == OK and unchecked and unchecked.bad:
        labels = ", ".join(unchecked.labels)
        what = {
            SILENT: f"goes wrong without an error ({labels} from the traced graph)",
            LOUD: f"ends in another error than the one that says why ({labels})",
        }
        sentences.append(
            "Patching the function before torch.compile() takes the check away for everybody: "
            f"make_fx over a compiled function then {what[unchecked.outcome]}."
        )
    if _outcome(seen, "trace-over-inductor", "backport") == OK:
        sentences.append("A thread-local flag keeps the check of make_fx over a compiled function.")
    return sentences


def _about_the_rest(seen: Seen, features: "Features") -> list[str]:
    """Tell what fails with the flag out of the way, and for which failures nobody tried."""
    # The furthest first. Where torch keeps the flag per thread, doing nothing is one of them.
    per_thread = ["backport-hooks", "backport", *(["none"] if features.flag_per_thread else [])]
    process_wide, hooks, not_run = [], [], []
    for name in dict.fromkeys(scenario for scenario, _ in seen):
        outcomes = [o for t in per_thread if (o := _outcome(seen, name, t))]
        if not outcomes:
            if _outcome(seen, name) in (LOUD, SILENT):
                not_run.append(name)
        elif outcomes[0] != OK:
            if _outcome(seen, name, "processes") == OK:
                process_wide.append(name)
        elif set(outcomes) != {OK} and (name, "backport-hooks") in seen:
            hooks.append(name)
    said = {
        "Process-wide besides the flag (bad with a flag per thread, clean in processes)": (
            process_wide
        ),
        "Bad with a flag per thread, clean with module hooks per thread as well": hooks,
        "Bad without treatment, and not run with a flag per thread": not_run,
    }
    return [f"{what}: {', '.join(names)}." for what, names in said.items() if names]


def _about_processes(seen: Seen) -> list[str]:
    cells = [cell for cell in seen.values() if cell.treatment == "processes"]
    runs, failed = sum(cell.runs for cell in cells), sum(cell.bad for cell in cells)
    if not cells:
        return []
    return [f"One process per drafter: {failed} bad of {runs} runs in {len(cells)} scenarios."]
