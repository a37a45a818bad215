"""Conversations with several open turns."""

from answering import assistant, echo, user

from dflash_mp.data.responses import Skipped
from dflash_mp.data.turns import answer_conversations


def test_every_open_turn_is_answered_in_turn():
    rows = {
        0: {"id": "a", "source": "s", "messages": [user("one"), user("two"), user("three")]},
        1: {"id": "b", "source": "s", "messages": [user("ab"), assistant("given"), user("cd")]},
        2: {"id": "c", "source": "s", "messages": [{"role": "system", "content": "S"}, user("x")]},
    }
    first, second, third = (e["row"] for e in answer_conversations(rows, echo, seed=0))
    said = [(m["role"], m["content"]) for m in first["messages"]]
    assert said == [
        ("user", "one"),
        ("assistant", "eno"),
        ("user", "two"),
        ("assistant", "owt"),
        ("user", "three"),
        ("assistant", "eerht"),
    ]
    assert first["finish_reason"] == ["stop"] * 3
    # Each turn saw all the messages before it.
    assert [ids[0] for ids in first["response_token_ids"]] == [1, 3, 5]
    assert [m["content"] for m in second["messages"]] == ["ab", "given", "cd", "dc"]
    assert second["finish_reason"] == [None, "stop"]
    assert second["response_token_ids"][0] is None
    assert third["finish_reason"] == "stop"
    assert third["response_token_ids"][0] == 2
    assert [m["content"] for m in third["messages"]] == ["S", "x", "x"]


def test_skipped_turn_keeps_the_turns_before_it():
    def second_turn_fails(conversations, seeds):
        replies = echo(conversations, seeds)
        return [
            Skipped("too long") if len(m) > 1 else r
            for m, r in zip(conversations, replies, strict=True)
        ]

    rows = {0: {"id": "a", "source": "s", "messages": [user("one"), user("two")]}}
    (entry,) = answer_conversations(rows, second_turn_fails, seed=0)
    assert [m["content"] for m in entry["row"]["messages"]] == ["one", "eno"]
    assert entry["row"]["finish_reason"] == "stop"
    assert entry["skipped"] == "a: too long"
