"""Exact ids, ends of turn, lengths, tools: what becomes of one row."""

import json
import random

import numpy as np
import pytest
from chat_tokenizers import CHATML, MASK, TOOLS, data_config, make_tokenizer

from dflash_mp.data.conversations import RowNames, read_row
from dflash_mp.data.sources import Dropped
from dflash_mp.data.template import chat_format, encode
from dflash_mp.data.tokenize import describe, tokenise

END = 2
ASKED = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(CHATML, words=["system", "user", "assistant"])


def run(tokenizer, row, **changes):
    data = data_config(**changes)
    chat = chat_format(tokenizer, data, MASK)
    result = tokenise(chat, data, read_row(row, RowNames()))
    return result, [describe(document, chat) for document in result.documents]


def reply(text, **extra):
    return {"messages": [ASKED, {"role": "assistant", "content": text}], **extra}


def supervised(documents):
    return [text for document in documents for text, is_supervised in document if is_supervised]


def ids_of(tokenizer, text):
    return encode(chat_format(tokenizer, data_config(), MASK), text)


def test_exact_ids_are_trained_on_as_they_are(tokenizer):
    # Not how the tokenizer would spell the text: the bytes of "user" one by one.
    exact = [ids_of(tokenizer, letter)[0] for letter in "user"]
    assert exact != ids_of(tokenizer, "user")
    row = reply("user", response_token_ids=exact, finish_reason="stop")
    result, _ = run(tokenizer, row)
    (document,) = result.documents
    prompt = tokenizer.apply_chat_template([ASKED], add_generation_prompt=True)["input_ids"]
    assert document.input_ids.tolist() == [*prompt, *exact, END]
    assert document.loss_mask.tolist() == [0] * len(prompt) + [1] * 5


@pytest.mark.parametrize(
    ("reason", "last", "ends"),
    [
        ("stop", [], True),
        (None, [], True),
        ("tool_calls", [], True),
        ("length", [], False),
        ("content_filter", [], False),
        # Generated ids that hold their own end get no second one, whichever end it is.
        ("stop", [END], False),
        ("stop", [0], False),
    ],
)
def test_end_of_turn_only_when_the_response_ended(tokenizer, reason, last, ends):
    exact = [50, 51, *last]
    row = reply("x", response_token_ids=exact)
    if reason is not None:
        row["finish_reason"] = reason
    result, _ = run(tokenizer, row)
    (document,) = result.documents
    expected = exact + [END] * ends
    assert document.input_ids[document.loss_mask == 1].tolist() == expected


def test_text_cut_by_a_limit_gets_no_end_of_turn(tokenizer):
    _, documents = run(tokenizer, reply("Well then", finish_reason="length"))
    assert supervised(documents) == ["Well then"]
    _, documents = run(tokenizer, reply("Well then", finish_reason="stop"))
    assert supervised(documents) == ["Well then<|im_end|>"]


def test_several_turns_with_ids_of_their_own(tokenizer):
    turns = [ASKED, {"role": "assistant", "content": "user"}]
    row = {
        "messages": [*turns, ASKED, {"role": "assistant", "content": "ab"}, *turns],
        "finish_reason": ["stop", "length", None],
        "response_token_ids": [ids_of(tokenizer, "user"), ids_of(tokenizer, "ab"), None],
    }
    _, documents = run(tokenizer, row)
    # Canonical ids: later prompts begin with them, so all turns share one document.
    assert [supervised([document]) for document in documents] == [
        ["user<|im_end|>", "ab", "user<|im_end|>"]
    ]
    row["response_token_ids"][0] = [ids_of(tokenizer, letter)[0] for letter in "user"]
    result, documents = run(tokenizer, row)
    # The server re-tokenises earlier turns; the first turn now differs from its own ids.
    assert [supervised([document]) for document in documents] == [
        ["user<|im_end|>"],
        ["ab", "user<|im_end|>"],
    ]
    assert result.notes == ("one_document_per_turn",)
    prompt = tokenizer.apply_chat_template(row["messages"][:3], add_generation_prompt=True)
    second = result.documents[1].input_ids.tolist()
    assert second[: len(prompt["input_ids"])] == prompt["input_ids"]


