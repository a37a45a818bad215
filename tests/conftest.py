"""A tiny target with a tokenizer and a chat template, and a way to start real jobs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

torch.set_num_threads(1)
# Children (torchrun, spawn) read it when torch is loaded.
os.environ["OMP_NUM_THREADS"] = "1"

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
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
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


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny target."""
    return make_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 short conversations."""
    return make_conversations(tmp_path_factory.mktemp("data") / "train.jsonl", 24)


@pytest.fixture(scope="session")
def heldout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5 other conversations."""
    return make_conversations(tmp_path_factory.mktemp("data") / "heldout.jsonl", 5, seed=1)


Launch = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def launch(tiny_target: Path, conversations: Path, heldout: Path, tmp_path: Path) -> Launch:
    """Train on the tiny target in real processes; later overrides win.

    ``launch(ranks, *overrides, spawn=False, timeout=120)`` returns the finished launcher with
    its output as text. The run folder is ``tmp_path / "run"`` unless ``output_dir`` is given.
    """
    defaults = [
        f"target.name={tiny_target}",
        f"data.train={conversations}",
        f"data.heldout={heldout}",
        f"data.cache_dir={tmp_path / 'cache'}",
        f"output_dir={tmp_path / 'run'}",
        f"hydra.run.dir={tmp_path / 'hydra'}",
        "data.max_length=64",
        "data.tokens_per_batch=64",
        "data.min_supervised_tokens=2",
        "drafter.block_size=4",
        "drafter.tapped_layers=2",
        "drafter.anchors_per_batch=8",
        "drafter.precision=float32",
        "steps=4",
        "micro_batches_per_step=2",
        "log_interval=1",
        "evaluate.decode_prompts=0",
        "evaluate.max_new_tokens=8",
        "wire.dtype=float32",
        "wire.timeout_s=60",
        "trackers=[]",
    ]

    def run(
        ranks: int, *overrides: str, spawn: bool = False, timeout: float = 120
    ) -> subprocess.CompletedProcess:
        keys = {override.split("=")[0] for override in overrides}
        arguments = [d for d in defaults if d.split("=")[0] not in keys] + list(overrides)
        torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port"]
        command = (
            [sys.executable, "-m", "launch.spawn", "--nproc", str(ranks)]
            if spawn
            else [sys.executable, *torchrun, "0", "-m", "dflash_mp.train"]
        )
        return subprocess.run(
            command + arguments, capture_output=True, text=True, timeout=timeout, check=False
        )

    return run
