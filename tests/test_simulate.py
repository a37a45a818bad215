"""The walk over the target's own greedy text is real greedy decoding, cycle by cycle."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dflash_mp.data
from dflash_mp.acceptance import head_of, largest_gap
from dflash_mp.config import TargetConfig
from dflash_mp.drafter.anchors import make_blocks, sample_anchors
from dflash_mp.losses import HeadRows, head_loss
from dflash_mp.metrics import empty_counts
from dflash_mp.simulate import draft_blocks, response_spans, simulate
from dflash_mp.speculate import DecodeSettings, plain_decode, speculative_decode
from dflash_mp.target.model import load_target, load_tokenizer
from golden_models import (
    drafter_for,
    golden_drafter,
    golden_head,
    golden_prompts,
    golden_target,
    packed_features,
)


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


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_walk_does_not_depend_on_the_attention(documents, monkeypatch):
    batch, head = packed_features(golden_target(), documents, padding=7), golden_head()
    drafter = golden_drafter()
    counts, cycles = simulate(batch, drafter, head, 32, 100)
    monkeypatch.setattr(drafter, "attention", "flex")
    by_flex, cycles_by_flex = simulate(batch, drafter, head, 32, 100)
    assert cycles == cycles_by_flex
    assert (counts.pack() == by_flex.pack())[1:].all()
    assert counts.cross_entropy == pytest.approx(by_flex.cross_entropy, rel=1e-5)


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


def real_documents(target, tokenizer, count):
    """Shipped held-out rows as ``(prompt, response)``, the stop token included where it came."""
    path = Path(dflash_mp.data.__file__).parent / "samples" / "narrow_eval.jsonl"
    documents = []
    for line in path.read_text().splitlines()[:count]:
        row = json.loads(line)
        prompt = tokenizer.apply_chat_template(
            row["messages"][:-1], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        stop = [tokenizer.eos_token_id] if row["finish_reason"] == "stop" else []
        documents.append((prompt, row["response_token_ids"] + stop))
    return documents


@pytest.mark.slow
def test_walk_equals_real_decoding_on_the_default_target():
    """A drafter trained for a minute on the very rows; fp32 throughout."""
    settings = TargetConfig("smollm2", None, "float32", "sdpa", [1, 14, 27], False)
    target, tokenizer = load_target(settings, torch.device("cpu")), load_tokenizer(settings)
    head = head_of(target)
    documents = real_documents(target, tokenizer, 3)
    batch = packed_features(target, documents, tapped=settings.layer_ids)
    drafter = drafter_for(target, block_size=8, mask_token_id=16, layer_ids=settings.layer_ids)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1.5e-3)
    for step in range(120):
        anchors, valid = sample_anchors(replace(batch, number=step), 16, seed=0)
        blocks = make_blocks(batch, anchors, valid, 8, 16)
        rows = blocks.supervised
        hidden = drafter(
            head.embed(blocks.input_ids), batch.hidden_states, batch.position_ids, blocks, rows
        )
        loss = head_loss(HeadRows(hidden, head.weight, blocks.labels[rows]), "ce").loss.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    drafter.eval()
    _, cycles = simulate(batch, drafter, head, 64, 256)
    unequal = 0
    for (prompt, response), simulated in zip(documents, cycles, strict=True):
        stop = (tokenizer.eos_token_id,)
        decoding = DecodeSettings(len(response), stop_ids=stop)
        real = speculative_decode(target, drafter, head, prompt, decoding)
        if real.tokens == response:
            assert real.committed == simulated
        else:
            # The rows were decoded in batches, which round differently: only a tie may differ.
            assert largest_gap(target, prompt, response, decoding) < 1e-3
            unequal += 1
    assert unequal <= 1
    assert len({committed for cycle in cycles for committed in cycle}) > 4
