"""How well drafted blocks match a text: the walk, per-slot accuracy, exact sums over ranks.

Everything here is a count. Counts are added over batches and ranks first and divided last, so a
value does not depend on how the documents were split.

Shapes: A anchors, B block size (slot 0 is the anchor, slots 1..B-1 are drafted).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


def leading_runs(correct: Tensor, supervised: Tensor) -> Tensor:
    """Number of leading correct slots of each block, ``[A]`` int64, between 0 and ``B - 1``.

    ``correct`` and ``supervised`` are ``[A, B]`` bool; slot 0 is ignored. The run ends at the first
    slot that is wrong or unsupervised.
    """
    hit = (correct & supervised)[:, 1:].long()  # [A, B-1]
    return hit.cumprod(dim=1).sum(dim=1)


def walk(runs: Sequence[int]) -> list[int]:
    """Tokens committed by each cycle when decoding produces exactly a known response.

    ``runs[i]`` is the number of leading correct slots of the block anchored at response token
    ``i``. The first token comes from the target's prefill and belongs to no cycle; every cycle
    then commits its run plus the target's own token, and the next one starts from there. The last
    cycle is cut to the tokens that are left, so the sum is ``len(runs) - 1``. On the target's own
    greedy text these are the cycles of real greedy decoding.
    """
    committed = []
    position = 0
    while (left := len(runs) - 1 - position) > 0:
        step = min(runs[position] + 1, left)
        committed.append(step)
        position += step
    return committed


@dataclass(frozen=True)
class BlockCounts:
    """Counts over held-out blocks and walks; float64 on the CPU, exact below ``2**53``.

    A ``*_sum`` divided by the ``*_total`` of the same name is a mean. Vectors have one entry per
    block slot (``[B]``, entry 0 unused), except ``walk_histogram``: entry ``c - 1`` counts cycles
    that committed ``c`` tokens.
    """

    cross_entropy_sum: Tensor
    cross_entropy_total: Tensor
    correct_sum: Tensor
    correct_total: Tensor
    reached_correct_sum: Tensor
    reached_correct_total: Tensor
    uniform_run_sum: Tensor
    uniform_run_total: Tensor
    walk_committed_sum: Tensor
    walk_committed_total: Tensor
    walk_response_mean_sum: Tensor
    walk_response_mean_total: Tensor
    walk_histogram: Tensor

    def __add__(self, other: "BlockCounts") -> "BlockCounts":
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return BlockCounts(*(mine + yours for mine, yours in pairs))

    def pack(self) -> Tensor:
        """All counts in one float64 vector, ``[5 * B + 8]``, to be summed over ranks."""
        return torch.cat([getattr(self, f.name).reshape(-1) for f in fields(self)])

    @property
    def acceptance_length(self) -> float:
        """Tokens per cycle of the walk, pooled over cycles; the target's own token included."""
        return _ratio(self.walk_committed_sum, self.walk_committed_total)

    @property
    def response_acceptance_length(self) -> float:
        """Mean over responses of each response's own mean tokens per cycle."""
        return _ratio(self.walk_response_mean_sum, self.walk_response_mean_total)

    @property
    def uniform_anchor_length(self) -> float:
        """Mean run plus one over all anchors, each counted once.

        It is higher than the acceptance length: a long easy stretch holds many anchors, yet
        decoding crosses it in few cycles and stops at every hard position, so a uniform draw
        meets the easy positions more often than decoding does.
        """
        return _ratio(self.uniform_run_sum, self.uniform_run_total) + 1.0

    @property
    def cross_entropy(self) -> float:
        """Mean over supervised slots, every slot weighing the same, in nats."""
        return _ratio(self.cross_entropy_sum, self.cross_entropy_total)

    def slot_accuracy(self) -> list[float]:
        """Slots 1..B-1: share of supervised slots whose token is right."""
        return _ratios(self.correct_sum, self.correct_total)

    def slot_acceptance_rate(self) -> list[float]:
        """Slots 1..B-1: share that is right among those with only right slots before them."""
        return _ratios(self.reached_correct_sum, self.reached_correct_total)


def empty_counts(block_size: int) -> BlockCounts:
    """Counts of nothing, the start of a sum."""
    return unpack_counts(torch.zeros(5 * block_size + 8, dtype=torch.float64), block_size)


def unpack_counts(packed: Tensor, block_size: int) -> BlockCounts:
    """The inverse of ``BlockCounts.pack``; raises ``RuntimeError`` if the size does not fit."""
    vectors = {
        "correct_sum",
        "correct_total",
        "reached_correct_sum",
        "reached_correct_total",
        "walk_histogram",
    }
    sizes = [block_size if f.name in vectors else 1 for f in fields(BlockCounts)]
    parts = packed.double().cpu().split(sizes)
    return BlockCounts(*(part.clone() for part in parts))


def block_counts(correct: Tensor, supervised: Tensor, cross_entropy: Tensor) -> BlockCounts:
    """Counts over blocks anchored uniformly: accuracy per slot, mean run, cross-entropy.

    ``correct``, ``supervised``: ``[A, B]`` bool. ``cross_entropy``: ``[R]``, one value for each
    supervised slot. Blocks without a supervised slot are left out of the mean run.
    """
    block_size = correct.shape[1]
    right = correct & supervised  # [A, B]
    right_so_far = right[:, 1:].long().cumprod(dim=1).bool()  # [A, B-1]
    reached = supervised.clone()  # [A, B]
    reached[:, 0] = False
    reached[:, 2:] &= right_so_far[:, :-1]
    used = supervised[:, 1:].any(dim=1)  # [A]
    counted = {
        "cross_entropy_sum": cross_entropy.double().sum().reshape(1),
        "cross_entropy_total": torch.tensor([cross_entropy.numel()]),
        "correct_sum": right.sum(dim=0),
        "correct_total": supervised.sum(dim=0),
        "reached_correct_sum": (right & reached).sum(dim=0),
        "reached_correct_total": reached.sum(dim=0),
        "uniform_run_sum": leading_runs(correct, supervised)[used].sum().reshape(1),
        "uniform_run_total": used.sum().reshape(1),
    }
    return _with(block_size, counted)


def walk_counts(committed: Sequence[int], block_size: int) -> BlockCounts:
    """Counts of one response's walk; one without a cycle counts nothing."""
    if not committed:
        return empty_counts(block_size)
    cycles = torch.tensor(committed)
    mean = sum(committed) / len(committed)
    counted = {
        "walk_committed_sum": cycles.sum().reshape(1),
        "walk_committed_total": torch.tensor([len(committed)]),
        "walk_response_mean_sum": torch.tensor([mean], dtype=torch.float64),
        "walk_response_mean_total": torch.ones(1),
        "walk_histogram": torch.bincount(cycles - 1, minlength=block_size),
    }
    return _with(block_size, counted)


def _with(block_size: int, counted: dict[str, Tensor]) -> BlockCounts:
    values = vars(empty_counts(block_size)) | {k: v.double().cpu() for k, v in counted.items()}
    return BlockCounts(**values)


def _ratio(total: Tensor, count: Tensor) -> float:
    return float(total / count) if float(count) else float("nan")


def _ratios(total: Tensor, count: Tensor) -> list[float]:
    return [_ratio(total[k], count[k]) for k in range(1, len(total))]
