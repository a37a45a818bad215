import pytest
from golden_rows import GOLDEN
from transformers import (
    BloomConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MambaConfig,
    Qwen3_5Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from dflash_mp.config import DrafterConfig, UserError
from dflash_mp.drafter.checkpoint_format import read_drafter_config
from dflash_mp.drafter.hf_config import (
    config_json,
    default_layer_ids,
    make_drafter_config,
    read_config,
)
from dflash_mp.drafter.model import DFlashDraftModel


def shape(**changes) -> DrafterConfig:
    values = {
        "layers": 5,
        "block_size": 16,
        "tapped_layers": 5,
        "sliding_layers": 0,
        "sliding_window": 2048,
        "mask_token_id": None,
        "anchors_per_batch": 8,
        "attention": "sdpa",
        "precision": "float32",
    }
    return DrafterConfig(**(values | changes))


def qwen3_8b(**changes) -> Qwen3Config:
    values = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }
    return Qwen3Config(**(values | changes))


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (32, 5, [1, 8, 15, 22, 29]),
        (28, 5, [1, 7, 13, 19, 25]),
        (24, 5, [1, 6, 11, 16, 21]),
        (48, 5, [1, 12, 23, 34, 45]),
        (62, 5, [1, 16, 30, 44, 59]),
        (64, 5, [1, 16, 31, 46, 61]),
        (36, 3, [1, 17, 33]),
        (36, 1, [18]),
    ],
)
def test_default_layer_ids(layers: int, count: int, ids: list[int]):
    assert default_layer_ids(layers, count) == ids


def test_config_json_of_a_published_drafter():
    config = make_drafter_config(qwen3_8b(), shape(), [1, 9, 17, 25, 33], 151669)
    assert config_json(config) == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 16,
        "dflash_config": {
            "mask_token_id": 151669,
            "target_layer_ids": [1, 9, 17, 25, 33],
            "block_size": 16,
        },
        "num_target_layers": 36,
        "num_hidden_layers": 5,
        "layer_types": ["full_attention"] * 5,
        "max_window_layers": 5,
        "sliding_window": None,
        "use_sliding_window": False,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "dtype": "bfloat16",
    }


def test_heads_and_widths_of_its_own():
    own = shape(attention_heads=16, key_value_heads=2, head_dim=64, intermediate_size=1000)
    config = make_drafter_config(qwen3_8b(), own, [1, 9], 151669)
    assert (config.num_attention_heads, config.num_key_value_heads) == (16, 2)
    assert (config.head_dim, config.intermediate_size, config.hidden_size) == (64, 1000, 4096)
    assert config_json(read_config(config_json(config))) == config_json(config)
    with pytest.raises(UserError, match=r"attention_heads=12: must be a multiple of .*heads=8"):
        make_drafter_config(qwen3_8b(), shape(attention_heads=12), [1, 9], 151669)
    with pytest.raises(UserError, match=r"drafter\.head_dim=0: must be at least 1"):
        shape(head_dim=0)


def test_sliding_layers_come_first():
    config = make_drafter_config(qwen3_8b(), shape(sliding_layers=4), [1, 9, 17, 25, 33], 151669)
    assert config.layer_types == ["sliding_attention"] * 4 + ["full_attention"]
    assert config.sliding_window == 2048
    written = config_json(config)
    assert written["use_sliding_window"] is True
    assert config_json(read_config(written)) == written


def test_partial_multimodal_rope_of_a_nested_target_does_not_leak():
    text = {
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "intermediate_size": 96,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    config = make_drafter_config(Qwen3_5Config(text_config=text), shape(layers=2), [1, 3, 5], 500)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e7}
    assert (config.hidden_size, config.head_dim, config.num_target_layers) == (64, 32, 8)
    frequencies = DFlashDraftModel(config).rotary_emb.inv_freq
    assert frequencies.shape == (16,)
    assert frequencies[-1].item() == pytest.approx(1e7 ** (-30 / 32))
    assert config_json(read_config(config_json(config))) == config_json(config)


