"""Real decoding is judged by the reference package's recorded cycles and by plain decoding."""

import json

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_mp.acceptance import head_of
from dflash_mp.config import UserError
from dflash_mp.speculate import Decoded, DecodeSettings, choose, plain_decode, speculative_decode
from golden_models import (
    GOLDEN,
    drafter_for,
    golden_drafter,
    golden_head,
    golden_prompts,
    golden_target,
    hybrid_target,
)


def decode(prompt, **settings) -> Decoded:
    return speculative_decode(
        golden_target(),
        golden_drafter(),
        golden_head(),
        prompt,
        DecodeSettings(**{"max_new_tokens": 40} | settings),
    )


def plain(prompt, **settings) -> Decoded:
    settings = DecodeSettings(**{"max_new_tokens": 40} | settings)
    return plain_decode(golden_target(), prompt, settings)


def untruncated(cycles: list[int], total: int) -> list[int]:
    """The cycles of ``cycles`` with the last one cut so that ``total`` tokens are committed."""
    kept, left = [], total
    for committed in cycles:
        if left == 0:
            break
        kept.append(min(committed, left))
        left -= kept[-1]
    return kept


@pytest.mark.parametrize("release", ["accept_zlab_pypi", "accept_zlab_checkout"])
def test_cycles_are_those_of_the_reference(release):
    reference = json.loads((GOLDEN / "outputs.json").read_text())[release]
    for index, prompt in enumerate(golden_prompts()):
        expected = reference[f"seen{index}"]["acc"]
        # The older release lets the last block run over the budget of 40 tokens.
        assert decode(prompt).committed == untruncated(expected, 39)


def test_text_is_that_of_plain_and_of_library_greedy_decoding():
    for prompt in golden_prompts()[:2]:
        ids = torch.tensor([prompt])
        library = golden_target().generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False,
            eos_token_id=None,
        )  # fmt: skip
        expected = library[0, len(prompt) :].tolist()
        assert decode(prompt).tokens == expected
        assert plain(prompt).tokens == expected


@pytest.mark.parametrize("block_size", [2, 3, 5, 8, 12])
def test_any_block_size_gives_the_same_text(block_size):
    prompt = golden_prompts()[2]
    decoded = decode(prompt, block_size=block_size)
    assert decoded.tokens == plain(prompt).tokens
    assert max(decoded.committed) <= block_size
    assert len(decoded.committed) < 39


@pytest.mark.parametrize("budget", [1, 2, 3, 17])
def test_budget_cuts_the_last_cycle(budget):
    prompt = golden_prompts()[0]
    decoded = decode(prompt, max_new_tokens=budget)
    assert decoded.tokens == plain(prompt).tokens[:budget]
    assert 1 + sum(decoded.committed) == budget
    assert decoded.committed == untruncated(decode(prompt).committed, budget - 1)


def test_stop_token_ends_the_text_wherever_it_falls_in_a_block():
    prompt = golden_prompts()[2]
    text = plain(prompt).tokens
    for position in range(0, 25, 5):
        stop = text[position]
        length = text.index(stop) + 1
        decoded = decode(prompt, stop_ids=(stop, 511))
        assert decoded.tokens == text[:length]
        assert 1 + sum(decoded.committed) == length
        assert plain(prompt, stop_ids=(stop, 511)).tokens == text[:length]
        pairs = zip(decoded.accepted, decoded.proposed, strict=True)
        assert all(accepted <= proposed for accepted, proposed in pairs)


def test_drafted_tokens_are_those_that_were_accepted_and_one_that_was_not():
    prompt = golden_prompts()[0]
    text = plain(prompt).tokens
    for settings in ({}, {"stop_ids": (text[20],)}, {"max_new_tokens": 17}):
        decoded = decode(prompt, **settings)
        position = 1
        cycles = zip(
            decoded.drafted, decoded.committed, decoded.accepted, decoded.proposed, strict=True
        )
        for drafted, committed, accepted, proposed in cycles:
            assert drafted[:accepted] == text[position : position + accepted]
            assert accepted == proposed or drafted[accepted] != text[position + accepted]
            assert proposed <= len(drafted) <= 7
            position += committed


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_sampled_text_is_that_of_plain_sampling_with_the_same_seed(temperature):
    for seed in range(2):
        prompt = golden_prompts()[seed]
        settings = {"temperature": temperature, "seed": seed}
        assert decode(prompt, **settings).tokens == plain(prompt, **settings).tokens


