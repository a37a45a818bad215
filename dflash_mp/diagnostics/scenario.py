"""What a scenario is, and the pieces that several of them share.

Every function that takes a ``Stage`` is an actor, or prepares what the actors share. The same
actors run as threads of one process or as one process each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from dflash_mp.diagnostics.stage import Stage

Actor = Callable[[Stage], None]


def small_input() -> Tensor:
    """Return [2, 8]."""
    return torch.linspace(-1.0, 1.0, 16).reshape(2, 8)


def small_network() -> nn.Module:
    """Map [2, 8] to [2, 8]; without gradients."""
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).requires_grad_(False)


@dataclass
class WarmModule:
    """A compiled module which ran once, and its eager answer."""

    module: Any
    inputs: Tensor  # [2, 8]
    expected: Tensor  # [2, 8]


def warm_module(stage: Stage) -> WarmModule:
    """Compile a module and call it once."""
    eager = small_network()
    inputs = small_input()
    expected = eager(inputs)
    module = torch.compile(eager, backend=stage.backend())
    stage.call(module, inputs)
    return WarmModule(module, inputs, expected)


def call_warm_module(stage: Stage) -> None:
    """Call the shared module again: nothing is left to compile."""
    shared: WarmModule = stage.shared
    result = stage.call(shared.module, shared.inputs)
    stage.expect("the output is", result, shared.expected)


def compile_and_call(stage: Stage) -> None:
    """Compile another module, and call it and its eager form."""
    fresh = warm_module(stage)
    stage.expect("the output is", stage.call(fresh.module, fresh.inputs), fresh.expected)


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
    victim: Actor = compile_and_call
    # The event at which the harm can happen; when it never comes, the cell is inconclusive.
    moment: str = "end"
    random: bool = False


def cast(**actors: Actor) -> Callable[[int], dict[str, Actor]]:
    """Name the actors of a scenario that has always the same ones."""
    return lambda threads: actors


def stay_in_make_fx(fire: str, until: str, after: str = "") -> Actor:
    """Return an actor that stays inside make_fx from ``fire`` until ``until``."""

    def actor(stage: Stage) -> None:
        def held(x: Tensor) -> Tensor:
            stage.meet(fire, until)
            return x + 1

        if after:
            stage.wait(after)
        with stage.section("make_fx"):
            make_fx(held)(small_input())

    return actor
