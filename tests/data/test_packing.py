"""Property tests of packing and of the weighted mix, and the packed row by hand."""

import numpy as np
import pytest
import torch

from dflash_mp.config import UserError
from dflash_mp.data.documents import Corpus
from dflash_mp.data.packing import collate, epoch_documents, fill, pack


def random_lengths(rng):
    count = int(rng.integers(0, 400))
    kind = rng.integers(3)
    if kind == 0:
        return rng.integers(1, 65, count)
    if kind == 1:
        return np.full(count, rng.integers(1, 65))
    return np.minimum(64, rng.lognormal(2, 1, count).astype(np.int64) + 1)


def test_every_document_exactly_once_and_within_the_budget():
    rng = np.random.default_rng(0)
    for trial in range(200):
        lengths = random_lengths(rng)
        packs = pack(lengths, 64, trial, trial % 5)
        flat = np.concatenate([*packs, np.zeros(0, np.int64)])
        assert sorted(flat.tolist()) == list(range(len(lengths)))
        assert all(0 < lengths[p].sum() <= 64 for p in packs)
        assert all(p.dtype == np.int64 for p in packs)


def test_packs_are_a_function_of_the_arguments():
    lengths = np.random.default_rng(1).integers(1, 64, 300)

    def listed(*arguments):
        return [p.tolist() for p in pack(lengths, *arguments)]

    assert listed(64, 3, 2) == listed(64, 3, 2)
    # Another epoch or seed mixes other documents, even where one window holds all of them.
    first, second = listed(64, 3, 0), listed(64, 3, 1)
    shared = {tuple(sorted(p)) for p in first if len(p) > 1} & {tuple(sorted(p)) for p in second}
    assert len(shared) < len(first) / 4
    assert listed(64, 4, 0) != first


def test_a_document_longer_than_the_budget_is_refused():
    with pytest.raises(UserError, match=r"tokens_per_batch=8: a document has 9 tokens"):
        pack(np.array([3, 9]), 8, 0, 0)


def test_long_tailed_mix_is_nearly_full():
    rng = np.random.default_rng(2)
    lengths = np.minimum(3072, rng.lognormal(6, 1.2, 20_000).astype(np.int64) + 2)
    assert fill(lengths, pack(lengths, 4096, 0, 0), 4096) > 0.99
    # Some hundred documents are enough.
    few = lengths[:400]
    assert fill(few, pack(few, 4096, 0, 0), 4096) > 0.95


def test_weighted_mix_is_exact_over_a_run():
    rng = np.random.default_rng(4)
    for seed in range(20):
        weights = rng.choice([0.3, 0.5, 1.0, 2.0, 2.25], 60)
        seen = np.zeros(60, int)
        for epoch in range(8):
            documents = epoch_documents(60, seed, epoch, weights)
            copies = np.bincount(documents, minlength=60)
            # Each document within one of its weight, each weight's share within one document.
            assert np.all(np.abs(copies - weights) < 1)
            for weight in np.unique(weights):
                members = weights == weight
                assert abs(copies[members].sum() - weight * members.sum()) <= 1
            seen += copies
        assert np.all(np.abs(seen - 8 * weights) < 1)


def test_weights_reach_the_packs():
    lengths = np.full(40, 10)
    weights = np.repeat([2.0, 0.5], 20)
    counts = np.zeros(40, int)
    for epoch in range(2):
        for documents in pack(lengths, 64, 7, epoch, weights):
            counts += np.bincount(documents, minlength=40)
    assert counts.tolist() == [4] * 20 + [1] * 20


def test_packed_row():
    corpus = Corpus(
        input_ids=np.array([11, 12, 13, 21, 22, 31, 32, 33, 34], np.int32),
        loss_mask=np.array([0, 1, 1, 0, 1, 0, 0, 1, 1], np.uint8),
        offsets=np.array([0, 3, 5, 9]),
        sources=np.zeros(3, np.int32),
        rows=np.arange(3),
    )
    batch = collate(corpus, np.array([2, 0]), 8)
    assert batch.input_ids.tolist() == [31, 32, 33, 34, 11, 12, 13, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert batch.document_ids.tolist() == [0, 0, 0, 0, 1, 1, 1, -1]
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 1, 0]
    assert batch.loss_mask.dtype == torch.uint8
    for tensor in (batch.input_ids, batch.position_ids, batch.document_ids):
        assert tensor.dtype == torch.int32
    with pytest.raises(ValueError, match="9 tokens do not fit into 8 slots"):
        collate(corpus, [0, 1, 2], 8)
    assert collate(corpus, [], 2).document_ids.tolist() == [-1, -1]
