"""Each treatment does what it says, once, and leaves torch as it found it."""

import threading
from contextlib import ExitStack

import pytest
import torch
import torch._dynamo.config
import torch._higher_order_ops.utils
import torch.fx._symbolic_trace as fx

from dflash_mp.diagnostics import backport, treatments
from dflash_mp.diagnostics.mechanism import features
from dflash_mp.diagnostics.plans import TREATMENTS
from dflash_mp.diagnostics.treatments import TreatmentRefused
from dflash_mp.diagnostics.untouched import patched_torch_names

CHANGES_TORCH = {
    "module_shim": (treatments.module_shim, "is_fx_symbolic_tracing"),
    "replaced_function": (treatments.replaced_function, "is_fx_symbolic_tracing"),
    "swapped_code": (treatments.swapped_code, "is_fx_symbolic_tracing"),
    "thread_local_flag": (backport.thread_local_flag, "is_fx_tracing_warning"),
    "thread_local_hooks": (backport.thread_local_hooks, "_maybe_revert_all_patches"),
}


def snapshot() -> dict[str, object]:
    """Every attribute by identity, and the code of every function, where treatments act."""
    owners = {
        "fx": torch.fx._symbolic_trace,
        "Tracer": fx.Tracer,
        "_Patcher": fx._Patcher,
        "Module": torch.nn.Module,
        "utils": torch._higher_order_ops.utils,
        "torch.fx": torch.fx,
    }
    seen: dict[str, object] = {}
    for name, owner in owners.items():
        for key, value in vars(owner).items():
            seen[f"{name}.{key}"] = id(value), id(getattr(value, "__code__", None))
    for key in ("error_on_nested_fx_trace", "force_compile_during_fx_trace"):
        seen[key] = getattr(torch._dynamo.config, key)
    return seen


def changes_something(name: str) -> bool:
    return not (name == "thread_local_flag" and features().flag_per_thread)


@pytest.mark.parametrize("name", CHANGES_TORCH)
def test_a_treatment_restores_exactly_what_it_found(name):
    apply, _ = CHANGES_TORCH[name]
    before = snapshot()
    with apply() as said:
        assert said
        assert (snapshot() != before) == changes_something(name)
        assert bool(patched_torch_names()) == changes_something(name)
    assert snapshot() == before
    assert patched_torch_names() == []


@pytest.mark.parametrize("name", CHANGES_TORCH)
def test_a_treatment_restores_after_an_exception(name):
    apply, _ = CHANGES_TORCH[name]
    before = snapshot()
    with pytest.raises(KeyError), apply():
        raise KeyError
    assert snapshot() == before
    with apply():
        pass


@pytest.mark.parametrize("name", CHANGES_TORCH)
def test_a_treatment_is_not_applied_twice(name):
    apply, _ = CHANGES_TORCH[name]
    before = snapshot()
    with apply(), pytest.raises(TreatmentRefused), apply():
        pass
    assert snapshot() == before


@pytest.mark.parametrize("name", [n for n in CHANGES_TORCH if changes_something(n)])
def test_a_treatment_refuses_a_torch_it_does_not_know(name, monkeypatch):
    apply, needed = CHANGES_TORCH[name]
    monkeypatch.delattr(fx, needed)
    before = snapshot()
    with pytest.raises(TreatmentRefused, match=f"has no .*{needed}"), apply():
        pass
    assert snapshot() == before


@pytest.mark.parametrize("name", TREATMENTS)
def test_every_planned_treatment_can_be_left_without_a_trace(name):
    treatment = TREATMENTS[name]
    before = snapshot()
    with ExitStack() as stack:
        for enter in (treatment.before_compile, treatment.after_compile, treatment.in_worker):
            stack.enter_context(enter())
        with treatment.make_section()("signature", lambda: None):
            pass
    assert snapshot() == before


