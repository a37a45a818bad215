"""One thread is held while it traces; another does what a drafter does."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_mp.diagnostics.scenario import (
    Actor,
    Scenario,
    WarmModule,
    call_warm_module,
    cast,
    small_input,
    small_network,
    stay_in_make_fx,
    warm_module,
)
from dflash_mp.diagnostics.stage import Stage, in_current_tracer


def _caller(stage: Stage) -> None:
    stage.wait("tracing")
    call_warm_module(stage)


class _Pausing(nn.Module):
    """Calls ``pause`` in the middle of its forward, for whoever traces it."""

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__()
        self.pause = pause

    def forward(self, x: Tensor) -> Tensor:
        self.pause()
        return x + 1


def _stay_in_symbolic_trace(fire: str, until: str, after: str = "") -> Actor:
    def actor(stage: Stage) -> None:
        if after:
            stage.wait(after)
        with stage.section("symbolic_trace"):
            torch.fx.symbolic_trace(_Pausing(lambda: stage.meet(fire, until)))

    return actor


# Compiling in one thread, calling in the other: what happens in a trainer.


@torch.library.custom_op("dflash_race::watched", mutates_args=())
def _watched(x: Tensor) -> Tensor:
    """Stand for any operator: what matters is that its shape rule runs while torch traces."""
    return x.clone()


# What the shape rule does besides; set by the thread that is going to compile.
_on_shape_rule: list[Callable[[], None]] = []


@_watched.register_fake
def _(x: Tensor) -> Tensor:
    if _on_shape_rule and in_current_tracer():
        _on_shape_rule.pop()()
    return torch.empty_like(x)


@dataclass
class _WarmAndCold(WarmModule):
    cold: Any


def _warm_module_and_cold_function(stage: Stage) -> _WarmAndCold:
    warm = warm_module(stage)

    def cold(x: Tensor) -> Tensor:
        return _watched(x) * 2

    compiled = torch.compile(cold, backend=stage.backend())
    return _WarmAndCold(warm.module, warm.inputs, warm.expected, compiled)


def _compile_cold(stage: Stage) -> None:
    _on_shape_rule.append(lambda: stage.meet("tracing", "called"))
    stage.expect("the output is", stage.call(stage.shared.cold, small_input()), small_input() * 2)


def _warm_cold(stage: Stage, partial: bool) -> None:
    if not partial:
        stage.call(stage.shared.cold, small_input())


def _call_eager_module(stage: Stage) -> None:
    network = small_network()
    stage.expect("an eager module is", network(small_input()), network.forward(small_input()))


TRACES = {
    "call-in-compile": Scenario(
        "call a warm compiled module while another thread's compile traces",
        cast(compiler=_compile_cold, caller=_caller),
        ("tracing", "called"),
        prepare=_warm_module_and_cold_function,
        warm_up=_warm_cold,
        victim=call_warm_module,
        moment="tracing",
    ),
    "call-in-make-fx": Scenario(
        "call a warm compiled module while another thread is inside make_fx",
        cast(tracer=stay_in_make_fx("tracing", "called"), caller=_caller),
        ("tracing", "called"),
        prepare=warm_module,
        victim=call_warm_module,
        moment="tracing",
    ),
    "call-in-symbolic-trace": Scenario(
        "call a warm compiled module while another thread is inside fx.symbolic_trace",
        cast(tracer=_stay_in_symbolic_trace("tracing", "called"), caller=_caller),
        ("tracing", "called"),
        prepare=warm_module,
        victim=call_warm_module,
        moment="tracing",
    ),
    # "first left" comes when the first actor ends: the traces end in the order they began.
    "lost-update": Scenario(
        "two make_fx traces overlap; then a warm compiled module is called",
        cast(
            first=stay_in_make_fx("first", "second"),
            second=stay_in_make_fx("second", "first left", after="first"),
        ),
        ("first", "second", "first left"),
        prepare=warm_module,
        victim=call_warm_module,
        moment="second",
    ),
    "leaked-hooks": Scenario(
        "two fx.symbolic_trace overlap; then an eager module is called",
        cast(
            first=_stay_in_symbolic_trace("first", "second"),
            second=_stay_in_symbolic_trace("second", "first left", after="first"),
        ),
        ("first", "second", "first left"),
        victim=_call_eager_module,
        moment="second",
    ),
}
