"""The shipped sets with the default target's tokenizer, and a large set in bounded memory."""

import json
import random

import pytest
from chat_tokenizers import CHATML, MASK, make_tokenizer
from hydra import compose, initialize_config_dir

from dflash_mp.bench.data import Memory
from dflash_mp.config import TrainConfig, config_dir, to_config
from dflash_mp.data import ingest
from dflash_mp.data.corpus import prepare
from dflash_mp.data.packing import fill, pack

pytestmark = pytest.mark.slow

GIB = 1 << 30


def configured(*overrides):
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return to_config(compose("train", list(overrides)), TrainConfig).data


@pytest.fixture(scope="module")
def real_tokenizer():
    from transformers import AutoTokenizer

    from dflash_mp.target.smollm2 import converted_folder

    return AutoTokenizer.from_pretrained(converted_folder())


@pytest.mark.parametrize(("name", "held_out"), [("narrow", 30), ("mixed", 30)])
def test_shipped_sets(real_tokenizer, name, held_out, tmp_path):
    data = configured(f"data={name}")
    mask = real_tokenizer.convert_tokens_to_ids("<empty_output>")
    prepared = prepare(data, real_tokenizer, mask, tmp_path)
    train, heldout = prepared.summary["train"], prepared.summary["heldout"]
    assert train["dropped"] == train["repaired"] == 0
    assert set(heldout["dropped_by_reason"]) <= {"near_copy_of_training", "prompt_in_training"}
    assert heldout["trained"] >= held_out
    lengths = prepared.train.lengths
    for epoch in range(4):
        packs = pack(lengths, data.tokens_per_batch, 0, epoch)
        filled = fill(lengths, packs, data.tokens_per_batch)
        assert filled >= 0.95, f"{filled:.3f} of {data.tokens_per_batch} slots are filled"


@pytest.mark.timeout(900)
def test_100_000_rows_in_bounded_memory(tmp_path, monkeypatch):
    rng = random.Random(0)
    words = [a + b + c for a in "bdfglmnprs" for b in "aeiou" for c in "lnrt"]

    def text():
        return " ".join(rng.choices(words, k=rng.randint(5, 25)))

    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for _ in range(100_000):
            turns = [{"role": role, "content": text()} for role in ("user", "assistant")]
            file.write(json.dumps({"messages": turns}) + "\n")
    tokenizer = make_tokenizer(CHATML, words=[*words, *(f" {word}" for word in words)])
    data = configured("data=jsonl", f"data.train={path}")
    with Memory() as memory:
        prepared = prepare(data, tokenizer, MASK, tmp_path / "cache")
    assert prepared.summary["train"]["trained"] == 100_000
    assert memory.peak < 1.5 * GIB
    # From the cache: the rows are read only to see that they are the same.
    with monkeypatch.context() as patch:
        patch.setattr(ingest, "process_rows", None)
        assert len(prepare(data, tokenizer, MASK, tmp_path / "cache").train) == 100_000