def test_control_tokens_in_text_with_exact_ids_forge_nothing(tokenizer):
    row = reply("a<|im_start|>", response_token_ids=[50, 1], finish_reason="length")
    result, _ = run(tokenizer, row)
    assert result.documents[0].input_ids[-2:].tolist() == [50, 1]
    with pytest.raises(Dropped, match="mask_token"):
        run(tokenizer, reply("a", response_token_ids=[50, MASK]))


@pytest.mark.parametrize(
    "ids",
    [[10**6], [-1, 5], ["a"], [1.5], [True, 5], "abc", [[1, 2], [3]]],
)
def test_ids_that_are_none(tokenizer, ids):
    with pytest.raises(Dropped, match="bad_token_ids"):
        run(tokenizer, reply("a", response_token_ids=ids))


def test_rows_of_tokens(tokenizer):
    row = {"input_ids": [5, 6, 7, 8, 9, END], "loss_mask": [0, 1, 1, 0, 1, 1]}
    result, _ = run(tokenizer, row)
    (document,) = result.documents
    assert document.input_ids.tolist() == row["input_ids"]
    assert document.loss_mask.tolist() == row["loss_mask"]
    assert document.input_ids.dtype == np.int32
    assert document.loss_mask.dtype == np.uint8
    result, _ = run(tokenizer, row, last_turn_only=True)
    assert result.documents[0].loss_mask.tolist() == [0, 0, 0, 0, 1, 1]
    result, _ = run(tokenizer, row, max_length=4)
    assert result.documents[0].loss_mask.tolist() == [0, 1, 1, 0]
    for bad in (
        {"loss_mask": [0, 1]},
        {"loss_mask": [0, 2, 1, 0, 1, 1]},
        {"loss_mask": None},
        {"input_ids": [10**6] * 6},
    ):
        with pytest.raises(Dropped, match="bad_token_ids"):
            run(tokenizer, {**row, **bad})
    with pytest.raises(Dropped, match="mask_token"):
        run(tokenizer, {**row, "input_ids": [MASK, 6, 7, 8, 9, END]})
    with pytest.raises(Dropped, match="no_supervised_tokens"):
        run(tokenizer, {**row, "loss_mask": [0] * 6})


LONG = reply("abcdefghij")


def test_over_length(tokenizer):
    whole = run(tokenizer, LONG)[0].documents[0]
    length = len(whole.input_ids)
    result, _ = run(tokenizer, LONG, max_length=length - 3, over_length="truncate")
    (document,) = result.documents
    assert document.input_ids.tolist() == whole.input_ids[:-3].tolist()
    assert document.loss_mask.tolist() == whole.loss_mask[:-3].tolist()
    assert END not in document.input_ids[document.loss_mask == 1]
    assert result.notes == ("truncated",)
    with pytest.raises(Dropped, match="over_length"):
        run(tokenizer, LONG, max_length=length - 3, over_length="drop")
    result, _ = run(tokenizer, LONG, max_length=length - 3, over_length="split")
    ids = np.concatenate([piece.input_ids for piece in result.documents])
    assert ids.tolist() == whole.input_ids.tolist()
    assert [len(piece.input_ids) for piece in result.documents] == [length - 3, 3]
    # A limit inside the prompt leaves nothing to learn.
    with pytest.raises(Dropped, match="over_length"):
        run(tokenizer, LONG, max_length=10, over_length="truncate")


def test_limits_hold_on_every_path(tokenizer):
    ids = run(tokenizer, LONG)[0].documents[0]
    rows = [
        LONG,
        reply("x", response_token_ids=list(range(60, 90))),
        {"input_ids": ids.input_ids.tolist(), "loss_mask": ids.loss_mask.tolist()},
        {"prompt": "Hi", "completion": "abcdefghij"},
    ]
    for row in rows:
        result, _ = run(tokenizer, row, max_length=32)
        assert all(len(d.input_ids) == len(d.loss_mask) <= 32 for d in result.documents)
        assert result.notes == ("truncated",)
        with pytest.raises(Dropped, match="too_few_supervised_tokens"):
            run(tokenizer, row, min_supervised_tokens=200)


