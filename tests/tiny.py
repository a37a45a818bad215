"""A tiny random target and random conversations: ``python tests/tiny.py FOLDER`` writes both."""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that make a process a rank."""
TINY_RUN = (
    "data.max_length=64",
    "data.tokens_per_batch=64",
    "data.min_supervised_tokens=2",
    "drafter.block_size=4",
    "target.layer_ids=[0,2]",
    "drafter.tapped_layers=2",
    "drafter.anchors_per_batch=8",
    "drafter.precision=float32",
    "steps=4",
    "micro_batches_per_step=2",
    "log_interval=1",
    "evaluate.decode_prompts=0",
    "evaluate.max_new_tokens=8",
    "wire.dtype=float32",
    "trackers=[]",
)
"""Overrides that make a training of the tiny target last a second."""
SENTENCE = (
    "write a short function that adds two numbers please explain the list of words and sort them "
    "return sum first last item reverse count even odd value text def for in if else print one two"
)
WORDS = SENTENCE.split()
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} "
    "{% if m['role'] == 'assistant' %}<|end|> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def make_tiny_target(folder: Path, seed: int = 0) -> Path:
    """A random 4-layer Qwen3 with a word tokenizer, in a Hugging Face folder."""
    specials = ["<|end|>", "<|mask|>", "<|user|>", "<|assistant|>", "<|system|>", "<unk>"]
    vocabulary = {word: i for i, word in enumerate(specials + sorted(set(WORDS)))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        pad_token="<|end|>",
        mask_token="<|mask|>",
        unk_token="<unk>",
        additional_special_tokens=specials[2:5],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=len(vocabulary),
        max_position_embeddings=256,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
        # Large weights, so that greedy text does not end in a loop of two words.
        initializer_range=0.3,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    # Greedy text of words alone: a special token inside a response would make it unusable.
    model.lm_head.weight.data[: len(specials)] = 0.0
    model.save_pretrained(folder)
    return folder


def make_conversations(path: Path, count: int, seed: int = 0) -> Path:
    """``count`` conversations of random words, of ragged length."""
    generator = torch.Generator().manual_seed(seed)

    def words(low: int, high: int) -> str:
        size = int(torch.randint(low, high, (1,), generator=generator))
        picks = torch.randint(0, len(WORDS), (size,), generator=generator)
        return " ".join(WORDS[i] for i in picks)

    rows = [
        {
            "id": f"row-{i}",
            "messages": [
                {"role": "user", "content": words(3, 9)},
                {"role": "assistant", "content": words(4, 25)},
            ],
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    here = Path(sys.argv[1])
    make_tiny_target(here / "target")
    make_conversations(here / "train.jsonl", 24)
    make_conversations(here / "heldout.jsonl", 5, seed=1)
