import json
from itertools import product
from pathlib import Path

import pytest

import dflash_mp.data
from dflash_mp.data.prompts import SIZES, prompt_rows

FOLDER = Path(dflash_mp.data.__file__).parent / "samples"
LEAST = {"narrow_train": 440, "narrow_eval": 80, "mixed_train": 200, "mixed_eval": 40}
END_OF_TURN = 2


def read(name):
    text = (FOLDER / f"{name}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.removesuffix("\n").split("\n")]


def prompts_of(rows):
    return [row["messages"][0]["content"] for row in rows]


@pytest.mark.parametrize("name", SIZES)
def test_rows_are_well_formed(name):
    rows = read(name)
    assert len(rows) == SIZES[name] >= LEAST[name]
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert list(row) == ["id", "messages", "finish_reason", "response_token_ids", "source"]
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
        ids = row["response_token_ids"]
        assert 0 < len(ids) <= 96
        assert all(isinstance(i, int) and 0 <= i < 49152 for i in ids)
        assert END_OF_TURN not in ids
        assert row["finish_reason"] in ("stop", "length")
        assert row["finish_reason"] == "stop" or len(ids) == 96
        assert row["source"] == name


@pytest.mark.parametrize("name", SIZES)
def test_rows_answer_the_prompts_of_the_grammar(name):
    assert prompts_of(read(name)) == [row["messages"][0]["content"] for row in prompt_rows(name)]


def test_no_prompt_appears_twice_or_on_both_sides():
    prompts = {name: prompts_of(read(name)) for name in SIZES}
    for name, texts in prompts.items():
        assert len(set(texts)) == len(texts), name
    plain = {name: {" ".join(t.lower().split()) for t in texts} for name, texts in prompts.items()}
    for train, heldout in product(("narrow_train", "mixed_train"), ("narrow_eval", "mixed_eval")):
        assert not plain[train] & plain[heldout]


def test_at_least_sixty_heldout_responses_are_new():
    """No single training response holds 80 % of their token 4-grams."""

    def grams(row):
        ids = row["response_token_ids"]
        return {tuple(ids[i : i + 4]) for i in range(len(ids) - 3)}

    train = [grams(row) for row in read("narrow_train")]
    heldout = [grams(row) for row in read("narrow_eval")]
    nearest = [max(len(own & other) / len(own) for other in train) for own in heldout]
    assert sum(share < 0.8 for share in nearest) >= 60


@pytest.mark.slow
def test_ids_decode_to_the_text():
    from transformers import AutoTokenizer

    from dflash_mp.target.smollm2 import converted_folder

    tokenizer = AutoTokenizer.from_pretrained(converted_folder())
    for name in SIZES:
        for row in read(name):
            text = tokenizer.decode(row["response_token_ids"], skip_special_tokens=True)
            assert text == row["messages"][1]["content"]
