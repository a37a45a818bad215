import json
from pathlib import Path

import pytest
import torch
from golden_rows import GOLDEN
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from dflash_mp.config import UserError
from dflash_mp.drafter.frozen_head import load_frozen_head


def llama(folder: Path, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


def test_the_golden_target():
    head = load_frozen_head(str(GOLDEN / "target"), torch.float32)
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "target", dtype=torch.float32)
    assert torch.equal(head.weight, model.lm_head.weight)
    assert torch.equal(head.embedding, model.model.embed_tokens.weight)
    ids = torch.tensor([[3, 511]], dtype=torch.int32)
    assert torch.equal(head.embed(ids), model.model.embed_tokens(ids))
    assert not list(head.parameters())
    assert not head.state_dict()


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied(tied: bool, tmp_path: Path):
    model = llama(tmp_path, tied)
    head = load_frozen_head(str(tmp_path), torch.float32)
    assert torch.equal(head.weight, model.lm_head.weight)
    assert (head.weight is head.embedding) == tied
    moved = head.to(torch.bfloat16)
    assert moved.weight.dtype == torch.bfloat16
    assert (moved.weight is moved.embedding) == tied


def test_gemma_scales_embeddings_and_caps_logits(tmp_path: Path):
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=0.2,
        initializer_range=0.5,
    )
    model = Gemma2ForCausalLM(config)
    model.save_pretrained(tmp_path)
    head = load_frozen_head(str(tmp_path), torch.float32)
    ids = torch.arange(50)[None]
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    torch.testing.assert_close(head.embed(ids), out.hidden_states[0])
    torch.testing.assert_close(head.logits(out.hidden_states[-1]), out.logits)
    assert out.logits.abs().max() <= 0.2


def test_the_text_part_of_a_multimodal_checkpoint(tmp_path: Path):
    torch.manual_seed(0)
    text = {
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 50,
        "intermediate_size": 32,
    }
    vision = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16}
    vision |= {"out_hidden_size": 16}
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
    model.save_pretrained(tmp_path)
    head = load_frozen_head(str(tmp_path), torch.float32)
    assert torch.equal(head.embedding, model.get_input_embeddings().weight)
    assert torch.equal(head.weight, model.get_output_embeddings().weight)


def test_refusals(tmp_path: Path):
    llama(tmp_path, tied=False)
    weights = tmp_path / "model.safetensors"
    state = load_file(weights)
    head = state.pop("lm_head.weight")
    save_file(state, weights)
    with pytest.raises(UserError, match="unties the LM head, but no tensor"):
        load_frozen_head(str(tmp_path), torch.float32)
    save_file(state | {"lm_head.weight": head.to(torch.float8_e4m3fn)}, weights)
    with pytest.raises(UserError, match=r"stored as torch\.float8"):
        load_frozen_head(str(tmp_path), torch.float32)
    save_file(state | {"lm_head.weight": head[:, :8].clone()}, weights)
    with pytest.raises(UserError, match=r"shape \[50, 8\], but hidden_size is 16"):
        load_frozen_head(str(tmp_path), torch.float32)
    save_file({"norm.weight": torch.ones(4)}, weights)
    with pytest.raises(UserError, match="no tensor ends in any of"):
        load_frozen_head(str(tmp_path), torch.float32)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such model"}))
    with pytest.raises(UserError, match="target "):
        load_frozen_head(str(tmp_path), torch.float32)
