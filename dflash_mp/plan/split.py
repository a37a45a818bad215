"""How to share a node's ranks between the roles: pure functions of rates."""

from dataclasses import dataclass


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
