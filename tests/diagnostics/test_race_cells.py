"""What the race does on the installed torch, cell by cell, each in a process of its own."""

from functools import cache

import pytest

from dflash_mp.diagnostics.catalogue import SCENARIOS
from dflash_mp.diagnostics.mechanism import features
from dflash_mp.diagnostics.probe import Cell, Probe, run_cell, start_context
from dflash_mp.diagnostics.verdict import FX_LABEL, LOUD, OK, SILENT, judge, upper_bound

FLAG_PER_THREAD = features().flag_per_thread
MARKS_PROCESS = features().compile_marks_process

context = cache(start_context)


@cache
def probe(scenario: str, treatment: str) -> Probe:
    return run_cell(Cell(scenario, treatment), context())


def outcome(scenario: str, treatment: str) -> tuple[str, tuple[str, ...]]:
    judged = judge(probe(scenario, treatment))
    return judged.outcome, judged.labels


FX_ON_A_SHARED_FLAG = (OK, ()) if FLAG_PER_THREAD else (LOUD, (FX_LABEL,))


@pytest.mark.parametrize("treatment", ["none", "shim", "patch-after", "warm", "nested-main"])
def test_a_call_beside_a_trace_fails_and_these_do_not_help(treatment):
    found = outcome("call-in-make-fx", treatment)
    if treatment == "nested-main" and not features().config_per_thread:
        assert found == (SILENT, ("uncompiled",))
    else:
        assert found == FX_ON_A_SHARED_FLAG


@pytest.mark.parametrize(
    "treatment", ["patch-before", "code-swap", "backport", "lock", "processes"]
)
def test_a_call_beside_a_trace_is_cured_by(treatment):
    assert outcome("call-in-make-fx", treatment) == (OK, ())


def test_allowing_nested_traces_in_the_thread_runs_the_function_uncompiled():
    expected = (OK, ()) if FLAG_PER_THREAD else (SILENT, ("uncompiled",))
    assert outcome("call-in-make-fx", "nested-worker") == expected


def test_a_call_beside_a_compile_fails_where_nothing_hides_the_flag():
    shared_and_bare = not FLAG_PER_THREAD and not MARKS_PROCESS
    expected = (LOUD, (FX_LABEL,)) if shared_and_bare else (OK, ())
    assert outcome("call-in-compile", "none") == expected


def test_the_failing_thread_is_shown_with_the_tracing_one():
    if FLAG_PER_THREAD:
        pytest.skip("the flag of this torch is thread-local")
    report = probe("call-in-make-fx", "none").reports[0]
    failure = next(a["failure"] for a in report["actors"] if a["failure"])
    assert failure["message"].startswith(
        "Detected that you are using FX to symbolically trace a dynamo-optimized function."
    )
    assert failure["frames"][-1].endswith("compile_wrapper")
    assert any("Tracer" in f or f.endswith(" trace") for f in failure["tracing"]["tracer"])


def test_two_wrapper_frames_are_two_calls():
    if FLAG_PER_THREAD:
        pytest.skip("the flag of this torch is thread-local")
    report = probe("past-recompile-limit", "none").reports[0]
    frames = next(a["failure"]["frames"] for a in report["actors"] if a["failure"])
    names = [frame.rsplit(" ", 1)[1] for frame in frames[-3:]]
    assert names == ["compile_wrapper", "flex_attention", "compile_wrapper"]


def test_a_lost_update_leaves_the_flag_on():
    report = probe("lost-update", "none").reports[0]
    victim = next(a for a in report["actors"] if a["name"] == "victim")
    if FLAG_PER_THREAD:
        assert victim["failure"] is None
        assert "the FX tracing flag is stuck on" not in report["left_behind"]
    else:
        assert FX_LABEL in judge(probe("lost-update", "none")).labels
        assert victim["failure"]["message"].startswith("Detected that you are using FX")
        assert "the FX tracing flag is stuck on" in report["left_behind"]


def test_uncompiled_flex_attention_loses_an_update_too():
    expected = (OK, ()) if FLAG_PER_THREAD else (LOUD, (FX_LABEL, "flag stuck"))
    assert outcome("lost-update-flex", "none") == expected
    assert outcome("lost-update-flex", "backport") == (OK, ())


def test_shim_breaks_uncompiled_flex_attention():
    expected = (OK, ()) if FLAG_PER_THREAD else (LOUD, ("AttributeError",))
    assert outcome("lost-update-flex", "shim") == expected


def test_a_thread_local_flag_leaves_the_module_hooks_shared():
    assert outcome("call-in-symbolic-trace", "backport") == (LOUD, ("NameError",))
    assert outcome("leaked-hooks", "backport") == (
        LOUD,
        ("AssertionError", "NameError", "hooks left"),
    )
    assert outcome("call-in-symbolic-trace", "backport-hooks") == (OK, ())
    assert outcome("leaked-hooks", "backport-hooks") == (OK, ())


def test_a_compile_rewinds_the_draws_of_other_threads():
    assert outcome("rewound-draws", "none") == (SILENT, ("draws repeated",))
    assert outcome("rewound-draws", "processes") == (OK, ())


def test_a_compile_changes_what_other_threads_do():
    if not MARKS_PROCESS:
        assert outcome("branch-on-compiling", "none") == (OK, ())
        assert outcome("optimizer-in-compile", "none") == (OK, ())
        return
    assert outcome("branch-on-compiling", "none") == (SILENT, ("uncompiled",))
    assert outcome("optimizer-in-compile", "none") == (LOUD, ("TypeError", "half a step"))


def test_block_masks_leave_an_annotation_behind():
    bad = (SILENT, ("compiled as eager", "metadata left"))
    expected = bad if features().block_mask_annotates else (OK, ())
    assert outcome("stuck-annotation", "none") == expected


@pytest.mark.slow
def test_the_patch_bakes_a_constant_where_the_back_port_refuses():
    assert outcome("trace-over-inductor", "backport") == (OK, ())
    assert outcome("trace-over-inductor", "patch-before") == (SILENT, ("wrong numbers",))


@pytest.mark.stress
def test_swapped_code_bakes_a_constant_where_torch_as_it_is_refuses():
    assert outcome("trace-over-inductor", "none") == (OK, ())
    assert outcome("trace-over-inductor", "code-swap") == (SILENT, ("wrong numbers",))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [n for n in SCENARIOS if not SCENARIOS[n].random])
def test_processes_are_clean_in_every_deterministic_scenario(scenario):
    assert outcome(scenario, "processes") == (OK, ())


@pytest.mark.stress
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scenario", [n for n in SCENARIOS if SCENARIOS[n].random])
def test_processes_are_clean_over_twenty_random_runs(scenario):
    cell = Cell(scenario, "processes", seconds=1.0)
    judged = [judge(run_cell(cell, context())) for _ in range(20)]
    assert [j for j in judged if j.outcome != OK] == []
    assert upper_bound(0, len(judged)) < 0.15
