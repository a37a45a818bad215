"""Sharing ranks between the roles."""

import itertools

import pytest

from dflash_mp.plan.split import advice, best_split


@pytest.mark.parametrize(
    ("target", "drafter", "ranks", "expected"),
    [(3.0, 5.0, 8, (5, 3)), (1.0, 1.0, 2, (1, 1)), (1.0, 100.0, 8, (7, 1)), (9.0, 1.0, 10, (1, 9))],
)
def test_known_splits(target: float, drafter: float, ranks: int, expected: tuple[int, int]) -> None:
    best = best_split(target, drafter, ranks)
    assert (best.targets, best.drafters) == expected


def test_no_other_split_is_faster_and_all_ranks_are_used() -> None:
    for target, drafter, ranks in itertools.product((0.5, 1, 7), (0.3, 1, 4), range(2, 12)):
        best = best_split(target, drafter, ranks)
        assert best.targets + best.drafters == ranks
        others = [min(t * target, (ranks - t) * drafter) for t in range(1, ranks)]
        assert best.rate == max(others)


def test_advice_from_how_long_each_side_waits() -> None:
    # Four drafters that wait half of their time: two would do, and the others could be targets.
    line = advice(1000.0, targets=4, drafters=4, target_wait=0.0, drafter_wait=0.5)
    assert "a target makes 250 tokens/s, a drafter takes 500" in line
    assert line.endswith("topology.targets=5 topology.drafters=3 would be 25% faster")
    line = advice(600.0, targets=6, drafters=2, target_wait=0.5, drafter_wait=0.0)
    assert "a target makes 200 tokens/s, a drafter takes 300" in line
    assert "no other split" in advice(1500.0, 5, 3, target_wait=0.0, drafter_wait=0.02)
    # Never a division by zero.
    assert "7 + 1" not in advice(1.0, 1, 7, target_wait=1.0, drafter_wait=1.0)
