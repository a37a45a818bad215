"""Reading files of every kind, broken ones included."""

import gzip
import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_mp.config import UserError
from dflash_mp.data.conversations import parse_line
from dflash_mp.data.sources import (
    Dropped,
    Source,
    content_hash,
    count_rows,
    read_rows,
    resolve_sources,
)

ROWS = [{"prompt": f"question {i}\u2028\x85", "completion": "é" * (i + 1)} for i in range(5)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def source(path):
    (found,) = resolve_sources("data.train", str(path), "train")
    return found


def read(path):
    """(where, row or reason) of each row."""
    result = []
    for raw in read_rows(source(path)):
        try:
            result.append((raw.where, parse_line(raw)))
        except Dropped as dropped:
            result.append((raw.where, dropped.reason))
    return result


def zstd(content):
    return pa.Codec("zstd").compress(content, asbytes=True)


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)


CONTENTS = {
    "a.jsonl": LINES,
    "a.ndjson": LINES,
    "bom.jsonl": b"\xef\xbb\xbf" + LINES,
    "crlf.jsonl": LINES.replace(b"\n", b"\r\n"),
    "no_last_newline.jsonl": LINES[:-1],
    "a.jsonl.gz": gzip.compress(LINES),
    "a.jsonl.zst": zstd(LINES),
    "array.json": json.dumps(ROWS, indent=1).encode(),
    "array_in_a_line.json": json.dumps(ROWS, ensure_ascii=False).encode(),
    "array.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "array.json.zst": zstd(json.dumps(ROWS).encode()),
    "lines_in_disguise.json": LINES,
    "object.json": json.dumps({"version": 1, "data": ROWS}, indent=2).encode(),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_formats(tmp_path, name):
    (tmp_path / name).write_bytes(CONTENTS[name])
    assert [row for _, row in read(tmp_path / name)] == ROWS


def test_rows_are_counted_where_that_is_cheap(tmp_path):
    write_parquet(tmp_path / "b.parquet", ROWS)
    (tmp_path / "a.jsonl").write_bytes(b"\n" + LINES)
    sources = resolve_sources("data.train", str(tmp_path), "train")
    assert count_rows(sources) == len(read(tmp_path)) == 10
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(LINES))
    assert count_rows(resolve_sources("data.train", str(tmp_path), "train")) is None
    (tmp_path / "d.json").write_text(json.dumps(ROWS))
    assert count_rows(resolve_sources("data.train", str(tmp_path / "d.json"), "train")) is None
    assert count_rows([Source("owner/name", 1.0, ())]) is None


def test_parquet_and_folders(tmp_path):
    write_parquet(tmp_path / "b.parquet", ROWS)
    assert read(tmp_path / "b.parquet") == [
        (f"b.parquet:{number}", row) for number, row in enumerate(ROWS, 1)
    ]
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.jsonl").write_bytes(LINES)
    (tmp_path / ".hidden.jsonl").write_bytes(LINES)
    (tmp_path / "notes.txt").write_text("no data")
    assert [where for where, _ in read(tmp_path)] == [
        *(f"b.parquet:{n}" for n in range(1, 6)),
        *(f"a.jsonl:{n}" for n in range(1, 6)),
    ]


def test_places_are_lines(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\n" + LINES[:-1] + b"\n  \n" + LINES)
    assert [where for where, _ in read(tmp_path / "a.jsonl")] == [
        f"a.jsonl:{n}" for n in (2, 3, 4, 5, 6, 8, 9, 10, 11, 12)
    ]
    (tmp_path / "a.json").write_text(json.dumps(ROWS[:3], indent=1))
    assert [where for where, _ in read(tmp_path / "a.json")] == [
        "a.json:2",
        "a.json:6",
        "a.json:10",
    ]


def test_a_broken_line_costs_one_line(tmp_path):
    lines = LINES.split(b"\n")
    lines[1] = lines[1][:20]
    lines[3] = b"\xff\xfe"
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    found = read(tmp_path / "a.jsonl")
    assert found[1] == ("a.jsonl:2", "bad_json")
    assert found[3] == ("a.jsonl:4", "bad_encoding")
    assert [row for _, row in found if isinstance(row, dict)] == [ROWS[0], ROWS[2], ROWS[4]]


@pytest.mark.parametrize("extra", [0, 3_000_000])
def test_a_cut_array_loses_only_what_is_cut(tmp_path, extra):
    # With long rows the array spans several reads.
    rows = [*ROWS, {"prompt": "x" * extra, "completion": "y"}, *ROWS, {"prompt": "last"}]
    text = json.dumps(rows, indent=0)
    (tmp_path / "a.json").write_text(text[:-10])
    found = read(tmp_path / "a.json")
    assert [row for _, row in found[:-1]] == rows[:-1]
    where, reason = found[-1]
    assert reason == "bad_json"
    assert where == f"a.json:{text[: text.index('last')].count(chr(10))}"
    (tmp_path / "a.json").write_text("[1, {}, 2]")
    assert [row for _, row in read(tmp_path / "a.json")] == ["not_an_object", {}, "not_an_object"]


@pytest.mark.parametrize("cut", [20, 60])
def test_a_cut_archive_keeps_what_could_be_read(tmp_path, cut):
    many = LINES * 2000
    for name, content in (("a.jsonl.gz", gzip.compress(many)), ("a.jsonl.zst", zstd(many))):
        (tmp_path / name).write_bytes(content[:-cut])
        found = read(tmp_path / name)
        assert found[-1][1] in ("damaged_file", "bad_json")
        assert all(row in ROWS for _, row in found[:-2])


def test_a_broken_parquet_file(tmp_path):
    write_parquet(tmp_path / "a.parquet", ROWS)
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-30])
    assert read(tmp_path / "a.parquet") == [("a.parquet:0", "damaged_file")]


