"""FlexAttention and threads: its uncompiled form, the recompile limit, the making of masks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.overrides import TorchFunctionMode

from dflash_mp.diagnostics.scenario import (
    Scenario,
    call_warm_module,
    cast,
    small_input,
    small_network,
    stay_in_make_fx,
    warm_module,
)
from dflash_mp.diagnostics.stage import Stage


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
    stay_in_make_fx("tracing", "called")(stage)


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
        return make_boxed_func(module.forward)

    network = small_network().requires_grad_(True)
    compiled = torch.compile(network, backend=aot_autograd(fw_compiler=count))
    compiled(small_input()).sum().backward()
    if sum(tagged):
        stage.find(f"{sum(tagged)} nodes of the next training graph are tagged 'do not compile'")


ATTENTION = {
    "lost-update-flex": Scenario(
        "uncompiled FlexAttention overlaps a make_fx trace; then a warm compiled module is called",
        cast(tracer=stay_in_make_fx("tracing", "inside"), attention=_uncompiled_flex),
        ("tracing", "inside", "left"),
        prepare=warm_module,
        victim=call_warm_module,
        moment="inside",
    ),
    "past-recompile-limit": Scenario(
        "compiled FlexAttention past its recompile limit while another thread is inside make_fx",
        cast(tracer=_use_up_limit_then_trace, attention=_one_length_too_many),
        ("used up", "inside", "tracing", "called"),
        prepare=_shared_flex,
        warm_up=_warm_flex_limit,
        moment="inside",
    ),
    "stuck-annotation": Scenario(
        "two create_block_mask overlap; then a training graph is compiled",
        cast(first=_first_mask, second=_second_mask),
        ("first", "second", "first left"),
        victim=_compile_for_training,
        moment="second",
    ),
}
