"""The harness detects what is bad, and says no more than the runs allow."""

import os
import time

import pytest
import torch

from dflash_mp.diagnostics import stochastic
from dflash_mp.diagnostics.plans import TREATMENTS
from dflash_mp.diagnostics.probe import Cell, Probe, _collect, start_context
from dflash_mp.diagnostics.stage import Report, Stage, StageSettings, event_names
from dflash_mp.diagnostics.stochastic import STOCHASTIC
from dflash_mp.diagnostics.treatments import dynamo_config
from dflash_mp.diagnostics.verdict import (
    INCONCLUSIVE,
    LOUD,
    OK,
    SILENT,
    Tally,
    compare,
    compare_all,
    judge,
    overall,
    read_results,
    tally,
    upper_bound,
    write_results,
)


def stage(threads: int = 1, patience: float = 30.0) -> Stage:
    import threading

    events = {n: threading.Event() for n in event_names(("a", "b"), threads)}
    deadline = time.monotonic() + patience
    return Stage(TREATMENTS["none"], StageSettings(events, threads, 0.1, deadline))


def judged(actor, *, reached: bool = True, left: tuple[str, ...] = (), patience: float = 30.0):
    on = stage(patience=patience)
    report = Report([on.act("actor", actor)], list(left), reached, False, [])
    return judge(Probe(Cell("s", "none"), [report.as_dict()]))


def test_a_clean_actor_is_ok():
    def clean(on: Stage) -> None:
        compiled = torch.compile(lambda x: x * 2, backend=on.backend())
        on.expect("it is", on.call(compiled, torch.ones(2)), torch.full((2,), 2.0))

    assert judged(clean).outcome == OK


def test_an_exception_is_loud():
    def failing(on: Stage) -> None:
        raise ValueError("no")

    found = judged(failing)
    assert (found.outcome, found.labels) == (LOUD, ("ValueError",))


def test_a_treatment_that_refuses_is_inconclusive():
    def refused(on: Stage) -> None:
        with dynamo_config("no_such_key", True):
            pass

    found = judged(refused)
    assert found.outcome == INCONCLUSIVE
    assert "no_such_key" in found.why[0]


def test_a_call_that_ran_uncompiled_is_silent():
    def falls_back(on: Stage) -> None:
        compiled = torch.compile(lambda x: x * 2, backend=on.backend())
        with torch.compiler.set_stance("force_eager"):
            on.call(compiled, torch.ones(2))

    found = judged(falls_back)
    assert (found.outcome, found.labels) == (SILENT, ("uncompiled",))
    assert found.why == ("1 of 1 calls ran uncompiled",)


def test_a_backward_does_not_make_up_for_an_uncompiled_call():
    def falls_back(on: Stage) -> None:
        compiled = torch.compile(lambda x: (x * x).sum(), backend=on.backend())
        on.call(compiled, torch.ones(2, requires_grad=True)).backward()
        with torch.compiler.set_stance("force_eager"):
            on.call(compiled, torch.ones(2, requires_grad=True)).backward()

    assert judged(falls_back).outcome == SILENT


def test_wrong_numbers_are_silent():
    found = judged(lambda on: on.expect("it is", torch.ones(2), torch.zeros(2)))
    assert (found.outcome, found.labels) == (SILENT, ("wrong numbers",))


def with_other_weights(expected):
    return [expected[0] + 0.01, *expected[1:]]


def with_another_count(mask):
    mask.kv_num_blocks = mask.kv_num_blocks + 1
    return mask


def with_other_indices(mask):
    mask.kv_indices = mask.kv_indices.flip(-1)
    return mask


@pytest.mark.parametrize(
    ("scenario", "spoil"),
    [
        ("adamw-threads", with_other_weights),
        ("mask-threads", with_another_count),
        ("mask-threads", with_other_indices),
        ("fullgraph-threads", lambda compiled: lambda x: compiled(x) + 1),
    ],
)
def test_wrong_numbers_in_a_random_scenario_are_silent(scenario, spoil):
    """One drafter alone: right as it is, found wrong when what it shares is spoiled."""

    def drafter(on: Stage, change=lambda shared: shared) -> None:
        on.shared = change(STOCHASTIC[scenario].prepare(on))
        STOCHASTIC[scenario].actors(2)["drafter 1"](on)

    assert judged(drafter).outcome == OK
    found = judged(lambda on: drafter(on, spoil))
    assert (found.outcome, found.labels) == (SILENT, ("wrong numbers",))


