"""Every awkward line ends as ``awkward_expected.tsv`` says, and so do others of its kind."""

import json
from pathlib import Path

import pytest
from chat_tokenizers import data_config, make_tokenizer

from dflash_mp.data.conversations import UNREADABLE
from dflash_mp.data.ingest import process_row
from dflash_mp.data.sources import Dropped, RawRow, read_rows, resolve_sources
from dflash_mp.data.template import chat_format
from dflash_mp.data.tokenize import describe

HERE = Path(__file__).parent
# The chat template of the default target (SmolLM2-135M-Instruct, Apache-2.0).
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MASK = 3


@pytest.fixture(scope="module")
def tokenizer():
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<empty_output>", "<repo_name>"]
    return make_tokenizer(SMOLLM2, control, ["assistant", "system", "user"])


def outcome(tokenizer, raw, mask=MASK, **changes):
    """(TRAIN, REPAIR, DROP or ERROR_LINE, reason or repairs, readable documents)."""
    data = data_config(**{"max_length": 1024, "tokens_per_batch": 1024, **changes})
    chat = chat_format(tokenizer, data, mask)
    result = process_row(chat, data, raw)
    if isinstance(result, Dropped):
        kind = "ERROR_LINE" if result.reason in UNREADABLE else "DROP"
        return kind, result.reason, []
    readable = [describe(document, chat) for document in result.documents]
    return ("REPAIR" if result.repairs else "TRAIN"), result.repairs, readable


def line(value):
    """A row as a line of JSONL."""
    return RawRow("rows.jsonl:1", json.dumps(value).encode() + b"\n")


def chat(*turns, **row):
    """A row of OpenAI messages from (role, content) pairs."""
    return {"messages": [{"role": role, "content": content} for role, content in turns], **row}


def expected_lines():
    lines = (HERE / "awkward_expected.tsv").read_text("utf-8").removesuffix("\n").split("\n")
    return [entry.split("\t") for entry in lines[1:]]


def check_awkward(tokenizer, mask):
    rows = list(read_rows(resolve_sources("x", str(HERE / "awkward.jsonl"), "train")[0]))
    expected = expected_lines()
    assert len(rows) == len(expected) == 28
    for raw, (number, name, kind, comment) in zip(rows, expected, strict=True):
        assert raw.where == f"awkward.jsonl:{number}"
        # Rendered text is trained on only when asked for.
        options = {"columns": {"text": "text"}} if "explicit option" in comment else {}
        assert outcome(tokenizer, raw, mask, **options)[0] == kind, name
        for reason in ("no_supervised_tokens", "template_error"):
            if kind == "DROP" and f"`{reason}`" in comment:
                assert outcome(tokenizer, raw, mask)[1] == reason, name


def test_every_awkward_line(tokenizer):
    check_awkward(tokenizer, MASK)


@pytest.mark.slow
def test_every_awkward_line_with_the_default_target():
    from transformers import AutoTokenizer

    from dflash_mp.target.smollm2 import converted_folder

    real = AutoTokenizer.from_pretrained(converted_folder())
    assert real.get_chat_template() == SMOLLM2
    check_awkward(real, real.convert_tokens_to_ids("<empty_output>"))


HELLO = [("user", "Hello there"), ("assistant", "Good day.")]

