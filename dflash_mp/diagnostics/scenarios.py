"""The race made deterministic: each scenario holds one thread at the moment that hurts another.

Every function here that takes a ``Stage`` is an actor, or prepares what the actors share. The
same actors run as threads of one process or as one process each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.overrides import TorchFunctionMode

from dflash_mp.diagnostics.stage import FX_ERROR, Stage, in_current_tracer

Actor = Callable[[Stage], None]


@dataclass(frozen=True)
class Scenario:
    """One way in which threads and compiled functions meet."""

    about: str
    # The actors by name, given the number of threads (only random scenarios look at it).
    actors: Callable[[int], dict[str, Actor]]
    events: tuple[str, ...] = ()
    # Runs in the main thread of each process, inside the treatment; returns what actors share.
    prepare: Callable[[Stage], Any] = lambda stage: None
    # Runs every signature once in the main thread; its flag says to leave one out.
    warm_up: Callable[[Stage, bool], None] = lambda stage, partial: None
    # Ordinary work in the main thread when the actors are gone.
    victim: Actor | None = None
    random: bool = False


def cast(**actors: Actor) -> Callable[[int], dict[str, Actor]]:
    """Name the actors of a scenario that has always the same ones."""
    return lambda threads: actors


def _input(rows: int = 2) -> Tensor:
    return torch.linspace(-1.0, 1.0, rows * 8).reshape(rows, 8)  # [rows, 8]


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).requires_grad_(False)


@dataclass
class _Compiled:
    """A compiled module which ran once, and its eager answer."""

    module: Any
    inputs: Tensor  # [2, 8]
    expected: Tensor  # [2, 8]


def _warm_module(stage: Stage) -> _Compiled:
    eager = _network()
    inputs = _input()
    expected = eager(inputs)
    module = torch.compile(eager, backend=stage.backend())
    stage.call(module, inputs)
    return _Compiled(module, inputs, expected)


def _call_warm_module(stage: Stage) -> None:
    shared: _Compiled = stage.shared
    result = stage.call(shared.module, shared.inputs)
    stage.expect("the output is", result, shared.expected)


def _caller(stage: Stage) -> None:
    stage.wait("tracing")
    _call_warm_module(stage)


class _Pausing(nn.Module):
    """Stays in the middle of its forward, for whoever traces it."""

    def __init__(self, stage: Stage, fire: str, wait: str) -> None:
        super().__init__()
        self.pause = lambda: stage.meet(fire, wait)

    def forward(self, x: Tensor) -> Tensor:
        self.pause()
        return x + 1


def _trace_with_make_fx(stage: Stage) -> None:
    def held(x: Tensor) -> Tensor:
        stage.meet("tracing", "called")
        return x + 1

    with stage.section("make_fx"):
        make_fx(held)(_input())


def _trace_symbolically(stage: Stage) -> None:
    with stage.section("symbolic_trace"):
        torch.fx.symbolic_trace(_Pausing(stage, "tracing", "called"))


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
class _WarmAndCold(_Compiled):
    cold: Any


def _warm_module_and_cold_function(stage: Stage) -> _WarmAndCold:
    warm = _warm_module(stage)

    def cold(x: Tensor) -> Tensor:
        return _watched(x) * 2

    compiled = torch.compile(cold, backend=stage.backend())
    return _WarmAndCold(warm.module, warm.inputs, warm.expected, compiled)


def _compile_cold(stage: Stage) -> None:
    _on_shape_rule.append(lambda: stage.meet("tracing", "called"))
    stage.expect("the output is", stage.call(stage.shared.cold, _input()), _input() * 2)


def _warm_cold(stage: Stage, partial: bool) -> None:
    if not partial:
        stage.call(stage.shared.cold, _input())


# Two traces that overlap and end in the order in which they began.


def _first_make_fx(stage: Stage) -> None:
    def held(x: Tensor) -> Tensor:
        stage.meet("first", "second")
        return x + 1

    with stage.section("make_fx"):
        make_fx(held)(_input())


def _second_make_fx(stage: Stage) -> None:
    def held(x: Tensor) -> Tensor:
        stage.meet("second", "first left")
        return x + 1

    stage.wait("first")
    with stage.section("make_fx"):
        make_fx(held)(_input())


def _first_symbolic(stage: Stage) -> None:
    with stage.section("symbolic_trace"):
        torch.fx.symbolic_trace(_Pausing(stage, "first", "second"))


def _second_symbolic(stage: Stage) -> None:
    stage.wait("first")
    with stage.section("symbolic_trace"):
        torch.fx.symbolic_trace(_Pausing(stage, "second", "first left"))


def _call_eager_module(stage: Stage) -> None:
    network = _network()
    stage.expect("an eager module is", network(_input()), network.forward(_input()))


# FlexAttention: the environment of its uncompiled form, and the recompile limit.


class _PausingMask(BlockMask):
    """A block mask that pauses where flex_attention unpacks it, inside its environment."""

    pause: Callable[[], None]

    def as_tuple(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.pause()
        return super().as_tuple(*args, **kwargs)


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def flex_inputs(length: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value."""
    generator = torch.Generator().manual_seed(length)
    qkv = torch.randn(3, 1, 2, length, 16, generator=generator).to(device)
    q, k, v = qkv  # [1, 2, length, 16] each
    return q, k, v


