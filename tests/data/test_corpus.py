"""Preparing, caching and mapping a whole data set."""

import io
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chat_tokenizers import CHATML, CHATML_TOKENS, MASK, data_config, make_tokenizer
from safetensors.numpy import load_file

from dflash_mp.config import UserError
from dflash_mp.data import corpus as corpus_module
from dflash_mp.data import ingest
from dflash_mp.data.corpus import cache_key, check_data, load_prepared, prepare
from dflash_mp.data.documents import ARRAYS, Corpus, load_corpus, save_corpus, select
from dflash_mp.data.overlap import copied_share, gram_hashes, shared_prompts
from dflash_mp.data.summary import summary_lines
from dflash_mp.data.template import chat_format
from dflash_mp.progress import progress_bar


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(CHATML, words=["system", "user", "assistant"])


def chat(question, answer, **row):
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **row}


def write(path, rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


@pytest.fixture
def files(tmp_path):
    train = [chat(f"question {n}", f"the answer is {n * 37}") for n in range(12)]
    train += [chat("a", ""), {"odd": 1}, "{broken"]
    heldout = [chat(f"other {n}", f"and so it is {n * 91}") for n in range(4)]
    return {
        "train": write(tmp_path / "train.jsonl", train),
        "heldout": write(tmp_path / "heldout.jsonl", heldout),
        "cache_dir": str(tmp_path / "cache"),
    }


def test_progress_has_a_total(files, tokenizer, monkeypatch):
    log = io.StringIO()
    at_once = {"delay": 0, "mininterval": 0, "file": log}
    monkeypatch.setattr(ingest, "progress_bar", lambda **given: progress_bar(**given | at_once))
    prepare(data_config(**files), tokenizer, MASK)
    assert "tokenising data.train: 100%" in log.getvalue()
    assert "15/15" in log.getvalue()
    assert "4/4" in log.getvalue()


def test_rows_are_all_accounted_for(files, tokenizer):
    prepared = prepare(data_config(**files), tokenizer, MASK)
    train = prepared.summary["train"]
    assert train["rows_read"] == 15 == train["trained"] + train["dropped"]
    assert train["dropped_by_reason"] == {
        "no_supervised_tokens": 1,
        "unknown_shape": 1,
        "bad_json": 1,
    }
    assert train["examples"]["unknown_shape"] == ["train.jsonl:14: keys odd"]
    assert train["examples"]["bad_json"][0].startswith("train.jsonl:15: ")
    assert train["documents"] == len(prepared.train) == 12
    assert train["tokens"] == prepared.train.lengths.sum()
    assert train["supervised_tokens"] == prepared.train.loss_mask.sum()
    assert sum(train["length_histogram"].values()) == 12
    assert prepared.summary["heldout"]["trained"] == len(prepared.heldout) == 4
    lines = summary_lines(prepared.summary)
    assert "15 rows = 12 trained + 3 dropped" in lines[0]
    short = prepare(data_config(**files, max_length=40), tokenizer, MASK).summary
    assert "0 repaired, 12 truncated; 12 documents" in summary_lines(short)[0]
    assert any("dropped 1 unknown_shape, such as train.jsonl:14" in line for line in lines)
    assert json.loads((prepared.folder / "summary.json").read_text()) == prepared.summary


def test_documents_and_their_rows(files, tokenizer):
    prepared = prepare(data_config(**files), tokenizer, MASK)
    corpus = prepared.train
    assert corpus.rows.tolist() == list(range(12))
    ids, mask = corpus.document(5)
    text = tokenizer.decode(ids)
    assert text.endswith("<|im_start|>assistant\nthe answer is 185<|im_end|>")
    assert tokenizer.decode(ids[mask == 1]) == "the answer is 185<|im_end|>"
    assert corpus.prompt(5).tolist() == ids[mask == 0].tolist()
    assert corpus.response(5).tolist() == ids[mask == 1].tolist()
    # Mapped, not read.
    assert isinstance(corpus.input_ids, np.memmap)
    loaded = load_file(prepared.folder / "train.safetensors")
    for name, dtype in ARRAYS.items():
        assert loaded[name].dtype == dtype
        assert np.array_equal(loaded[name], getattr(corpus, name))
    assert np.array_equal(load_prepared(prepared.folder).train.input_ids, corpus.input_ids)


def test_second_run_tokenises_nothing(files, tokenizer, monkeypatch):
    data = data_config(**files)
    first = prepare(data, tokenizer, MASK)
    monkeypatch.setattr(corpus_module, "ingest", None)
    again = prepare(data, tokenizer, MASK)
    assert again.folder == first.folder
    assert again.summary == first.summary
    # Another batch size packs the same documents.
    assert prepare(replace(data, tokens_per_batch=1024), tokenizer, MASK).folder == first.folder


def test_key_covers_everything_that_matters(files, tokenizer, tmp_path, monkeypatch):
    data = data_config(**files)

    def key(data=data, tokenizer=tokenizer, mask=MASK):
        chat = chat_format(tokenizer, data, mask)
        return cache_key(data, *check_data(data), chat)

    keys = [key()]
    assert keys == [key()]
    for change in (
        {"max_length": 99},
        {"over_length": "split"},
        {"min_supervised_tokens": 3},
        {"last_turn_only": True},
        {"train_thinking": False},
        {"control_tokens": "escape"},
        {"max_bad_fraction": 0.2},
        {"near_copy_threshold": 0.7},
        {"columns": {"prompt": "q"}},
        {"roles": {"q": "user"}},
        {"template_kwargs": {"enable_thinking": True}},
        {"train": [{"path": files["train"], "weight": 2}]},
        {"train": [files["train"], files["heldout"]]},
        {"heldout": None},
    ):
        keys.append(key(replace(data, **change)))
    other = tmp_path / "other.jinja"
    other.write_text(CHATML.replace("kind", "mean"))
    keys.append(key(replace(data, chat_template=str(other))))
    keys.append(key(tokenizer=make_tokenizer(CHATML, words=["system", "user"])))
    more = [*CHATML_TOKENS, "<|other|>"]
    keys.append(key(tokenizer=make_tokenizer(CHATML, more, ["system", "user", "assistant"])))
    keys.append(key(mask=0))
    # Same length, same time of change: only the content tells.
    path = Path(files["train"])
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[40] = ord("X")
    path.write_bytes(bytes(content))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    keys.append(key())
    monkeypatch.setattr(corpus_module, "CODE", ("sources",))
    keys.append(key())
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "seal.json").unlink(),
        lambda folder: (folder / "train.safetensors").unlink(),
        lambda folder: os.truncate(folder / "train.safetensors", 300),
        lambda folder: (folder / "summary.json").write_text("{}"),
        lambda folder: (folder / "seal.json").write_text("{"),
        lambda folder: flip_last_byte(folder / "train.safetensors"),
        lambda folder: (folder / "seal.json").write_text(
            (folder / "seal.json").read_text().replace('"key": "', '"key": "0')
        ),
    ],
)
def test_damaged_caches_are_made_again(files, tokenizer, damage, caplog):
    data = data_config(**files)
    first = prepare(data, tokenizer, MASK)
    ids, summary = np.array(first.train.input_ids), first.summary
    damage(first.folder)
    again = prepare(data, tokenizer, MASK)
    assert "preparing again" in caplog.text
    assert np.array_equal(again.train.input_ids, ids)
    assert again.summary == summary


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def test_work_of_a_killed_process_is_not_used(files, tokenizer):
    data = data_config(**files)
    first = prepare(data, tokenizer, MASK)
    ids = np.array(first.train.input_ids)
    unfinished = first.folder.with_name(first.folder.name + ".unfinished")
    shutil.move(first.folder, unfinished)
    (unfinished / "seal.json").unlink()
    assert np.array_equal(prepare(data, tokenizer, MASK).train.input_ids, ids)
    assert not unfinished.exists()