def test_per_layer_rope_takes_the_base_of_full_layers():
    gemma = Gemma3TextConfig(num_hidden_layers=12, hidden_size=64, vocab_size=512)
    config = make_drafter_config(gemma, shape(layers=1), [1, 5], 500)
    assert config.rope_parameters["rope_theta"] == 1_000_000
    assert config.dflash_config["input_embedding_scale"] == 8.0


def test_scaled_rope_of_the_target_is_not_inherited():
    llama = LlamaConfig(
        num_hidden_layers=8,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    config = make_drafter_config(llama, shape(layers=1), [1, 5], 500)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}


def test_an_expert_target_gives_a_dense_drafter():
    moe = Qwen3MoeConfig(num_hidden_layers=8, hidden_size=64, intermediate_size=0, vocab_size=512)
    assert make_drafter_config(moe, shape(layers=1), [1, 5], 500).intermediate_size == 192


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([1, 36], 9, r"count from 0 to 35"),
        ([-1, 3], 9, r"count from 0 to 35"),
        ([1, 35], 9, r"last layer cannot be tapped.*34 at most"),
        ([3, 3], 9, r"repeated"),
        ([5, 3], 9, r"must increase"),
        ([], 9, r"at least one layer"),
        ([1, 3], 151936, r"mask_token_id=151936: .*rows 0 to 151935"),
        ([1, 3], -1, r"mask_token_id=-1"),
    ],
)
def test_refusals(ids: list[int], mask: int, message: str):
    with pytest.raises(UserError, match=message):
        make_drafter_config(qwen3_8b(), shape(), ids, mask)


def test_a_shallow_target_is_refused():
    with pytest.raises(UserError, match=r"repeated|must increase"):
        default_layer_ids(5, 5)


def dialects() -> dict[str, dict]:
    classic = read_drafter_config(str(GOLDEN / "draft"))
    rope = {"rope_type": "default", "rope_theta": 1e6}
    without_rope = {k: v for k, v in classic.items() if not k.startswith("rope")}
    inside = {k: v for k, v in classic.items() if k != "block_size"}
    return {
        "classic": classic,
        "both rope spellings": classic | {"rope_parameters": rope},
        "rope_parameters only": without_rope | {"rope_parameters": rope},
        "rope_scaling of type default": classic | {"rope_scaling": {"type": "default"}},
        "block_size inside": inside
        | {"dflash_config": classic["dflash_config"] | {"block_size": 8}},
        "no layer_types": {k: v for k, v in classic.items() if k != "layer_types"},
        "leaked partial rotary": without_rope
        | {
            "partial_rotary_factor": 0.25,
            "rope_parameters": rope | {"partial_rotary_factor": 0.25},
        },
        "auto_map": classic | {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}},
    }


@pytest.mark.parametrize("name", dialects())
def test_all_dialects_read_the_same(name: str):
    written = config_json(read_config(dialects()[name]))
    assert written == config_json(read_config(dialects()["classic"]))


def test_sliding_layers_without_layer_types():
    raw = dialects()["no layer_types"]
    raw |= {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}
    assert read_config(raw).layer_types == ["full_attention", "sliding_attention"]


def test_missing_layer_ids_follow_the_formula():
    raw = dialects()["classic"]
    raw["dflash_config"] = {"mask_token_id": 511}
    raw["num_target_layers"] = 12
    assert read_config(raw).dflash_config["target_layer_ids"] == [1, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": None}, "no block_size"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "no dflash_config.mask_token_id"),
        ({"dflash_config": {"mask_token_id": 511, "block_size": 4}}, "block_size=8, but"),
        ({"dflash_config": {"mask_token_id": 512, "target_layer_ids": [0]}}, "mask_token_id=512"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for num_hidden_layers=2"),
        ({"layer_types": ["full_attention", "linear"]}, "unknown layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, "need a sliding_window"),
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
    ],
)
def test_unreadable_configs(changes: dict, message: str):
    with pytest.raises(UserError, match=message):
        read_config(dialects()["classic"] | changes)


@pytest.mark.parametrize("kind", [BloomConfig, MambaConfig])
def test_a_target_of_another_shape_is_refused_with_what_is_missing(kind: type):
    with pytest.raises(UserError, match=rf"type {kind.model_type} cannot have .*says nothing of"):
        make_drafter_config(kind(), shape(), [1, 2, 3, 4, 5], 7)