def block_mask(length: int, device: str = "cpu") -> BlockMask:
    """Return a causal mask in blocks of 16."""
    return create_block_mask(_causal, 1, 1, length, length, device=device, BLOCK_SIZE=16)


def flex_expected(length: int, device: str = "cpu") -> Tensor:
    """Return what causal attention is on ``flex_inputs(length)``."""
    inputs = flex_inputs(length, device)
    return nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)


def _pausing_mask(length: int, pause: Callable[[], None]) -> _PausingMask:
    mask = block_mask(length)
    mask.__class__ = _PausingMask
    assert isinstance(mask, _PausingMask)
    mask.pause = pause
    return mask


def _trace_around_environment(stage: Stage) -> None:
    def held(x: Tensor) -> Tensor:
        stage.fire("tracing")
        stage.wait("inside")
        return x + 1

    with stage.section("make_fx"):
        make_fx(held)(_input())


def _uncompiled_flex(stage: Stage) -> None:
    mask = _pausing_mask(16, lambda: stage.meet("inside", "left"))
    stage.wait("tracing")
    with stage.section("flex"):
        result = flex_attention(*flex_inputs(16), block_mask=mask)
    stage.expect("attention is", result, flex_expected(16))


def _shared_flex(stage: Stage) -> Any:
    return torch.compile(flex_attention, dynamic=False, backend=stage.backend())


def _call_flex(stage: Stage, length: int, mask: BlockMask) -> None:
    result = stage.call(stage.shared, *flex_inputs(length), block_mask=mask)
    stage.expect("attention is", result, flex_expected(length))


def _use_up_limit_then_trace(stage: Stage) -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        _call_flex(stage, 16, block_mask(16))
    stage.fire("used up")
    stage.wait("inside")
    _trace_with_make_fx(stage)


def _one_length_too_many(stage: Stage) -> None:
    def pause() -> None:
        stage.meet("inside", "tracing")

    mask = _pausing_mask(32, pause)
    stage.wait("used up")
    with torch._dynamo.config.patch(recompile_limit=1):
        _call_flex(stage, 32, mask)


def _warm_flex_limit(stage: Stage, partial: bool) -> None:
    _call_flex(stage, 16, block_mask(16))
    if not partial:
        _call_flex(stage, 32, _pausing_mask(32, lambda: None))


# What a compile does to threads that do not compile.


def _holding_backend(stage: Stage, fire: str, wait: str) -> Callable[..., Any]:
    def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        stage.meet(fire, wait)
        return module.forward

    return backend


def _compile_until(wait: str) -> Actor:
    def compile_(stage: Stage) -> None:
        with stage.section("compile"):
            backend = _holding_backend(stage, "compiling", wait)
            torch.compile(lambda x: x * 3, backend=backend)(_input())

    return compile_


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
    shared: _Compiled = stage.shared
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


def _compile_mid_step(stage: Stage) -> None:
    stage.wait("mid-step")
    _compile_until("stepped")(stage)


# Trace metadata.


class _PauseInSort(TorchFunctionMode):
    """Pauses this thread where create_block_mask sorts, under its annotation."""

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__()
        self._pauses = [pause]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.argsort and self._pauses:
            self._pauses.pop()()
        return func(*args, **(kwargs or {}))


def _first_mask(stage: Stage) -> None:
    with stage.section("mask"), _PauseInSort(lambda: stage.meet("first", "second")):
        block_mask(32)


def _second_mask(stage: Stage) -> None:
    stage.wait("first")
    with stage.section("mask"), _PauseInSort(lambda: stage.meet("second", "first left")):
        block_mask(32)


