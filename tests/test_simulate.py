"""The walk over the target's own greedy text is real greedy decoding, cycle by cycle."""

from dataclasses import replace

import pytest
import torch
from golden_models import (
    golden_drafter,
    golden_head,
    golden_prompts,
    golden_target,
    packed_features,
)

from dflash_mp.metrics import empty_counts
from dflash_mp.simulate import draft_blocks, response_spans, simulate
from dflash_mp.speculate import DecodeSettings, plain_decode, speculative_decode


@pytest.fixture(scope="module")
def documents() -> list[tuple[list[int], list[int]]]:
    settings = DecodeSettings(40)
    return [
        (prompt, plain_decode(golden_target(), prompt, settings).tokens)
        for prompt in golden_prompts()
    ]


@pytest.mark.parametrize("anchors_per_pass", [1000, 32])
def test_walk_equals_real_decoding_cycle_by_cycle(documents, anchors_per_pass):
    batch = packed_features(golden_target(), documents, padding=7)
    counts, cycles = simulate(
        batch, golden_drafter(), golden_head(), anchors_per_pass, rows_per_chunk=100
    )
    real = [
        speculative_decode(
            golden_target(), golden_drafter(), golden_head(), prompt, DecodeSettings(40)
        ).committed
        for prompt, _ in documents
    ]
    assert cycles == real
    flat = [committed for cycle in real for committed in cycle]
    assert counts.acceptance_length == pytest.approx(sum(flat) / len(flat))
    assert counts.walk_histogram.tolist() == [flat.count(size) for size in range(1, 9)]
    assert counts.uniform_anchor_length > 1.1 * counts.acceptance_length


def test_stop_token_belongs_to_the_text(documents):
    prompt, text = documents[2]
    stop = text[25]
    settings = DecodeSettings(40, stop_ids=(stop,))
    real = speculative_decode(golden_target(), golden_drafter(), golden_head(), prompt, settings)
    batch = packed_features(golden_target(), [(prompt, real.tokens)])
    _, cycles = simulate(batch, golden_drafter(), golden_head(), 64, 64)
    assert cycles == [real.committed]
    assert real.tokens[-1] == stop


def test_splitting_the_documents_does_not_change_the_counts(documents):
    together, _ = simulate(
        packed_features(golden_target(), documents), golden_drafter(), golden_head(), 64, 64
    )
    apart = empty_counts(8)
    for document in documents:
        batch = packed_features(golden_target(), [document], padding=3)
        apart += simulate(batch, golden_drafter(), golden_head(), 64, 64)[0]
    exact = together.pack() == apart.pack()
    # Only the summed cross-entropy depends on the order of summation.
    assert exact[1:].all()
    assert apart.cross_entropy == pytest.approx(together.cross_entropy, rel=1e-5)


def test_every_supervised_span_is_a_response_of_its_own(documents):
    (prompt, text), (_, second_text) = documents[:2]
    batch = packed_features(golden_target(), [(prompt, text), ([], second_text)], padding=2)
    mask = batch.loss_mask.clone()
    mask[len(prompt) + 10 : len(prompt) + 13] = 0
    batch = replace(batch, loss_mask=mask)
    first = len(prompt)
    assert response_spans(batch) == [(first, first + 10), (first + 13, first + 40), (46, 86)]
    _, cycles = simulate(batch, golden_drafter(), golden_head(), 64, 64)
    assert [sum(committed) for committed in cycles] == [9, 26, 39]


def test_cross_entropy_is_that_of_the_drafted_distribution(documents):
    batch = packed_features(golden_target(), documents[:1])
    anchors = torch.tensor([8, 20, 43])
    valid = torch.tensor([True, True, True])
    correct, supervised, cross_entropy = draft_blocks(
        batch, golden_drafter(), golden_head(), anchors, valid, rows_per_chunk=5
    )
    labels = [int(batch.input_ids[a + k]) for a in (8, 20, 43) for k in range(1, 8) if a + k < 46]
    assert int(supervised.sum()) == len(labels) == 7 + 7 + 2
    assert cross_entropy.min() > 0
    hits = correct[supervised]
    # A slot that is right gives its label at least one in V of the probability.
    assert (cross_entropy[hits] < torch.log(torch.tensor(512.0))).all()
    assert 0 < hits.sum() < len(hits)
