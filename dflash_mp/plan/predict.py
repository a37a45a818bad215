"""Tokens per second of a split, from the time that each side needs for a micro-batch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """What one micro-batch and one step cost on this machine; seconds and bytes."""

    tokens: int
    target_s: float
    """A target's forward."""

    drafter_s: float
    """A drafter's forward and backward."""

    hidden_s: float
    """Of those, what the exchange of gradients runs beside; 0 where they are all ready at once."""

    per_step_s: float
    """A drafter's clipping and optimizer."""

    gradient: float
    """Bytes of a drafter's gradients."""

    exchange: float
    """Bytes/s of gradients between two drafters of a node."""

    network: float
    """Bytes/s of one rank to other nodes."""

    latency_s: float
    """Of a message between nodes."""

    per_step: int
    """Micro-batches of a step over all drafters; a split of more drafters needs one for each."""


@dataclass(frozen=True)
class Prediction:
    """What a split does, over all its nodes."""

    targets: int
    drafters: int
    nodes: int
    rate: float
    """Tokens/s."""

    step_s: float
    """Seconds of a step that does not wait for targets."""

    step_tokens: int
    all_reduce_s: float
    exposed_s: float
    """Of it, what a step waits for."""

    target_busy: float
    drafter_busy: float


def all_reduce_seconds(costs: Costs, drafters: int, nodes: int) -> float:
    """Exchange of gradients: a ring inside each node, then each drafter's part between nodes.

    Both move ``2 (n - 1) / n`` of what they exchange (Patarasuk and Yuan 2009); between nodes a
    tree of ``log2(nodes)`` messages goes up and down.
    """
    inside = 2 * (drafters - 1) / drafters * costs.gradient / costs.exchange
    between = 2 * (nodes - 1) / nodes * costs.gradient / (drafters * costs.network)
    return inside + between + 2 * math.ceil(math.log2(nodes)) * costs.latency_s


def predict(
    costs: Costs, targets: int, drafters: int, nodes: int, slowdown: float = 1
) -> Prediction:
    """The rate of ``targets`` + ``drafters`` ranks on each of ``nodes`` nodes.

    Args:
        costs: of a micro-batch and a step.
        targets: of a node.
        drafters: of a node.
        nodes: all alike.
        slowdown: of a step, for it ends when the slowest drafter has ended.
    """
    everyone = drafters * nodes
    per_step = max(costs.per_step, everyone)
    shares = math.ceil(per_step / everyone)
    exchange = all_reduce_seconds(costs, drafters, nodes)
    exposed = max(0.0, exchange - costs.hidden_s)
    step = (shares * costs.drafter_s + costs.per_step_s) * slowdown + exposed
    tokens = per_step * costs.tokens
    from_targets = targets * nodes * costs.tokens / costs.target_s
    rate = min(from_targets, tokens / step)
    return Prediction(
        targets=targets,
        drafters=drafters,
        nodes=nodes,
        rate=rate,
        step_s=step,
        step_tokens=tokens,
        all_reduce_s=exchange,
        exposed_s=exposed,
        target_busy=rate / from_targets,
        drafter_busy=rate * step / tokens,
    )


def all_splits(costs: Costs, ranks: int, nodes: int) -> list[Prediction]:
    """Every way to share the ``ranks`` ranks of a node, most targets first."""
    return [predict(costs, ranks - drafters, drafters, nodes) for drafters in range(1, ranks)]


def fastest(predictions: list[Prediction]) -> Prediction:
    """The fastest; of equals the one with more drafters, which have memory to spare."""
    return max(predictions, key=lambda prediction: (prediction.rate, prediction.drafters))