def _compile_for_training(stage: Stage) -> None:
    """Count the nodes of a new training graph that the backend is told not to compile."""
    tagged: list[int] = []

    def count(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        custom = [node.meta.get("custom", {}) for node in module.graph.nodes]
        tagged.append(sum(bool(c.get("fallback_to_eager")) for c in custom))
        return torch._functorch._aot_autograd.utils.make_boxed_func(module.forward)

    network = _network().requires_grad_(True)
    compiled = torch.compile(network, backend=aot_backend(count))
    compiled(_input()).sum().backward()
    if sum(tagged):
        stage.find(f"{sum(tagged)} nodes of the next training graph are tagged 'do not compile'")


def aot_backend(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backend that hands both graphs of a training step to ``compiler``."""
    return torch._dynamo.backends.common.aot_autograd(fw_compiler=compiler)


# What the check protects.


def _trace_over_inductor(stage: Stage) -> None:
    compiled = torch.compile(lambda x: x * 2)
    compiled(_input())
    stage.reached = True
    try:
        with stage.section("make_fx"):
            graph = make_fx(lambda x: compiled(x) + 1)(_input())
    except RuntimeError as error:
        if FX_ERROR not in str(error):
            raise
        return
    other = _input() + 5
    stage.expect("the traced graph is, on other numbers,", graph(other), other * 2 + 1)


SCENARIOS = {
    "call-in-compile": Scenario(
        "call a warm compiled module while another thread's compile traces",
        cast(compiler=_compile_cold, caller=_caller),
        ("tracing", "called"),
        prepare=_warm_module_and_cold_function,
        warm_up=_warm_cold,
        victim=_call_warm_module,
    ),
    "call-in-make-fx": Scenario(
        "call a warm compiled module while another thread is inside make_fx",
        cast(tracer=_trace_with_make_fx, caller=_caller),
        ("tracing", "called"),
        prepare=_warm_module,
        victim=_call_warm_module,
    ),
    "call-in-symbolic-trace": Scenario(
        "call a warm compiled module while another thread is inside fx.symbolic_trace",
        cast(tracer=_trace_symbolically, caller=_caller),
        ("tracing", "called"),
        prepare=_warm_module,
        victim=_call_warm_module,
    ),
    "lost-update": Scenario(
        "two make_fx traces overlap; then a warm compiled module is called",
        cast(first=_first_make_fx, second=_second_make_fx),
        ("first", "second", "first left"),
        prepare=_warm_module,
        victim=_call_warm_module,
    ),
    "lost-update-flex": Scenario(
        "uncompiled FlexAttention overlaps a make_fx trace; then a warm compiled module is called",
        cast(tracer=_trace_around_environment, attention=_uncompiled_flex),
        ("tracing", "inside", "left"),
        prepare=_warm_module,
        victim=_call_warm_module,
    ),
    "leaked-hooks": Scenario(
        "two fx.symbolic_trace overlap; then an eager module is called",
        cast(first=_first_symbolic, second=_second_symbolic),
        ("first", "second", "first left"),
        victim=_call_eager_module,
    ),
    "past-recompile-limit": Scenario(
        "compiled FlexAttention past its recompile limit while another thread is inside make_fx",
        cast(tracer=_use_up_limit_then_trace, attention=_one_length_too_many),
        ("used up", "inside", "tracing", "called"),
        prepare=_shared_flex,
        warm_up=_warm_flex_limit,
    ),
    "rewound-draws": Scenario(
        "draw random numbers while another thread compiles",
        cast(compiler=_compile_until("drew"), drawer=_draw),
        ("compiling", "drew", "compiled"),
    ),
    "branch-on-compiling": Scenario(
        "library code asks is_compiling() while another thread compiles",
        cast(compiler=_compile_until("called"), caller=_call_like_a_library),
        ("compiling", "called"),
        prepare=_warm_module,
    ),
    "optimizer-in-compile": Scenario(
        "another thread starts to compile in the middle of an eager AdamW step",
        cast(stepper=_step_optimizer, compiler=_compile_mid_step),
        ("mid-step", "compiling", "stepped"),
    ),
    "stuck-annotation": Scenario(
        "two create_block_mask overlap; then a training graph is compiled",
        cast(first=_first_mask, second=_second_mask),
        ("first", "second", "first left"),
        victim=_compile_for_training,
    ),
    "trace-over-inductor": Scenario(
        "one thread: make_fx over an inductor-compiled function, which must refuse or be right",
        cast(tracer=_trace_over_inductor),
    ),
}