def test_two_processes_that_want_the_same_do_it_once(files, tokenizer, monkeypatch):
    data = data_config(**files)
    done = []

    def slow_ingest(*arguments):
        time.sleep(0.2)
        done.append(arguments[0])
        return ingest.ingest(*arguments)

    monkeypatch.setattr(corpus_module, "ingest", slow_ingest)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(prepare, data, tokenizer, MASK) for _ in range(3)]
        folders = {future.result().folder for future in futures}
    assert len(folders) == 1
    assert sorted(done) == ["data.heldout", "data.train"]


def test_nothing_is_left_of_a_failed_run(files, tokenizer, tmp_path):
    path = write(tmp_path / "bad.jsonl", [chat("a", ""), chat("b", ""), {"odd": 1}])
    data = data_config(**{**files, "train": path, "max_bad_fraction": 1.0})
    with pytest.raises(UserError, match="none of 3 rows can be trained on") as error:
        prepare(data, tokenizer, MASK)
    message = str(error.value)
    assert "2 no_supervised_tokens (bad.jsonl:1" in message
    assert "1 unknown_shape (bad.jsonl:3" in message
    assert "\n" not in message
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]


def test_refusals(files, tokenizer, tmp_path):
    def refused(rows, message, **changes):
        path = write(tmp_path / "rows.jsonl", rows)
        with pytest.raises(UserError, match=message):
            prepare(data_config(**{**files, "train": path, **changes}), tokenizer, MASK)

    good = [chat(f"q {n}", f"a {n}") for n in range(8)]
    refused([*good, "{", "{"], "2 of 10 lines are unreadable, more than data.max_bad_fraction=0.1")
    refused([], "the files hold no rows")
    # Most rows failing in the same way speaks against the template, not against the rows.
    refused([*good, *[chat("q", " ")] * 9], "9 of 17 rows fail with the chat template of")
    with pytest.raises(UserError, match="there is no file"):
        prepare(data_config(**{**files, "heldout": "none.jsonl"}), tokenizer, MASK)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data.cache_dir: cannot write"):
        prepare(data_config(**{**files, "cache_dir": str(tmp_path / "file")}), tokenizer, MASK)


