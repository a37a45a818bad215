"""Counting is judged against block-by-block loops written the slow way."""

import math

import pytest
import torch

from dflash_mp.metrics import (
    block_counts,
    empty_counts,
    leading_runs,
    unpack_counts,
    walk,
    walk_counts,
)


@pytest.mark.parametrize(
    ("runs", "committed"),
    [
        ([0], []),
        ([3, 0], [1]),
        ([0, 0, 0, 0], [1, 1, 1]),
        # From token 0 two proposals and the target's token, then from token 3 the rest.
        ([2, 9, 9, 7, 0, 0], [3, 2]),
        # The last cycle would commit 4, only 2 tokens are left.
        ([0, 3, 0, 0], [1, 2]),
    ],
)
def test_walk_by_hand(runs, committed):
    assert walk(runs) == committed
    assert sum(committed) == len(runs) - 1


def random_blocks(anchors=40, block_size=6):
    generator = torch.Generator().manual_seed(3)
    correct = torch.rand(anchors, block_size, generator=generator) < 0.7
    supervised = torch.rand(anchors, block_size, generator=generator) < 0.85
    supervised[:, 0] = False
    supervised[5] = False
    return correct, supervised


def test_leading_run_ends_at_the_first_wrong_or_unsupervised_slot():
    correct, supervised = random_blocks()
    expected = []
    for right, known in zip(correct.tolist(), supervised.tolist(), strict=True):
        run = 0
        for slot in range(1, len(right)):
            if not (right[slot] and known[slot]):
                break
            run += 1
        expected.append(run)
    assert leading_runs(correct, supervised).tolist() == expected
    assert len(set(expected)) > 3


def test_block_counts_equal_a_loop():
    correct, supervised = random_blocks()
    cross_entropy = torch.rand(int(supervised.sum()))
    counts = block_counts(correct, supervised, cross_entropy)
    slots = range(1, correct.shape[1])
    marginal, conditional, runs = [], [], []
    for slot in slots:
        seen = [a for a in range(len(correct)) if supervised[a, slot]]
        marginal.append(sum(bool(correct[a, slot]) for a in seen) / len(seen))
        reached = [
            a for a in seen if all(bool(correct[a, j] and supervised[a, j]) for j in range(1, slot))
        ]
        conditional.append(sum(bool(correct[a, slot]) for a in reached) / len(reached))
    for a in range(len(correct)):
        if supervised[a].any():
            runs.append(int(leading_runs(correct[a : a + 1], supervised[a : a + 1])))
    assert counts.slot_accuracy() == pytest.approx(marginal)
    assert counts.slot_acceptance_rate() == pytest.approx(conditional)
    assert counts.uniform_anchor_length == pytest.approx(sum(runs) / len(runs) + 1)
    assert counts.cross_entropy == pytest.approx(cross_entropy.double().mean().item())
    assert len(runs) == len(correct) - 1


def test_any_split_of_the_blocks_gives_the_same_counts():
    correct, supervised = random_blocks()
    cross_entropy = torch.rand(int(supervised.sum()), dtype=torch.float64)
    whole = block_counts(correct, supervised, cross_entropy)
    parts = empty_counts(correct.shape[1])
    used = 0
    for start, stop in [(0, 7), (7, 8), (8, 40)]:
        rows = int(supervised[start:stop].sum())
        piece = cross_entropy[used : used + rows]
        parts += block_counts(correct[start:stop], supervised[start:stop], piece)
        used += rows
    assert torch.allclose(parts.pack(), whole.pack(), rtol=1e-12)


def test_walk_counts_pool_cycles_and_average_responses():
    counts = walk_counts([4, 4], 4) + walk_counts([1, 1, 1, 1], 4) + walk_counts([], 4)
    assert counts.acceptance_length == pytest.approx(12 / 6)
    assert counts.response_acceptance_length == pytest.approx((4 + 1) / 2)
    assert counts.walk_histogram.tolist() == [4, 0, 0, 2]


def test_uniform_anchors_overrate_an_easy_stretch():
    # Ten easy anchors, then hard ones: two cycles cross the first 12 tokens, eight the rest.
    runs = [5] * 10 + [0] * 11
    easy = torch.tensor([[True] * 6 if run else [False] * 6 for run in runs])
    supervised = torch.ones_like(easy)
    supervised[:, 0] = False
    counts = block_counts(easy, supervised, torch.zeros(0)) + walk_counts(walk(runs), 6)
    assert counts.acceptance_length == pytest.approx(20 / 10)
    assert counts.uniform_anchor_length == pytest.approx(1 + 50 / 21)


def test_packed_counts_come_back_and_empty_means_are_nan():
    counts = walk_counts([2, 3], 5)
    assert torch.equal(unpack_counts(counts.pack(), 5).pack(), counts.pack())
    assert math.isnan(counts.uniform_anchor_length)
    with pytest.raises(RuntimeError):
        unpack_counts(counts.pack(), 6)
