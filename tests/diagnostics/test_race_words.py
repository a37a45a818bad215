"""The sentences of the verdict say about the committed results what those results show."""

import re

import pytest

from dflash_mp.diagnostics.mechanism import Features
from dflash_mp.diagnostics.tables import load
from dflash_mp.diagnostics.verdict import Tally
from dflash_mp.diagnostics.words import in_words

# What the three kinds of torch are like, from docs/race.md, "Which torch does what".
KINDS = {
    "2.11": Features(False, False, False, False),
    "2.13": Features(False, True, True, True),
    "2.14": Features(True, True, True, True),
}
RESULTS = {about["torch"][:4]: cells for about, cells in load()}
PATCHED = ("trace-over-inductor", "patch-before")


def words(minor: str) -> list[str]:
    return in_words(list(RESULTS[minor].values()), KINDS[minor])


def named(minor: str, beginning: str) -> set[str]:
    """Return the scenarios that the sentence with this beginning lists."""
    found = [s for s in words(minor) if s.startswith(beginning)]
    return set(re.split(", ", found[0].rstrip(".").split(": ")[1])) if found else set()


def bad(minor: str, scenario: str, treatment: str) -> bool:
    cell = RESULTS[minor].get((scenario, treatment))
    return bool(cell and cell.bad)


@pytest.mark.parametrize("minor", KINDS)
def test_what_is_said_to_be_process_wide_failed_with_a_flag_per_thread_and_not_in_processes(minor):
    apart = ["backport", "backport-hooks", *(["none"] if KINDS[minor].flag_per_thread else [])]
    scenarios = named(minor, "Process-wide besides the flag")
    assert scenarios
    for scenario in scenarios:
        assert any(bad(minor, scenario, treatment) for treatment in apart), scenario
        assert RESULTS[minor][scenario, "processes"].outcome == "ok"


@pytest.mark.parametrize(
    ("minor", "scenarios"),
    [
        ("2.11", {"flex-threads", "block-threads"}),
        ("2.13", {"adamw-threads", "mask-threads"}),
        ("2.14", set()),
    ],
)
def test_a_failure_without_treatment_alone_is_not_blamed_on_anything(minor, scenarios):
    assert named(minor, "Bad without treatment, and not run") == scenarios
    assert not scenarios & named(minor, "Process-wide besides the flag")


@pytest.mark.parametrize("minor", KINDS)
def test_what_is_said_to_be_cured_by_hooks_is(minor):
    scenarios = named(minor, "Bad with a flag per thread, clean with module hooks")
    assert scenarios == {"call-in-symbolic-trace", "lost-update", "leaked-hooks"}
    for scenario in scenarios:
        assert bad(minor, scenario, "backport")
        assert RESULTS[minor][scenario, "backport-hooks"].outcome == "ok"


def test_every_bad_scenario_is_accounted_for():
    beginnings = ("Process-wide", "Bad with a flag", "Bad without treatment")
    beside_flag = {"call-in-compile", "call-in-make-fx", "lost-update-flex"}
    for minor, cells in RESULTS.items():
        said = set().union(*(named(minor, beginning) for beginning in beginnings))
        failed = {scenario for scenario, t in cells if t == "none" and cells[scenario, t].bad}
        assert failed - beside_flag == said


@pytest.mark.parametrize("minor", KINDS)
def test_a_trace_past_the_patched_check_is_wrong_in_silence_only_where_it_was(minor):
    silent = RESULTS[minor][PATCHED].outcome == "silent"
    (said,) = (s for s in words(minor) if "takes the check away" in s)
    assert ("without an error" in said) == silent
    assert ("another error" in said) == (not silent)
    assert all(label in said for label in RESULTS[minor][PATCHED].labels)
    # Both kinds are among the committed results.
    assert {RESULTS[m][PATCHED].outcome for m in KINDS} == {"silent", "loud"}


@pytest.mark.parametrize("minor", KINDS)
def test_a_patch_is_called_a_help_or_none_only_where_there_was_something_to_help(minor):
    failed = bad(minor, "call-in-make-fx", "none")
    said = " ".join(words(minor))
    assert ("does not help" in said) == failed
    assert ("lets a call" in said) == failed
    assert ("fails while another thread is in make_fx" in said) == failed
    assert ("fails while another thread compiles" in said) == bad(minor, "call-in-compile", "none")


@pytest.mark.parametrize("minor", KINDS)
def test_no_sentence_speaks_of_another_one(minor):
    for sentence in words(minor):
        assert not re.match(r"(It|That|This|Those|They|Patching it)\b", sentence)


def test_cells_that_were_not_run_are_not_spoken_of():
    assert in_words([], KINDS["2.13"]) == []
    lost = [Tally("call-in-compile", "none", False, {"inconclusive": 1})]
    assert in_words(lost, KINDS["2.11"]) == []
    patched = [Tally(*PATCHED, False, {"silent": 1}, {"wrong numbers": 1})]
    assert in_words(patched, KINDS["2.13"]) == []
