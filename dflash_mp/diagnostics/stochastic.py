"""The race as it comes by itself: every actor does what a drafter thread does, many times."""

import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash_mp.diagnostics.attention import block_mask, flex_expected, flex_inputs
from dflash_mp.diagnostics.scenario import Actor, Scenario
from dflash_mp.diagnostics.stage import DeadlinePassed, Stage

# Signatures per thread. With three threads one function stays below the recompile limit of 8.
LENGTHS = 2
# Optimizer steps after which a drafter begins anew, so that each can be compared.
STEPS = 20


def workers(work: Callable[[Stage, int], None]) -> Callable[[int], dict[str, Actor]]:
    """Name one actor per thread, each doing ``work`` with its number."""

    def actor(index: int) -> Actor:
        return lambda stage: work(stage, index)

    return lambda threads: {f"drafter {i}": actor(i) for i in range(threads)}


def compiler_and_workers(work: Callable[[Stage, int], None]) -> Callable[[int], dict[str, Actor]]:
    """Like ``workers``, with the first thread compiling new functions all the time."""
    rest = workers(work)
    return lambda threads: {**rest(threads), "drafter 0": _keep_compiling}


def _fresh(x: Tensor) -> Tensor:
    return (x * 2).relu() + 1


def _keep_compiling(stage: Stage) -> None:
    for _ in _for_a_while(stage):
        # A new code object each time: torch keeps what it compiled with the code object.
        function = types.FunctionType(_fresh.__code__.replace(), globals())
        with stage.section("compile", id(function)):
            compiled = torch.compile(function, backend=stage.backend())
            result = stage.call(compiled, torch.ones(4))
        stage.expect("the output is", result, torch.full((4,), 3.0))


def _for_a_while(stage: Stage) -> Iterator[None]:
    """Yield for ``stage.seconds`` of this process's CPU time, however busy the machine is."""
    end = time.process_time() + stage.seconds
    while time.process_time() < end and not stage.fired("stop"):
        if time.monotonic() > stage.deadline:
            raise DeadlinePassed("there was too little CPU time")
        yield
    stage.met.add("end")


def _until_all_compiled(stage: Stage, index: int) -> Iterator[None]:
    """Yield rounds until every actor has finished its first one, and one round more."""
    everybody = [f"ready {i}" for i in range(stage.threads)]
    done = False
    while not done and not stage.fired("stop"):
        done = all(stage.fired(name) for name in everybody)
        if time.monotonic() > stage.deadline:
            raise DeadlinePassed("the other drafters did not come to the end of their first round")
        yield
        stage.fire(everybody[index])
    stage.met.add("end")


# Three threads share one compiled FlexAttention.


def lengths_of(index: int) -> list[int]:
    """Return the sequence lengths that drafter ``index`` alone uses."""
    return [16 * (1 + index * LENGTHS + i) for i in range(LENGTHS)]


def _shared_flex(stage: Stage) -> Any:
    lengths = [n for index in range(stage.threads) for n in lengths_of(index)]
    masks = {n: block_mask(n, stage.device) for n in lengths}
    return torch.compile(flex_attention, dynamic=False, backend=stage.backend()), masks


def _attend(stage: Stage, length: int) -> None:
    flex, masks = stage.shared
    q, k, v = flex_inputs(length, stage.device)
    # FlexAttention has no backward on CPU.
    q.requires_grad_(stage.device != "cpu")
    with stage.section("flex", length):
        result = stage.call(flex, q, k, v, block_mask=masks[length])
        if result.requires_grad:
            result.sum().backward()
    stage.expect("attention is", result.detach(), flex_expected(length, stage.device))
    if q.grad is not None:
        twin = flex_inputs(length, stage.device)[0].requires_grad_()
        nn.functional.scaled_dot_product_attention(twin, k, v, is_causal=True).sum().backward()
        assert twin.grad is not None
        stage.expect("the gradient is", q.grad, twin.grad)


def _flex_worker(stage: Stage, index: int) -> None:
    for _ in _until_all_compiled(stage, index):
        for length in lengths_of(index):
            _attend(stage, length)


def _warm_flex(stage: Stage, partial: bool) -> None:
    lengths = [n for index in range(stage.threads) for n in lengths_of(index)]
    for length in lengths[:-1] if partial else lengths:
        _attend(stage, length)


# Three replicas of a compiled block, forward and backward.