def test_sources_keep_their_numbers_and_weights(files, tokenizer, tmp_path):
    more = write(tmp_path / "more.jsonl", [chat("more", "of this"), chat("and", "of that")])
    spec = [{"path": files["train"], "weight": 0.5}, {"path": more, "weight": 3}]
    train = prepare(data_config(**{**files, "train": spec}), tokenizer, MASK).train
    assert train.sources.tolist() == [0] * 12 + [1] * 2
    assert train.weights.tolist() == [0.5] * 12 + [3] * 2
    # Rows are numbered over all sources, dropped rows included.
    assert train.rows.tolist() == [*range(12), 15, 16]
    assert prepare(data_config(**files), tokenizer, MASK).train.weights is None


@pytest.mark.slow
def test_all_cores_find_the_same_as_one(files, tokenizer, monkeypatch):
    data = data_config(**files)
    one = prepare(data, tokenizer, MASK)
    arrays = {name: np.array(getattr(one.train, name)) for name in ARRAYS}
    summary = one.summary
    shutil.rmtree(one.folder)
    monkeypatch.setattr(ingest, "ROWS_PER_CHUNK", 4)
    monkeypatch.setattr(ingest, "ROWS_FOR_MANY_CORES", 0)
    many = prepare(data, tokenizer, MASK)
    for name, array in arrays.items():
        assert np.array_equal(getattr(many.train, name), array)
    assert many.summary == summary


def small_corpus(documents):
    """A corpus of (prompt, response) pairs of ids."""
    ids = [list(prompt) + list(response) for prompt, response in documents]
    mask = [[0] * len(prompt) + [1] * len(response) for prompt, response in documents]
    return Corpus(
        np.array([i for document in ids for i in document], np.int32),
        np.array([m for document in mask for m in document], np.uint8),
        np.cumsum([0, *map(len, ids)]),
        np.zeros(len(ids), np.int32),
        np.arange(len(ids)),
    )