def test_backport_makes_the_flag_thread_local():
    seen: list[bool] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: seen.append(fx.is_fx_symbolic_tracing()))
        thread.start()
        thread.join()
        seen.append(fx.is_fx_symbolic_tracing())
        return x + 1

    with backport.thread_local_flag():
        torch.fx.symbolic_trace(traced)
        assert not fx.is_fx_symbolic_tracing()
    assert seen == [False, True]


def test_backport_clears_the_flag_in_the_environment_of_operators():
    seen: list[bool] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        with torch._higher_order_ops.utils._set_compilation_env():
            seen.append(fx.is_fx_symbolic_tracing())
        seen.append(fx.is_fx_symbolic_tracing())
        return x + 1

    with backport.thread_local_flag():
        torch.fx.symbolic_trace(traced)
    assert seen == [False, True]


def test_backport_refuses_to_start_inside_a_trace():
    def traced(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(TreatmentRefused), backport.thread_local_flag_and_hooks():
            pass
        return x + 1

    torch.fx.symbolic_trace(traced)
    assert patched_torch_names() == []


def test_own_hooks_give_the_same_graph_as_torch():
    class Nested(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)
            self.scale = torch.nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale

    expected = torch.fx.symbolic_trace(Nested()).code
    with backport.thread_local_hooks():
        assert torch.fx.symbolic_trace(Nested()).code == expected
        assert torch.nn.Module.__call__ is fx._orig_module_call


def test_dynamo_config_refuses_an_unknown_key():
    with pytest.raises(TreatmentRefused), treatments.dynamo_config("no_such_key", True):
        pass


def test_dynamo_config_of_several_threads_is_restored_in_any_order():
    config, name = torch._dynamo.config, "error_on_nested_fx_trace"
    entered, leave_first = threading.Barrier(3), threading.Event()
    inside: list[bool] = []

    def first() -> None:
        with treatments.dynamo_config(name, False):
            entered.wait(10)
            inside.append(getattr(config, name))

    def second() -> None:
        with treatments.dynamo_config(name, False):
            entered.wait(10)
            leave_first.wait(10)
            inside.append(getattr(config, name))

    threads = [threading.Thread(target=f) for f in (first, second)]
    for thread in threads:
        thread.start()
    entered.wait(10)
    threads[0].join(10)
    leave_first.set()
    threads[1].join(10)
    assert inside == [False, False]
    assert getattr(config, name) is True


def overlap(section: treatments.Section, first: str, second: str) -> bool:
    """Whether a section with the second signature gets in while one with the first is held."""
    waited = threading.Event()
    got_in = threading.Event()

    def other() -> None:
        with section(second, waited.set):
            got_in.set()

    with section(first, lambda: None):
        thread = threading.Thread(target=other)
        thread.start()
        while not (waited.is_set() or got_in.is_set()):
            thread.join(0.01)
        overlapped = got_in.is_set()
    thread.join(10)
    assert got_in.is_set()
    return overlapped


def test_lock_lets_one_section_in_and_nests_in_its_thread():
    section = treatments.execution_lock()
    assert not overlap(section, "a", "a")
    with section("a", pytest.fail), section("b", pytest.fail):
        pass


def test_gate_shares_seen_signatures_and_isolates_new_ones():
    section = treatments.first_call_gate()
    assert not overlap(section, "a", "b")
    # Both have been called by now.
    assert overlap(section, "a", "b")
    assert not overlap(section, "a", "c")
    with section("a", pytest.fail), section("new", pytest.fail):
        pass


def test_gate_does_not_take_a_failed_call_as_seen():
    section = treatments.first_call_gate()
    with pytest.raises(KeyError), section("a", lambda: None):
        raise KeyError
    assert not overlap(section, "a", "a")


def test_leaked_state_is_named(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "__call__", torch.nn.Module._call_impl)
    assert patched_torch_names() == ["torch.nn.modules.module.Module.__call__"]
    monkeypatch.undo()
    with treatments.dynamo_config("force_compile_during_fx_trace", True):
        assert patched_torch_names() == ["torch._dynamo.config.force_compile_during_fx_trace"]