class Block(nn.Module):
    """A transformer block without normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        """Map [length, 32] to [length, 32]."""
        q, k, v = self.qkv(x).view(-1, 3, 2, 16).permute(1, 2, 0, 3)  # [2, length, 16] each
        attended = nn.functional.scaled_dot_product_attention(q, k, v)  # [2, length, 16]
        x = x + self.out(attended.transpose(0, 1).reshape(-1, 32))
        return x + self.mlp(x)


def _blocks(stage: Stage) -> Any:
    """One replica, its eager twin and its inputs for each drafter."""
    replicas = []
    for index in range(stage.threads):
        torch.manual_seed(index)
        block, twin = Block().to(stage.device), Block().to(stage.device)
        twin.load_state_dict(block.state_dict())
        inputs = [torch.randn(n, 32).to(stage.device) for n in lengths_of(index)]  # [length, 32]
        expected = []
        for x in inputs:
            twin.zero_grad()
            loss = twin(x).square().mean()
            loss.backward()
            expected.append((loss.detach(), _grad(twin).clone()))
        # The replicas' signatures add up, since torch keeps them with the one code object.
        compiled = torch.compile(block, dynamic=False, backend=stage.backend())
        replicas.append((block, compiled, inputs, expected))
    return replicas


def _grad(block: nn.Module) -> Tensor:
    weight = block.get_parameter("qkv.weight")
    assert weight.grad is not None
    return weight.grad


def _train_step(stage: Stage, index: int, which: int) -> None:
    block, compiled, inputs, expected = stage.shared[index]
    loss, grad = expected[which]
    block.zero_grad()
    with stage.section(index, which):
        out = stage.call(compiled, inputs[which]).square().mean()
        out.backward()
    stage.expect("the loss is", out.detach(), loss)
    stage.expect("the gradient is", _grad(block), grad)


def _block_worker(stage: Stage, index: int) -> None:
    for _ in _until_all_compiled(stage, index):
        for which in range(LENGTHS):
            _train_step(stage, index, which)


def _warm_blocks(stage: Stage, partial: bool) -> None:
    steps = [(index, which) for index in range(stage.threads) for which in range(LENGTHS)]
    for index, which in steps[:-1] if partial else steps:
        _train_step(stage, index, which)


# Eager work beside a compile, and warm calls beside each other.


def _fresh_adamw() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    weights = [nn.Parameter(torch.ones(4)) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.ones(4)
    return weights, torch.optim.AdamW(weights, foreach=True)


def _adamw_alone(stage: Stage) -> list[Tensor]:
    """Return the weights, [8, 4], after each of the first ``STEPS`` steps of one thread."""
    weights, optimizer = _fresh_adamw()
    expected = []
    for _ in range(STEPS):
        optimizer.step()
        expected.append(torch.stack([weight.detach() for weight in weights]))
    return expected


def _adamw_worker(stage: Stage, index: int) -> None:
    for count, _ in enumerate(_for_a_while(stage)):
        if count % STEPS == 0:
            weights, optimizer = _fresh_adamw()
        with stage.section("optimizer"):
            optimizer.step()
        stepped = torch.stack([weight.detach() for weight in weights])  # [8, 4]
        stage.expect("the stepped weights are", stepped, stage.shared[count % STEPS])


def _mask_alone(stage: Stage) -> BlockMask:
    return block_mask(32)


def _mask_worker(stage: Stage, index: int) -> None:
    masks = []
    for _ in _for_a_while(stage):
        with stage.section("mask"):
            masks.append(block_mask(32))
    # Compared afterwards: whatever comes between two makes it rarer that threads meet.
    for mask in masks:
        for name in ("kv_num_blocks", "kv_indices"):
            stage.expect(f"{name} is", getattr(mask, name), getattr(stage.shared, name))


def _warm_fullgraph(stage: Stage) -> Any:
    compiled = torch.compile(lambda x: x * 2 + 1, fullgraph=True, backend=stage.backend())
    stage.call(compiled, torch.ones(4))
    return compiled


def _fullgraph_worker(stage: Stage, index: int) -> None:
    # Compared afterwards: whatever comes between two makes it rarer that threads meet.
    results = [stage.call(stage.shared, torch.ones(4)) for _ in _for_a_while(stage)]
    for result in results:
        stage.expect("the output is", result, torch.full((4,), 3.0))


STOCHASTIC = {
    "flex-threads": Scenario(
        "drafters share one compiled FlexAttention, each with lengths of its own",
        workers(_flex_worker),
        prepare=_shared_flex,
        warm_up=_warm_flex,
        random=True,
    ),
    "block-threads": Scenario(
        "each drafter trains its own replica of a compiled block",
        workers(_block_worker),
        prepare=_blocks,
        warm_up=_warm_blocks,
        random=True,
    ),
    "adamw-threads": Scenario(
        "eager foreach AdamW steps beside a compiling thread",
        compiler_and_workers(_adamw_worker),
        prepare=_adamw_alone,
        random=True,
    ),
    "mask-threads": Scenario(
        "every drafter makes block masks; nobody compiles",
        workers(_mask_worker),
        prepare=_mask_alone,
        random=True,
    ),
    "fullgraph-threads": Scenario(
        "drafters call one warm fullgraph=True function; nobody compiles",
        workers(_fullgraph_worker),
        prepare=_warm_fullgraph,
        random=True,
    ),
}
