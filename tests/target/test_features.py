"""Captured features against the model's own hidden states, and documents against each other."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3NextConfig

from dflash_mp.config import TargetConfig
from dflash_mp.features import FeatureBatch
from dflash_mp.roles.target import fill_in_parts, finite
from dflash_mp.target.layers import decoder_layers
from dflash_mp.target.model import FeatureExtractor, load_target, padded_rows
from dflash_mp.wire.frame import DTYPES, Layout, decode

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 0,
    "mlp_only_layers": [0, 1, 2, 3],
}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**TINY),
    "llama": lambda: LlamaConfig(**TINY),
    "hybrid": lambda: Qwen3NextConfig(**TINY, **HYBRID),
}
LAYER_IDS = [0, 2]
LENGTHS = [70, 5, 31, 64, 2]


def tiny_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32).eval()


def packed(lengths: list[int], slots: int, width: int, vocabulary: int = 100) -> FeatureBatch:
    """Documents of random tokens in one row of ``slots``."""
    generator = torch.Generator().manual_seed(1)
    used = sum(lengths)
    ids = torch.zeros(slots, dtype=torch.int32)
    ids[:used] = torch.randint(2, vocabulary, (used,), generator=generator, dtype=torch.int32)
    positions = torch.zeros(slots, dtype=torch.int32)
    positions[:used] = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
    documents = torch.full((slots,), -1, dtype=torch.int32)
    numbers = torch.arange(len(lengths), dtype=torch.int32)
    documents[:used] = numbers.repeat_interleave(torch.tensor(lengths))
    mask = torch.ones(slots, dtype=torch.uint8)
    hidden = torch.full((slots, width), float("nan"))
    return FeatureBatch(0, ids, positions, documents, mask, hidden, hidden[:, :32].clone())


def hidden_states_of(model: nn.Module, ids: Tensor) -> tuple[Tensor, ...]:
    """The model's own account: embedding output, then every layer's output; ``[1, S, H]`` each."""
    with torch.no_grad():
        return model(ids[None].long(), output_hidden_states=True, use_cache=False).hidden_states


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_features_are_hidden_states_of_id_plus_one_bit_for_bit(kind: str) -> None:
    model = tiny_model(kind)
    batch = packed([40], 40, 64)
    FeatureExtractor(model, LAYER_IDS).fill(batch)
    states = hidden_states_of(model, batch.input_ids)
    expected = torch.cat([states[i + 1][0] for i in LAYER_IDS], dim=-1)
    assert torch.equal(batch.hidden_states, expected)


@pytest.mark.parametrize("kind", ["qwen3", "hybrid"])
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_codes_stand_for_the_hidden_states_and_tell_when_these_are_not_finite(
    kind: str, dtype: str
) -> None:
    model, plain = tiny_model(kind), packed(LENGTHS, 200, 64)
    layout = Layout(200, 2, 64, 0, DTYPES[dtype])
    sent, values = (
        shape.view(shape.allocate(torch.device("cpu")), 0) for shape in (layout, layout.plain)
    )
    for field in ("input_ids", "position_ids", "document_ids"):
        getattr(sent, field).copy_(getattr(plain, field))
    for batch in (plain, sent):
        FeatureExtractor(model, LAYER_IDS).fill(batch)
    used = sum(LENGTHS)
    expected = plain.hidden_states[:used].unflatten(1, (2, 32))
    found = decode(sent, values).hidden_states[:used].float().unflatten(1, (2, 32))
    # A 16th in fp8, and bfloat16 behind it; half a scale in int8.
    bound = 0.07 * expected.abs() + 0.005 * expected.abs().amax(-1, keepdim=True)
    assert ((found - expected).abs() <= bound).all()
    assert finite(sent)
    decoder_layers(model)[2].register_forward_hook(lambda _, __, out: out * torch.nan)
    FeatureExtractor(model, LAYER_IDS).fill(sent)
    assert not finite(sent)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_row_may_keep_its_padding_and_so_its_shape(kind: str) -> None:
    model, shapes = tiny_model(kind), []
    decoder_layers(model)[0].register_forward_hook(
        lambda _, given, __: shapes.append(given[0].shape)
    )
    for lengths in (LENGTHS, LENGTHS[:3]):
        cut, whole = packed(lengths, 200, 64), packed(lengths, 200, 64)
        FeatureExtractor(model, LAYER_IDS, final=True, fixed=False).fill(cut)
        # Making one tries the model out.
        extractor = FeatureExtractor(model, LAYER_IDS, final=True, fixed=True)
        shapes.clear()
        extractor.fill(whole)
        assert shapes == [(1, 200, 32)]
        used = sum(lengths)
        for name in ("hidden_states", "final_hidden"):
            got, expected = getattr(whole, name), getattr(cut, name)
            torch.testing.assert_close(got[:used], expected[:used], atol=1e-5, rtol=0)
            assert got[used:].isnan().all()


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_a_document_has_the_same_features_alone_and_in_a_pack(kind: str) -> None:
    model = tiny_model(kind)
    batch = packed(LENGTHS, 200, 64)
    extractor = FeatureExtractor(model, LAYER_IDS, final=True)
    extractor.fill(batch)
    start = 0
    for length in LENGTHS:
        row = slice(start, start + length)
        states = hidden_states_of(model, batch.input_ids[row])
        expected = torch.cat([states[i + 1][0] for i in LAYER_IDS], dim=-1)
        torch.testing.assert_close(batch.hidden_states[row], expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(batch.final_hidden[row], states[-1][0], atol=2e-5, rtol=1e-4)
        start += length
    assert batch.hidden_states[start:].isnan().all(), "padding is left alone"


@pytest.mark.parametrize(("kind", "packs"), [("qwen3", True), ("llama", True), ("hybrid", False)])
def test_rows_are_chosen_by_architecture(kind: str, packs: bool) -> None:
    assert FeatureExtractor(tiny_model(kind), LAYER_IDS).packs is packs


def test_a_model_that_leaks_between_packed_documents_gets_padded_rows() -> None:
    """GPT-2 style learned positions with a mask that ignores them: tried out, not assumed."""
    model = tiny_model("qwen3")
    decoder = model.get_decoder()
    forward = decoder.forward

    def leaking(**kwargs: object) -> object:
        ids = kwargs["input_ids"]
        everything = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        return forward(**{**kwargs, "attention_mask": everything})

    decoder.forward = leaking
    assert not FeatureExtractor(model, LAYER_IDS).packs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_whose_positions_do_not_restart_gets_padded_rows(dtype: torch.dtype) -> None:
    model = tiny_model("qwen3").to(dtype)
    assert FeatureExtractor(model, LAYER_IDS).packs
    learned = torch.randn(24, 32, dtype=dtype)
    model.get_input_embeddings().register_forward_hook(
        lambda _, __, out: out + learned[: out.shape[1]]
    )
    assert not FeatureExtractor(model, LAYER_IDS).packs


@pytest.mark.parametrize("kind", ["qwen3", "hybrid"])
def test_tokens_of_a_forward_that_fails_do_not_count(kind: str) -> None:
    model = tiny_model(kind)
    extractor, batch = FeatureExtractor(model, LAYER_IDS), packed(LENGTHS, 200, 64)
    failures = iter([True])

    def cramped(*_: object) -> None:
        if next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory")

    decoder_layers(model)[1].register_forward_pre_hook(cramped)
    assert fill_in_parts(extractor, batch)
    assert extractor.tokens == sum(LENGTHS)


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_layers_behind_the_deepest_tap_and_the_head_never_run(kind: str) -> None:
    model = tiny_model(kind)
    broken = copy.deepcopy(model)
    decoder_layers(broken)[3] = nn.Identity()  # would fail: it takes no keyword arguments
    broken.lm_head = None
    one, other = packed(LENGTHS, 200, 64), packed(LENGTHS, 200, 64)
    FeatureExtractor(model, LAYER_IDS).fill(one)
    FeatureExtractor(broken, LAYER_IDS).fill(other)
    assert torch.equal(one.hidden_states.nan_to_num(7), other.hidden_states.nan_to_num(7))


def test_padded_rows_cover_every_document_once_in_bounded_batches() -> None:
    lengths = [3, 64, 65, 1, 500, 64, 128]
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    seen = []
    for rows, length in padded_rows(documents):
        assert length % 64 == 0
        assert all(length - 64 < row.stop - row.start <= length for row in rows)
        seen += [(row.start, row.stop) for row in rows]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    assert sorted(seen) == list(zip([0, *ends[:-1]], ends, strict=True))


@pytest.mark.slow
def test_the_default_target_isolates_packed_documents() -> None:
    target = TargetConfig("smollm2", None, "auto", "sdpa", None, False)
    model = load_target(target, torch.device("cpu"))
    ids = [1, 8, 14, 20, 27]
    batch = packed([60, 25, 40], 128, 5 * 576, vocabulary=49152)
    extractor = FeatureExtractor(model, ids)
    assert extractor.packs
    extractor.fill(batch)
    start = 0
    for length in [60, 25, 40]:
        row = slice(start, start + length)
        states = hidden_states_of(model, batch.input_ids[row])
        expected = torch.cat([states[i + 1][0] for i in ids], dim=-1)
        scale = expected.abs().mean()
        assert (batch.hidden_states[row] - expected).abs().max() < 1e-3 * scale + 1e-3
        start += length