def test_empty_files(tmp_path):
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_bytes(b"\n")
        assert read(tmp_path / name) == []


def test_several_sources_with_weights(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl").write_bytes(LINES[:-1])
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    found = resolve_sources("data.train", [{"path": a, "weight": 2}, b, "narrow"], "eval")
    assert [s.weight for s in found] == [2.0, 1.0, 1.0]
    assert found[2].files[0].name == "narrow_eval.jsonl"
    assert content_hash(found[0]) != content_hash(found[1])
    assert content_hash(found[0]) == content_hash(source(a))
    assert resolve_sources("data.heldout", None, "eval") == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("missing.jsonl", "there is no file or folder missing.jsonl"),
        ("sub/missing.jsonl.gz", "there is no file"),
        ("../missing", "there is no file"),
        ([], "is an empty list"),
        ([{"path": "narrow", "weight": 0}], "weight 0 of narrow must be a positive number"),
        ([{"path": "narrow", "weight": "much"}], "must be a positive number"),
        ([{"path": "narrow", "wait": 1}], "unknown .*wait"),
        ([{"weight": 1}], "has no path"),
        (5, "has no path"),
    ],
)
def test_bad_names_are_refused_before_anything_is_read(spec, message):
    with pytest.raises(UserError, match=message) as error:
        resolve_sources("data.train", spec, "train")
    assert str(error.value).startswith("data.train")


def test_folders_and_files_without_data(tmp_path):
    (tmp_path / "notes.txt").write_text("no data")
    with pytest.raises(UserError, match="holds no file ending in"):
        resolve_sources("data.train", str(tmp_path), "train")
    with pytest.raises(UserError, match="must end in one of"):
        resolve_sources("data.train", str(tmp_path / "notes.txt"), "train")


def test_a_name_without_a_file_is_a_hub_dataset(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub = source("someone/chats")
    assert hub.is_hub
    for use in (lambda: list(read_rows(hub)), lambda: content_hash(hub)):
        with pytest.raises(UserError, match="someone/chats is no file here and could not be read"):
            use()


def test_hub_datasets_are_read_by_split(tmp_path):
    # The library reads a local folder the way it reads the hub.
    (tmp_path / "train.jsonl").write_bytes(LINES)
    (tmp_path / "test.jsonl").write_bytes(LINES[: LINES.index(b"\n") + 1])
    hub = Source(str(tmp_path), 1.0, (), "test")
    assert [raw.data for raw in read_rows(hub)] == ROWS[:1]
    assert [raw.data for raw in read_rows(replace(hub, split="train"))] == ROWS
    assert content_hash(hub) != content_hash(replace(hub, split="train"))
    with pytest.raises(UserError, match="split other"):
        list(read_rows(replace(hub, split="other")))


def test_keys_that_arrow_adds_are_taken_away(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"a": 1}]},
        {"messages": [{"role": "user", "name": "b"}], "tools": [{"b": [{"c": 2}, {"d": 3}]}]},
        {"prompt": "x", "completion": "y"},
    ]
    every_key = dict.fromkeys(("messages", "tools", "prompt", "completion"))
    write_parquet(tmp_path / "a.parquet", [{**every_key, **row} for row in rows])
    assert [row for _, row in read(tmp_path / "a.parquet")] == rows