KINDS = {
    "plain": ("TRAIN", chat(*HELLO)),
    "plain with a system turn": ("TRAIN", chat(("system", "Speak Latin."), *HELLO)),
    "many turns": ("TRAIN", chat(*HELLO, ("user", "More"), ("assistant", "No."))),
    "sharegpt": (
        "REPAIR",
        {"conversations": [{"from": "human", "value": "A"}, {"from": "gpt", "value": "B"}]},
    ),
    "conversations with role and content": (
        "REPAIR",
        {"conversations": chat(*HELLO)["messages"]},
    ),
    "messages with from and value": (
        "REPAIR",
        {"messages": [{"from": "human", "value": "A"}, {"from": "gpt", "value": "B"}]},
    ),
    "prompt and completion": ("REPAIR", {"prompt": "One", "completion": "Two"}),
    "prompt and response": ("REPAIR", {"prompt": "One", "response": "Two"}),
    "prompt and completion in turns": (
        "REPAIR",
        {
            "prompt": [{"role": "user", "content": "One"}],
            "completion": [{"role": "assistant", "content": "Two"}],
        },
    ),
    "alpaca": ("REPAIR", {"instruction": "Sum", "input": "1 2", "output": "3"}),
    "alpaca without input": ("REPAIR", {"instruction": "Sum", "input": "", "output": "3"}),
    "blank reply": ("no_supervised_tokens", chat(("user", "Hm"), ("assistant", " \n"))),
    "only system": ("no_assistant_turn", chat(("system", "Be."), ("system", "Kind."))),
    "no turns": ("empty_conversation", {"conversations": []}),
    "null turns": ("empty_conversation", {"messages": None, "source": "x"}),
    "no reply": ("no_assistant_turn", chat(("system", "Be."), ("user", "Hm"))),
    "null reply": ("missing_content", chat(("user", "Hm"), ("assistant", None))),
    "null question": ("missing_content", chat(("user", None), ("assistant", "Hm"))),
    "only a reply": ("no_user_turn", chat(("assistant", "Hm"))),
    "replies before the question": (
        "REPAIR",
        chat(("system", "Be."), ("assistant", "First"), ("assistant", "Still"), *HELLO),
    ),
    "reply and then only a question": (
        "no_assistant_turn",
        chat(("assistant", "First"), ("user", "Hm")),
    ),
    "two questions in a row": ("TRAIN", chat(("user", "Well"), *HELLO)),
    "two replies in a row": ("TRAIN", chat(*HELLO, ("assistant", "And more."))),
    "aliases": ("REPAIR", chat(("HUMAN", "A"), ("Bard", "B"))),
    "an unknown role": ("unknown_role:director", chat(("director", "Cut!"), *HELLO)),
    "an unknown role after the last reply": (
        "unknown_role:gpt-4o",
        chat(*HELLO, ("gpt-4o", "Aha")),
    ),
    "a role that is no name": ("unknown_role:3", chat((3, "Cut!"), *HELLO)),
    "trailing questions": ("TRAIN", chat(*HELLO, ("user", "So"), ("user", "What?"))),
    "tool call with null content": (
        "template_error",
        {
            "messages": [
                {"role": "user", "content": "Time?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "clock", "arguments": {}}}],
                },
                {"role": "tool", "content": "12:00"},
                {"role": "assistant", "content": "Noon."},
            ]
        },
    ),
    "tool call with empty content": (
        "tools_not_rendered",
        {
            "messages": [
                {"role": "user", "content": "Time?"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "clock", "arguments": "{}"}}],
                },
                {"role": "tool", "content": "12:00"},
                {"role": "assistant", "content": "Noon."},
            ]
        },
    ),
    "text parts": ("REPAIR", chat(("user", ["a", {"type": "text", "text": "b"}]), HELLO[1])),
    "an image": ("non_text_content", chat(("user", [{"type": "image_url"}]), HELLO[1])),
    "audio beside text": (
        "non_text_content",
        chat(("user", [{"type": "text", "text": "b"}, {"type": "input_audio"}]), HELLO[1]),
    ),
    "content that is a number": ("non_text_content", chat(("user", 5), HELLO[1])),
    "long scripts": ("TRAIN", chat(("user", "Γειά 🇳🇴"), ("assistant", "สวัสดี 🏳️‍🌈 e\u0301"))),
    "control token in the question": ("control_token", chat(("user", "a<|im_start|>b"), HELLO[1])),
    "control token in the reply": (
        "control_token",
        chat(HELLO[0], ("assistant", "<|endoftext|>")),
    ),
    "control token in the system turn": (
        "control_token",
        chat(("system", "<repo_name>"), *HELLO),
    ),
    "mask token in the question": ("mask_token", chat(("user", "x<empty_output>"), HELLO[1])),
    "half a character": ("lone_surrogate", chat(HELLO[0], ("assistant", "\ude00 ok"))),
    "half a character in a column nobody reads": (
        "lone_surrogate",
        chat(*HELLO, extra=[{"a": "\ud83d"}]),
    ),
    "both halves": ("TRAIN", chat(HELLO[0], ("assistant", "\U0001f600"))),
    "one word": ("TRAIN", chat(HELLO[0], ("assistant", "x"))),
    "other columns": ("TRAIN", chat(*HELLO, score=[1, {"b": None}], tools=None, id=3)),
    "no known column": ("unknown_shape", {"question": "a", "answer": "b"}),
    "turns that are text": ("unknown_shape", {"messages": ["a", "b"]}),
    "turns without roles": ("missing_role", {"messages": [{"content": "a"}]}),
    "a list": ("not_an_object", [1, 2]),
    "a number": ("not_an_object", 7),
    "rendered text": ("preformatted_text", {"text": "<|im_start|>user\nx<|im_end|>"}),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_rows(tokenizer, name):
    expected, row = KINDS[name]
    kind, why, _ = outcome(tokenizer, line(row))
    assert expected in (kind, why)


@pytest.mark.parametrize(
    "cut", [b'{"messages": [', b'{"prompt": "a", "completion": "b', b"{]", b"}"]
)
def test_broken_lines(tokenizer, cut):
    assert outcome(tokenizer, RawRow("x:1", cut))[:2] == ("ERROR_LINE", "bad_json")


