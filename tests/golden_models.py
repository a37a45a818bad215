"""The tiny models of ``tests/golden`` and hybrid ones, for tests that decode."""

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from dflash_mp.config import DrafterConfig
from dflash_mp.drafter.checkpoint_format import load_drafter
from dflash_mp.drafter.frozen_head import FrozenHead, load_frozen_head
from dflash_mp.drafter.hf_config import make_drafter_config
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.features import FeatureBatch
from dflash_mp.target.layers import capturing

GOLDEN = Path(__file__).parent / "golden"
TAPPED = (0, 2)


@cache
def golden_target() -> PreTrainedModel:
    """Four layers, random weights, fp32."""
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "target", dtype=torch.float32)
    return model.eval()


@cache
def golden_drafter() -> DFlashDraftModel:
    """Half trained on the target's greedy text, block size 8."""
    return load_drafter(GOLDEN / "draft_trained").eval()


@cache
def golden_head() -> FrozenHead:
    """Embedding and head of the golden target."""
    return load_frozen_head(str(GOLDEN / "target"), torch.float32)


def golden_prompts() -> list[list[int]]:
    """The six prompts the reference decoded."""
    return load_file(GOLDEN / "prompts.safetensors")["prompts"].tolist()


@cache
def hybrid_target() -> Qwen3_5ForCausalLM:
    """A tiny Qwen3.5 text model: three linear-attention layers to one of full attention."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.5,
    )
    return Qwen3_5ForCausalLM(config).float().eval()


def drafter_for(
    target: PreTrainedModel,
    block_size: int = 4,
    mask_token_id: int = 1,
    layer_ids: Sequence[int] = TAPPED,
) -> DFlashDraftModel:
    """An untrained drafter that fits ``target``."""
    shape = DrafterConfig(
        layers=1,
        block_size=block_size,
        tapped_layers=len(layer_ids),
        sliding_layers=0,
        sliding_window=32,
        mask_token_id=mask_token_id,
        anchors_per_batch=8,
        attention="sdpa",
        precision="float32",
    )
    model = DFlashDraftModel(
        make_drafter_config(target.config, shape, list(layer_ids), mask_token_id)
    )
    model.init_weights(seed=0)
    return model.eval()


@torch.no_grad()
def packed_features(
    target: PreTrainedModel,
    documents: list[tuple[list[int], list[int]]],
    padding: int = 0,
    tapped: Sequence[int] = TAPPED,
) -> FeatureBatch:
    """``(prompt, response)`` documents in one row, each read by the target alone."""
    ids, positions, numbers, mask, hidden = [], [], [], [], []
    for number, (prompt, response) in enumerate(documents):
        tokens = prompt + response
        with capturing(target, list(tapped), stop=False) as states:
            target(input_ids=torch.tensor([tokens]))
        ids += tokens
        positions += range(len(tokens))
        numbers += [number] * len(tokens)
        mask += [0] * len(prompt) + [1] * len(response)
        hidden.append(torch.cat([state[0] for state in states], dim=-1))
    width = hidden[0].shape[1]
    return FeatureBatch(
        number=0,
        input_ids=torch.tensor(ids + [0] * padding, dtype=torch.int32),
        position_ids=torch.tensor(positions + [0] * padding, dtype=torch.int32),
        document_ids=torch.tensor(numbers + [-1] * padding, dtype=torch.int32),
        loss_mask=torch.tensor(mask + [0] * padding, dtype=torch.uint8),
        hidden_states=torch.cat([*hidden, torch.zeros(padding, width)]),
    )


def target_folder(folder: Path) -> Path:
    """The golden target with a tokenizer: words ``<0>``..``<511>`` are the ids 0..511."""
    shutil.copytree(GOLDEN / "target", folder, copy_function=shutil.copy)
    words = Tokenizer(WordLevel({f"<{i}>": i for i in range(512)}, unk_token="<0>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<2>", unk_token="<0>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def write_prompts(path: Path, prompts: list[list[int]]) -> Path:
    """A prompts file for ``target_folder``; rows end with a reply, which is to be decoded anew."""
    rows = []
    for prompt in prompts:
        question = {"role": "user", "content": " ".join(f"<{token}>" for token in prompt)}
        rows.append({"messages": [question, {"role": "assistant", "content": "<9> <9>"}]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