def test_choose_samples_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    rows = 20000
    settings = DecodeSettings(1, temperature=0.7, seed=5)
    drawn = choose(logits.expand(rows, 4), 0, settings)
    expected = torch.softmax(logits / 0.7, dim=-1) * rows
    observed = torch.bincount(drawn, minlength=4)
    # Chi-square with 3 degrees of freedom exceeds 16.3 once in a thousand.
    assert ((observed - expected) ** 2 / expected).sum() < 16.3


def test_speculative_sampling_follows_the_target_distribution():
    """The third new token's distribution, over seeds, against the exact marginal.

    The target is tiny, so the marginal over all continuations is computed by enumeration.
    """
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=6, hidden_size=16, intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, initializer_range=0.6,
    )  # fmt: skip
    target = Qwen3ForCausalLM(config).eval()
    drafter = drafter_for(target, block_size=4, mask_token_id=5)
    prompt = [0, 3, 1]
    pairs = torch.cartesian_prod(torch.arange(6), torch.arange(6))
    texts = torch.cat([torch.tensor([prompt]).expand(36, 3), pairs], dim=1)
    with torch.no_grad():
        probabilities = torch.softmax(target(input_ids=texts).logits.double(), dim=-1)
    first = probabilities[torch.arange(36), 2, pairs[:, 0]]
    second = probabilities[torch.arange(36), 3, pairs[:, 1]]
    marginal = (first * second) @ probabilities[:, 4]
    head = head_of(target)
    samples = 300
    thirds = torch.zeros(6, dtype=torch.double)
    several = 0
    for seed in range(samples):
        settings = DecodeSettings(3, temperature=1.0, seed=seed)
        decoded = speculative_decode(target, drafter, head, prompt, settings)
        thirds[decoded.tokens[2]] += 1
        several += decoded.committed == [2]
    assert several > samples / 20
    # Chi-square with 5 degrees of freedom exceeds 20.5 once in a thousand.
    assert ((thirds - samples * marginal) ** 2 / (samples * marginal)).sum() < 20.5


def test_recurrent_layers_are_put_back_and_read_again():
    """Qwen3.5's linear-attention state cannot be cropped; the text must still be the target's."""
    target = hybrid_target()
    drafter = drafter_for(target)
    cycles = []
    for seed in range(2):
        prompt = torch.randint(2, 64, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
        settings = DecodeSettings(24)
        decoded = speculative_decode(target, drafter, head_of(target), prompt, settings)
        ids = torch.tensor([prompt])
        library = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
            eos_token_id=None,
        )  # fmt: skip
        assert decoded.tokens == library[0, 9:].tolist()
        cycles += decoded.committed
    assert 1 in cycles


def test_sliding_window_layers_give_back_what_they_would_have_forgotten():
    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=48, hidden_size=32, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, initializer_range=0.4,
        use_sliding_window=True, sliding_window=6, max_window_layers=2,
        layer_types=["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
    )  # fmt: skip
    target = Qwen3ForCausalLM(config).eval()
    drafter = drafter_for(target)
    settings = DecodeSettings(30)
    decoded = speculative_decode(target, drafter, head_of(target), list(range(2, 13)), settings)
    assert decoded.tokens == plain_decode(target, list(range(2, 13)), settings).tokens
    no_cache = list(range(2, 13))
    for _ in range(30):
        with torch.no_grad():
            no_cache.append(int(target(input_ids=torch.tensor([no_cache])).logits[0, -1].argmax()))
    assert decoded.tokens == no_cache[11:]


def test_layers_of_an_unknown_kind_are_refused():
    config = Qwen3Config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    target = Qwen3ForCausalLM(config).eval()
    target.config.layer_types = ["full_attention", "telepathy"]
    with pytest.raises(UserError, match=r"Qwen3ForCausalLM has layers of type 'telepathy'"):
        plain_decode(target, [1, 2], DecodeSettings(2))


def test_context_bounds():
    with pytest.raises(UserError, match="prompt has no tokens"):
        decode([])
    with pytest.raises(UserError, match="512 tokens does not fit into the target's context of 512"):
        decode([3] * 512)
    assert len(decode([3] * 507).tokens) == 5


def test_settings_are_checked():
    with pytest.raises(UserError, match="block_size=1"):
        DecodeSettings(4, block_size=1)
    with pytest.raises(UserError, match="temperature=-1"):
        DecodeSettings(4, temperature=-1)