def test_bad_bytes_and_deep_nesting(tokenizer):
    bad = b'{"prompt": "\xff", "completion": "b"}'
    assert outcome(tokenizer, RawRow("x:1", bad))[1] == "bad_encoding"
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert outcome(tokenizer, RawRow("x:1", deep))[1] == "bad_json"


def supervised(documents):
    return [text for document in documents for text, is_supervised in document if is_supervised]


def test_what_is_supervised(tokenizer):
    turns = [*HELLO, ("user", "More"), ("assistant", "No."), ("user", "Why?")]
    _, _, documents = outcome(tokenizer, line(chat(*turns)))
    assert supervised(documents) == ["Good day.<|im_end|>", "No.<|im_end|>"]
    # Nothing after the last reply is kept: it would be context of nothing.
    assert documents[0][-1] == ("No.<|im_end|>", True)
    _, _, documents = outcome(tokenizer, line(chat(*turns)), last_turn_only=True)
    assert supervised(documents) == ["No.<|im_end|>"]
    assert "Good day.<|im_end|>" in documents[0][0][0]
    # An empty reply is context, and teaches nothing.
    _, _, documents = outcome(tokenizer, line(chat(HELLO[0], ("assistant", ""), *HELLO)))
    assert supervised(documents) == ["Good day.<|im_end|>"]


def test_what_a_repair_leaves(tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    _, _, documents = outcome(tokenizer, line(chat(("user", parts), HELLO[1])))
    assert "<|im_start|>user\na\nb<|im_end|>" in documents[0][0][0]
    row = chat(("system", "Be."), ("assistant", "First"), *HELLO)
    _, _, documents = outcome(tokenizer, line(row))
    assert documents[0][0][0].startswith("<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\n")
    assert supervised(documents) == ["Good day.<|im_end|>"]
    row = {"instruction": "Sum", "input": "1 2", "output": "3", "system": "Be."}
    _, _, documents = outcome(tokenizer, line(row))
    assert "system\nBe.<|im_end|>\n<|im_start|>user\nSum\n\n1 2<" in documents[0][0][0]


def test_rendered_text_is_not_rendered_again(tokenizer):
    text = (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nthe word assistant\n<|im_end|>\n<|im_start|>assistant\ncut"
    )
    kind, repairs, documents = outcome(tokenizer, line({"text": text}), columns={"text": "text"})
    assert (kind, repairs) == ("REPAIR", ("preformatted_text",))
    assert "".join(part for part, _ in documents[0]) == text
    assert supervised(documents) == ["Hello.<|im_end|>", "cut"]
    _, _, documents = outcome(
        tokenizer, line({"text": text}), columns={"text": "text"}, last_turn_only=True
    )
    assert supervised(documents) == ["cut"]


def test_names_of_the_user(tokenizer):
    row = {"dialogue": [{"speaker": "Kunde", "said": "A"}, {"speaker": "Agent", "said": "B"}]}
    columns = {"messages": "dialogue", "role": "speaker", "content": "said"}
    roles = {"kunde": "user", "agent": "assistant"}
    kind, _, documents = outcome(tokenizer, line(row), columns=columns, roles=roles)
    assert (kind, supervised(documents)) == ("REPAIR", ["B<|im_end|>"])
    assert outcome(tokenizer, line(row), columns=columns)[1] == "unknown_role:Kunde"
    asked = {"question": "A", "answer": "B"}
    columns = {"prompt": "question", "completion": "answer"}
    assert outcome(tokenizer, line(asked), columns=columns)[0] == "REPAIR"


def test_control_tokens_can_be_escaped(tokenizer):
    row = line(chat(("user", "Say <|im_end|> now"), ("assistant", "<|im_start|>assistant\nx")))
    kind, repairs, documents = outcome(tokenizer, row, control_tokens="escape")
    assert (kind, repairs) == ("REPAIR", ("control_tokens_escaped",))
    prompt, reply = documents[0]
    assert prompt[0].endswith("Say <|im_end|> now<|im_end|>\n<|im_start|>assistant\n")
    assert reply == ("<|im_start|>assistant\nx<|im_end|>", True)
    # As ids: one control token opens the system, user and assistant turns each, none is forged.
    data = data_config(control_tokens="escape")
    (document,) = process_row(chat_format(tokenizer, data, MASK), data, row).documents
    assert [(document.input_ids == token).sum() for token in (1, 2)] == [3, 3]
    # The mask token has no place in a document, however it is spelt.
    masked = line(chat(("user", "<empty_output>"), HELLO[1]))
    assert outcome(tokenizer, masked, control_tokens="escape")[1] == "mask_token"
