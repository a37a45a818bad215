"""The data report: what it counts, and the score that tells own text from foreign text."""

import json
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_mp.config import UserError, config_dir, to_config
from dflash_mp.data.on_policy import on_policy_score
from dflash_mp.data.report import ReportConfig, report


def run(*overrides):
    with initialize_config_dir(config_dir(), version_base="1.3"):
        raw = compose("report", list(overrides))
    config = to_config(raw, ReportConfig)
    report(config, None)


def answer_greedily(folder, rows):
    """The target's own greedy answers, by the plainest loop there is."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answered = []
    for row in rows:
        asked = row["messages"][:1]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
        ids = list(prompt)
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        text = tokenizer.decode(ids[len(prompt) :])
        messages = [*asked, {"role": "assistant", "content": text}]
        exact = {"response_token_ids": ids[len(prompt) :], "finish_reason": "length"}
        answered.append({"messages": messages, **exact})
    return answered


@pytest.fixture
def common(tiny_target, tmp_path):
    return [
        f"target.name={tiny_target}",
        "data=jsonl",
        "data.max_length=64",
        "data.tokens_per_batch=128",
        f"data.cache_dir={tmp_path / 'cache'}",
        f"output={tmp_path / 'report'}",
    ]


class Tags(HTMLParser):
    """Refuses elements that are closed in another order than opened."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.seen = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_report_of_foreign_text(common, conversations, heldout, tmp_path, capsys):
    rows = conversations.read_text() + '{"text": "<x>&"}\n'
    train = tmp_path / "train.jsonl"
    train.write_text(rows)
    run(*common, f"data.train={train}", f"data.heldout={heldout}", "score_documents=20")
    shown = capsys.readouterr().out
    assert "25 rows = 24 trained + 1 dropped" in shown
    assert "WARNING: on-policy score" in shown
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    assert found["train"]["trained"] == 24
    assert found["heldout"]["rows_read"] == 5
    assert found["train"]["dropped_by_reason"] == {"preformatted_text": 1}
    assert 0.5 < found["packing"]["fill"] <= 1
    assert found["on_policy"]["documents"] == 20
    page = (tmp_path / "report" / "report.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.seen.count("svg") == 3
    assert "train.jsonl:25" in page
    assert "<script" not in page
    assert 'href="http' not in page
    assert "src=" not in page


def test_own_text_scores_one(common, tiny_target, conversations, tmp_path, capsys):
    rows = [json.loads(line) for line in conversations.read_text().splitlines()]
    train = tmp_path / "own.jsonl"
    answered = answer_greedily(tiny_target, rows)
    train.write_text("".join(json.dumps(row) + "\n" for row in answered))
    run(*common, f"data.train={train}", "score_documents=100")
    found = json.loads((tmp_path / "report" / "report.json").read_text())["on_policy"]
    # A random target may say its mask token; such rows are dropped.
    assert found["tokens"] == 8 * found["documents"] > 40
    assert found["agreement"] > 0.99
    assert 0 < found["expected"] < 1
    assert "WARNING" not in capsys.readouterr().out
    assert min(found["by_document"]) > 0.8


def test_score_by_hand(tiny_target):
    """Twin: top-1 and its probability from full logits, token by token."""
    from test_corpus import small_corpus

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    model.requires_grad_(False)
    rng = np.random.default_rng(0)
    documents = [
        (rng.integers(0, 30, 5).tolist(), rng.integers(0, 30, size).tolist()) for size in (4, 9, 1)
    ]
    # A document may begin with a supervised token, which no logits stand for.
    documents.append(([], [7, 8, 9]))
    score = on_policy_score(model, small_corpus(documents), 10, seed=0)
    hits, probabilities = [], []
    for prompt, response in documents:
        ids = prompt + response
        logits = model(torch.tensor([ids])).logits[0]
        for position in range(max(len(prompt), 1), len(ids)):
            best = logits[position - 1].softmax(-1).max(-1)
            hits.append(int(best.indices) == ids[position])
            probabilities.append(float(best.values))
    assert score.tokens == len(hits) == 16
    assert score.agreement == pytest.approx(np.mean(hits))
    assert score.expected == pytest.approx(np.mean(probabilities))
    assert score.documents == 4


def test_without_score_no_target_is_loaded(common, conversations, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dflash_mp.data.report.load_target", None)
    run(*common, f"data.train={conversations}", "score_documents=0")
    assert json.loads((tmp_path / "report" / "report.json").read_text())["on_policy"] is None
    assert "on-policy" not in capsys.readouterr().out
    with pytest.raises(UserError, match="score_documents=-1: must not be negative"):
        run(*common, f"data.train={conversations}", "score_documents=-1")
