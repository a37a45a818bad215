"""How to share a node's ranks between the roles: pure functions of rates."""

from dataclasses import dataclass

LEAST_BUSY = 0.01
"""A role that seems to wait all the time has an unknown rate; so much of its time it is busy."""

LEAST_GAIN = 0.02
"""What a split must gain to be worth a word."""


@dataclass(frozen=True)
class Split:
    """A node's ranks by role, and the tokens per second that this gives."""

    targets: int
    drafters: int
    rate: float


def split_rate(targets: int, drafters: int, target_rate: float, drafter_rate: float) -> float:
    """Tokens per second of a node: that of the slower side, as the wire lets neither run ahead."""
    return min(targets * target_rate, drafters * drafter_rate)


def best_split(target_rate: float, drafter_rate: float, ranks: int) -> Split:
    """The fastest way to share ``ranks`` ranks; of equals the one with more drafters.

    Args:
        target_rate: tokens per second of one target that never waits.
        drafter_rate: of one drafter.
        ranks: of a node, at least 2.
    """
    splits = [
        Split(
            ranks - drafters,
            drafters,
            split_rate(ranks - drafters, drafters, target_rate, drafter_rate),
        )
        for drafters in range(1, ranks)
    ]
    return max(splits, key=lambda split: (split.rate, split.drafters))


def advice(
    rate: float, targets: int, drafters: int, target_wait: float, drafter_wait: float
) -> str:
    """What a node's split has reached, which one would be best, and its gain; one line.

    Args:
        rate: tokens per second of the node.
        targets: of the node.
        drafters: of the node.
        target_wait: share of their time that its targets wait for drafters.
        drafter_wait: share of their time that its drafters wait for targets.
    """
    target_rate = rate / targets / max(1 - target_wait, LEAST_BUSY)
    drafter_rate = rate / drafters / max(1 - drafter_wait, LEAST_BUSY)
    best = best_split(target_rate, drafter_rate, targets + drafters)
    now = split_rate(targets, drafters, target_rate, drafter_rate)
    measured = (
        f"{targets} targets + {drafters} drafters: a target makes {target_rate:,.0f} tokens/s, a "
        f"drafter takes {drafter_rate:,.0f}"
    )
    if best.rate < now * (1 + LEAST_GAIN):
        return f"{measured}; no other split of this node is faster"
    return (
        f"{measured}; topology.targets={best.targets} topology.drafters={best.drafters} would be "
        f"{best.rate / now - 1:.0%} faster"
    )