def test_wrong_numbers_of_the_compiling_thread_are_silent(monkeypatch):
    compiler = STOCHASTIC["adamw-threads"].actors(2)["drafter 0"]
    assert judged(compiler).outcome == OK
    monkeypatch.setattr(stochastic, "_fresh", lambda x: x * 2)
    found = judged(compiler)
    assert (found.outcome, found.labels) == (SILENT, ("wrong numbers",))


def test_state_left_behind_is_silent():
    found = judged(lambda on: None, left=("the FX tracing flag is stuck on",))
    assert (found.outcome, found.labels) == (SILENT, ("flag stuck",))


def test_a_moment_that_never_comes_is_inconclusive():
    assert judged(lambda on: None, reached=False).outcome == INCONCLUSIVE


def test_an_event_that_never_comes_is_inconclusive():
    found = judged(lambda on: on.wait("a"), patience=0.05)
    assert (found.outcome, found.why) == (INCONCLUSIVE, ("actor: waited for 'a' in vain",))


def test_a_process_that_dies_or_hangs_is_inconclusive():
    context = start_context()
    probe = Probe(Cell("s", "none", timeout=0.1))
    waiting = {}
    keep_open = []
    for name, target, args in (("dead", os.abort, ()), ("stuck", time.sleep, (600,))):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=target, args=args)
        process.start()
        waiting[receiver] = process, name
        if name == "dead":
            sender.close()
        else:
            keep_open.append(sender)
    stuck = process
    # As if the wait had begun long ago: only what is there already counts, after a grace.
    _collect(probe, waiting, begin=time.monotonic() - 12)
    assert sorted(probe.lost)[0].startswith("dead died with exit code")
    assert sorted(probe.lost)[1].startswith("stuck did not report")
    stuck.join(10)
    assert not stuck.is_alive()
    assert judge(probe).outcome == INCONCLUSIVE


@pytest.mark.parametrize(("runs", "bound"), [(1, 0.95), (3, 0.632), (20, 0.139), (100, 0.0295)])
def test_bound_of_no_failures_follows_the_binomial(runs, bound):
    assert upper_bound(0, runs) == pytest.approx(bound, abs=1e-3)
    assert upper_bound(0, runs) == pytest.approx(1 - 0.05 ** (1 / runs), abs=1e-9)


def test_bound_with_failures():
    # Tables of the one-sided 95 % limit: 1 of 10 and 5 of 10.
    assert upper_bound(1, 10) == pytest.approx(0.3942, abs=1e-4)
    assert upper_bound(5, 10) == pytest.approx(0.7776, abs=1e-4)
    assert upper_bound(10, 10) == 1.0


def cell(random: bool = False, **outcomes: int) -> Tally:
    return Tally("s", "none", random, outcomes)


def test_a_random_zero_is_printed_with_its_bound():
    assert cell(random=True, ok=20).in_short() == "0/20 (<14 %)"
    assert cell(random=False, ok=3).in_short() == "0/3"
    assert cell(random=True, ok=1, loud=2).in_short() == "2/3"
    assert cell(inconclusive=2).in_short() == "?"


@pytest.mark.parametrize(
    ("now", "before", "relation"),
    [
        (cell(ok=1), cell(ok=3), "as expected"),
        (cell(loud=1), cell(ok=3), "worse"),
        (cell(silent=1), cell(loud=3), "worse"),
        (cell(ok=1), cell(loud=3), "better"),
        (cell(inconclusive=1), cell(ok=3), INCONCLUSIVE),
        (cell(random=True, loud=1), cell(random=True, ok=20), "worse"),
        (cell(random=True, ok=3), cell(random=True, ok=10, loud=10), "as expected"),
        (cell(random=True, ok=5), cell(random=True, ok=10, loud=10), "better"),
        (cell(random=True, ok=1, loud=4), cell(random=True, ok=10, loud=10), "as expected"),
    ],
)
def test_comparison_of_a_cell(now, before, relation):
    assert compare(now, before) == relation


def test_overall_names_the_worst():
    assert overall(None) == "unknown version"
    assert overall({"as expected": ["x"], "new": ["y"]}) == "as expected"
    assert overall({"better": ["x"], "worse": ["y"]}) == "worse"
    assert compare_all([cell(ok=1)], []) == {"new": ["s under none"]}


def test_results_survive_the_file(tmp_path):
    probe = Probe(Cell("s", "none"), lost=["it died"])
    counted = tally([probe, probe], random=True)
    write_results(tmp_path / "r.json", {"torch": "1.0"}, [counted])
    assert read_results(tmp_path / "r.json") == ({"torch": "1.0"}, [counted])
    assert counted.outcomes == {INCONCLUSIVE: 2}
