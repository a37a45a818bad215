"""Many nodes: what the all-reduce, the slowest rank and the store leave of their speed."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

from dflash_mp.plan.predict import Costs, Prediction, predict
from dflash_mp.plan.settings import ScalingConfig


@dataclass(frozen=True)
class Scale:
    """A job of ``nodes`` nodes: tokens/s, and efficiency against as many single nodes."""

    nodes: int
    one_store: float
    """Tokens/s with one store for claims and credits of the whole job."""

    node_stores: float
    """Tokens/s with one store on each node."""

    efficiency_one_store: float
    efficiency_node_stores: float


def expected_maximum(count: int) -> float:
    """Mean of the largest of ``count`` standard normal values (Blom 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def node_counts(nodes: int) -> list[int]:
    """Powers of two below ``nodes``, and ``nodes``."""
    counts = [1]
    while counts[-1] * 2 < nodes:
        counts.append(counts[-1] * 2)
    return sorted({*counts, nodes})


def simulate(costs: Costs, split: Prediction, nodes: int, scaling: ScalingConfig) -> list[Scale]:
    """Rates of ``split`` on 1 to ``nodes`` nodes; the work of a step grows with the nodes.

    A step takes as long as its slowest drafter. Targets do not wait for each other: the ring
    evens out what one of them is late. ``costs`` are those of a job of ``nodes`` nodes.
    """
    scales: list[Scale] = []
    limit = scaling.store_frames_per_s * costs.tokens
    for count in node_counts(nodes):
        slowdown = 1 + scaling.step_spread * expected_maximum(count * split.drafters)
        some = replace(costs, per_step=math.ceil(costs.per_step * count / nodes))
        rate = predict(some, split.targets, split.drafters, count, slowdown).rate
        shared, own = min(rate, limit), min(rate, count * limit)
        alone = scales[0].node_stores if scales else own
        scales.append(Scale(count, shared, own, shared / count / alone, own / count / alone))
    return scales


def plot(scales: list[Scale], path: Path) -> None:
    """Efficiency against nodes as a PNG."""
    # Slow to import, and only wanted at the end.
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    nodes = [scale.nodes for scale in scales]
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(nodes, [s.efficiency_node_stores for s in scales], "o-", label="a store on each node")
    axes.plot(nodes, [s.efficiency_one_store for s in scales], "s--", label="one store")
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [str(count) for count in nodes])
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("nodes")
    axes.set_ylabel("efficiency")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
