"""What a compile does to threads that do not compile, and what the check in question protects."""

from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from dflash_mp.diagnostics.scenario import (
    Actor,
    Scenario,
    WarmModule,
    cast,
    small_input,
    warm_module,
)
from dflash_mp.diagnostics.stage import FX_ERROR, Stage


def _stay_in_compile(until: str, after: str = "") -> Actor:
    def actor(stage: Stage) -> None:
        def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            stage.meet("compiling", until)
            return module.forward

        if after:
            stage.wait(after)
        with stage.section("compile"):
            torch.compile(lambda x: x * 3, backend=backend)(small_input())

    return actor


def _draw(stage: Stage) -> None:
    stage.wait("compiling")
    with stage.section("draw"):
        during = torch.rand(4)  # [4]
    stage.fire("drew")
    stage.wait("compiled")
    with stage.section("draw"):
        after = torch.rand(4)  # [4]
    if torch.equal(during, after):
        stage.find("numbers drawn during a compile were drawn again after it")


def _call_like_a_library(stage: Stage) -> None:
    """Choose as transformers' FlexAttention integration does."""
    shared: WarmModule = stage.shared
    stage.wait("compiling")
    with stage.section("library"):
        compiled = not torch.compiler.is_compiling()
        function = shared.module if compiled else shared.module._orig_mod
        stage.call(function, shared.inputs)


class _PausingStep(Tensor):
    """An optimizer's step counter that pauses when its number is asked for."""

    pause: Callable[[], None]

    def item(self) -> Any:
        self.pause()
        return super().item()


def _step_optimizer(stage: Stage) -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights, lr=0.1, weight_decay=0.0, foreach=True)
    for weight in weights:
        weight.grad = torch.ones(3)
    optimizer.step()
    paused: list[bool] = []

    def pause() -> None:
        if not paused:
            paused.append(True)
            stage.meet("mid-step", "compiling")

    # The last weight's counter is asked for last, after the others have answered.
    step = optimizer.state[weights[-1]]["step"].as_subclass(_PausingStep)
    step.pause = pause
    optimizer.state[weights[-1]]["step"] = step
    before = [weight.detach().clone() for weight in weights]
    try:
        with stage.section("optimizer"):
            optimizer.step()
    finally:
        counted = int(Tensor.item(step))
        if counted == 2 and all(torch.equal(w, b) for w, b in zip(weights, before, strict=True)):
            stage.find("the step was counted and the weights did not move")


# What the check protects.


def _trace_over_inductor(stage: Stage) -> None:
    # The kernel stays in inductor's cache; a precompiled header would be checked every time.
    with torch._inductor.config.patch(cpp_cache_precompile_headers=False):
        compiled = torch.compile(lambda x: x * 2)
        compiled(small_input())
    stage.met.add("end")
    try:
        with stage.section("make_fx"):
            graph = make_fx(lambda x: compiled(x) + 1)(small_input())
    except RuntimeError as error:
        if FX_ERROR not in str(error):
            raise
        return
    other = small_input() + 5
    stage.expect("the traced graph is, on other numbers,", graph(other), other * 2 + 1)


COMPILES = {
    "rewound-draws": Scenario(
        "draw random numbers while another thread compiles",
        cast(compiler=_stay_in_compile("drew"), drawer=_draw),
        ("compiling", "drew", "compiled"),
        moment="compiling",
    ),
    "branch-on-compiling": Scenario(
        "library code asks is_compiling() while another thread compiles",
        cast(compiler=_stay_in_compile("called"), caller=_call_like_a_library),
        ("compiling", "called"),
        prepare=warm_module,
        moment="compiling",
    ),
    "optimizer-in-compile": Scenario(
        "another thread starts to compile in the middle of an eager AdamW step",
        cast(stepper=_step_optimizer, compiler=_stay_in_compile("stepped", after="mid-step")),
        ("mid-step", "compiling", "stepped"),
        moment="compiling",
    ),
    "trace-over-inductor": Scenario(
        "one thread: make_fx over an inductor-compiled function, which must refuse or be right",
        cast(tracer=_trace_over_inductor),
    ),
}