def test_copied_share_against_plain_sets():
    """Twin: the largest share of distinct runs of eight tokens, by nested loops over sets."""
    rng = np.random.default_rng(0)

    def response():
        return rng.integers(0, 3, rng.integers(1, 40)).tolist()

    train = [([7], response()) for _ in range(60)]
    heldout = [([8], response()) for _ in range(40)]
    # Pieces of training responses, so that all shares occur.
    heldout += [([8], train[i][1][: 5 + i] + response()) for i in range(30)]

    def grams(ids):
        if len(ids) < 8:
            return {("whole", *ids)}
        return {tuple(ids[i : i + 8]) for i in range(len(ids) - 7)}

    expected = [
        max(len(grams(held) & grams(seen)) / len(grams(held)) for _, seen in train)
        for _, held in heldout
    ]
    found = copied_share(small_corpus(heldout), small_corpus(train))
    assert found == pytest.approx(expected)
    assert 0 < np.mean(found) < 1


def test_short_responses_are_copies_only_when_whole():
    train = small_corpus([([1], [5, 6, 2]), ([1], [9, 5, 7, 2, 9, 9, 9, 9, 9])])
    heldout = small_corpus([([3], [5, 6, 2]), ([3], [5, 7, 2]), ([3], [6, 2])])
    assert copied_share(heldout, train).tolist() == [1, 0, 0]
    assert len(np.unique([gram_hashes(np.array(ids)) for ids in ([1], [2], [0])])) == 3
    assert shared_prompts(small_corpus([([1], [2]), ([1, 1], [2])]), train).tolist() == [
        True,
        False,
    ]
    empty = small_corpus([])
    assert copied_share(empty, train).tolist() == []
    assert copied_share(heldout, empty).tolist() == [0, 0, 0]
    assert shared_prompts(heldout, empty).tolist() == [False] * 3


def test_held_out_rows_that_training_gives_away(files, tokenizer, tmp_path):
    long = "the answer is found by adding one to the number before it, again and again"
    train = write(tmp_path / "t.jsonl", [chat("one", long), chat("two", "something else")])
    rows = [
        chat("three", "a text of its own that shares nothing with any of them"),
        chat("one", "the prompt occurs in training"),
        chat("four", long),
        chat("five", long[:60] + " but then it goes on in its own way"),
        chat("six", long[:25] + " and then all of the rest is different from training"),
    ]
    heldout = write(tmp_path / "h.jsonl", rows)
    config = {**files, "train": train, "heldout": heldout}
    prepared = prepare(data_config(**config), tokenizer, MASK)
    part = prepared.summary["heldout"]
    assert part["dropped_by_reason"] == {"near_copy_of_training": 2, "prompt_in_training": 1}
    assert [e.split(":")[1] for e in part["examples"]["near_copy_of_training"]] == ["3", "4"]
    assert part["rows_read"] == 5 == part["trained"] + part["dropped"]
    assert prepared.heldout.rows.tolist() == [0, 4]
    assert "50%" in part["rule"]
    stricter = prepare(data_config(**config, near_copy_threshold=0.2), tokenizer, MASK)
    assert stricter.heldout.rows.tolist() == [0]
    looser = prepare(data_config(**config, near_copy_threshold=1.0), tokenizer, MASK)
    assert looser.heldout.rows.tolist() == [0, 3, 4]
    everything = prepare(data_config(**config, near_copy_threshold=None), tokenizer, MASK)
    assert everything.heldout.rows.tolist() == [0, 1, 2, 3, 4]
    assert "nothing was removed" in everything.summary["heldout"]["rule"]


def test_select_and_save(tmp_path):
    corpus = small_corpus([([1], [2, 3]), ([4], [5]), ([6, 7], [8])])
    kept = select(corpus, np.array([True, False, True]))
    save_corpus(kept, tmp_path / "kept.safetensors")
    loaded = load_corpus(tmp_path / "kept.safetensors")
    assert loaded.input_ids.tolist() == [1, 2, 3, 6, 7, 8]
    assert loaded.loss_mask.tolist() == [0, 1, 1, 0, 0, 1]
    assert loaded.offsets.tolist() == [0, 3, 6]
    assert loaded.rows.tolist() == [0, 2]
    save_corpus(select(corpus, np.zeros(3, bool)), tmp_path / "none.safetensors")
    assert len(load_corpus(tmp_path / "none.safetensors")) == 0