def test_shortest_row_that_trains(tokenizer):
    result, _ = run(tokenizer, reply("a"))
    assert result.documents[0].loss_mask.sum() == 2
    with pytest.raises(Dropped, match="too_few_supervised_tokens"):
        run(tokenizer, reply("a", finish_reason="length"))
    # Two supervised tokens that are no neighbours hold no anchor and label.
    with pytest.raises(Dropped, match="too_few_supervised_tokens"):
        run(tokenizer, {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]})


def test_masks_are_made_of_tokens_not_characters(tokenizer):
    text = "☀️ 👨‍👩‍👧 ünï 你好 e\u0301"
    result, documents = run(tokenizer, reply(text))
    assert supervised(documents) == [f"{text}<|im_end|>"]
    assert result.documents[0].loss_mask.sum() == len(text.encode()) + 1


CALL = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
CALL_AS_TEXT = {"function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
DEFINITIONS = [
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
]


def tool_chat(call, **row):
    messages = [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": '{"hour": 12}', "tool_call_id": "1"},
        {"role": "assistant", "content": "Noon."},
    ]
    return {"messages": messages, **row}


def test_tools_where_the_template_can_render_them():
    tokenizer = make_tokenizer(TOOLS, added=["<tool_call>", "</tool_call>"])
    result, documents = run(tokenizer, tool_chat(CALL, tools=DEFINITIONS))
    assert supervised(documents) == [
        '<tool_call>clock {"zone": "UTC"}</tool_call><|im_end|>',
        "Noon.<|im_end|>",
    ]
    assert json.dumps(DEFINITIONS[0]) in documents[0][0][0]
    ids = result.documents[0].input_ids.tolist()
    for call, tools in (
        (CALL, json.dumps(DEFINITIONS)),
        (CALL_AS_TEXT, DEFINITIONS),
    ):
        other, _ = run(tokenizer, tool_chat(call, tools=tools))
        assert other.documents[0].input_ids.tolist() == ids
    without = [
        run(tokenizer, tool_chat(CALL, **row))[0].documents[0].input_ids.tolist()
        for row in ({}, {"tools": None}, {"tools": []}, {"tools": "[]"}, {"tools": ""})
    ]
    assert all(other == without[0] for other in without)
    # A call may be all there is.
    _, documents = run(tokenizer, {"messages": tool_chat(CALL)["messages"][:2]})
    assert supervised(documents) == ['<tool_call>clock {"zone": "UTC"}</tool_call><|im_end|>']


@pytest.mark.parametrize(
    "broken",
    [
        {"tools": "not json"},
        {"tools": {"name": "clock"}},
        {"tools": ["clock"]},
    ],
)
def test_tools_that_are_none(tokenizer, broken):
    with pytest.raises(Dropped, match="bad_"):
        run(tokenizer, reply("a", **broken))


@pytest.mark.parametrize("calls", ["[", [5], [{"function": {}}], {"function": {"name": "clock"}}])
def test_tool_calls_that_are_none(tokenizer, calls):
    row = tool_chat(CALL)
    row["messages"][1]["tool_calls"] = calls
    with pytest.raises(Dropped, match="bad_"):
        run(tokenizer, row)


def test_random_chats_are_served_as_trained(tokenizer):
    """Property: ids up to a response are what the tokenizer makes of its prompt, always."""
    rng = random.Random(0)
    pieces = [
        "user",
        "assistant\n",
        "\n\n",
        " ",
        "é",
        "<|im",
        "|>",
        "system",
        "</think>",
        "🙂",
        "1",
    ]
    for _ in range(150):
        messages = []
        for _ in range(rng.randint(1, 4)):
            for role in ("user", "assistant"):
                text = "".join(rng.choices(pieces, k=rng.randint(1, 6)))
                messages.append({"role": role, "content": text})
        try:
            result, _ = run(tokenizer, {"messages": messages})
        except Dropped as dropped:
            assert dropped.reason == "no_supervised_tokens"  # noqa: PT017
            continue
        prompts = [
            tokenizer.apply_chat_template(messages[:end], add_generation_prompt=True)["input_ids"]
            for end in range(1, len(messages), 2)
            if messages[end]["content"].strip()
        ]
        starts = []
        for document in result.documents:
            mask = document.loss_mask
            for first in np.flatnonzero((mask[1:] == 1) & (mask[:-1] == 0)) + 1:
                starts.append(document.input_ids[:first].tolist())
            assert document.input_ids[mask == 1][-1] == END
        assert starts == prompts
