"""Golden ids of public template families: prompt and response as a server would see them."""

import pytest
from chat_tokenizers import (
    BRACKETS,
    CHATML,
    CHATML_TOKENS,
    LLAMA3,
    MARKED,
    MASK,
    OPENED_THINKING,
    THINKING,
    data_config,
    make_tokenizer,
)

from dflash_mp.config import UserError
from dflash_mp.data.conversations import RowNames, read_row
from dflash_mp.data.sources import Dropped
from dflash_mp.data.template import chat_format
from dflash_mp.data.tokenize import describe, tokenise


def documents(tokenizer, messages, row=None, **changes):
    """(ids, mask) of each document of one conversation, and the readable form."""
    data = data_config(**changes)
    chat = chat_format(tokenizer, data, MASK)
    result = tokenise(chat, data, read_row({"messages": messages, **(row or {})}, RowNames()))
    return [
        (d.input_ids.tolist(), d.loss_mask.tolist(), describe(d, chat)) for d in result.documents
    ]


def turn(role, content):
    return {"role": role, "content": content}


WORDS = ["system", "user", "assistant", "Be", " kind", "Hi", "Yes", " sir", "Bye", "think"]
CHAT = [turn("user", "Hi"), turn("assistant", "Yes sir"), turn("user", "Bye")]
CHAT.append(turn("assistant", "Bye"))
THOUGHTS = [
    turn("user", "Hi"),
    turn("assistant", "<think>\nkind\n</think>\n\nYes sir"),
    turn("user", "Bye"),
    turn("assistant", "<think>\nsir\n</think>\n\nBye"),
]


def chatml():
    return make_tokenizer(CHATML, words=WORDS)


def thinking():
    return make_tokenizer(THINKING, words=WORDS, added=["<think>", "</think>"])


def opened_thinking():
    control = ["<|bos|>", "<|User|>", "<|eos|>", "<mask>", "<|Assistant|>"]
    added = ["<think>", "</think>"]
    return make_tokenizer(OPENED_THINKING, control, WORDS, added, bos_token="<|bos|>")


def brackets():
    return make_tokenizer(BRACKETS, ["<s>", "<unk>", "</s>", "<mask>"], WORDS, bos_token="<s>")


def test_chatml_with_a_default_system_prompt():
    ((ids, mask, readable),) = documents(chatml(), CHAT)
    # fmt: off
    assert ids == [
        1, 264, 14, 276, 280, 50, 2, 14,    # <|im_start|>system\nBe kind.<|im_end|>\n
        1, 267, 14, 281, 2, 14,             # <|im_start|>user\nHi<|im_end|>\n
        1, 275, 14,                         # <|im_start|>assistant\n
        283, 286, 2,                        # Yes sir<|im_end|>
        14, 1, 267, 14, 288, 2, 14,         # \n<|im_start|>user\nBye<|im_end|>\n
        1, 275, 14,                         # <|im_start|>assistant\n
        288, 2,                             # Bye<|im_end|>, and no \n: the target does not say it
    ]
    # fmt: on
    assert mask == [0] * 17 + [1] * 3 + [0] * 10 + [1] * 2
    assert [text for text, supervised in readable if supervised] == [
        "Yes sir<|im_end|>",
        "Bye<|im_end|>",
    ]


def test_chatml_with_a_system_turn_of_its_own():
    ((ids, _, _),) = documents(chatml(), [turn("system", "Hi"), *CHAT[:2]])
    assert ids[:6] == [1, 264, 14, 281, 2, 14]
    assert ids.count(264) == 1


def test_llama3_style():
    control = ["<|begin_of_text|>", "<|start_header_id|>", "<|eot_id|>", "<mask>"]
    control.append("<|end_header_id|>")
    tokenizer = make_tokenizer(LLAMA3, control, WORDS, bos_token="<|begin_of_text|>")
    ((ids, mask, _),) = documents(tokenizer, [turn("system", "Be kind\n"), *CHAT])
    # fmt: off
    assert ids == [
        0,                                  # <|begin_of_text|>, once
        1, 265, 4, 15, 15, 277, 281, 2,     # <|start_header_id|>system<|end_header_id|>\n\nBe kind
        1, 268, 4, 15, 15, 282, 2,          # user: Hi<|eot_id|>
        1, 276, 4, 15, 15,                  # <|start_header_id|>assistant<|end_header_id|>\n\n
        284, 287, 2,                        # Yes sir<|eot_id|>
        1, 268, 4, 15, 15, 289, 2,          # user: Bye<|eot_id|>
        1, 276, 4, 15, 15,
        289, 2,                             # Bye<|eot_id|>
    ]
    # fmt: on
    assert mask == [0] * 21 + [1] * 3 + [0] * 12 + [1] * 2


def test_generation_markers():
    ((ids, mask, _),) = documents(make_tokenizer(MARKED, words=WORDS), CHAT)
    # fmt: off
    assert ids == [
        1, 267, 14, 281, 2, 14, 1, 275, 14, 283, 286, 2,
        14, 1, 267, 14, 288, 2, 14, 1, 275, 14, 288, 2,
    ]
    # fmt: on
    assert mask == [0] * 9 + [1] * 3 + [0] * 10 + [1] * 2


def test_generation_markers_decide_what_is_supervised():
    # This template marks the content only: its end of turn stays unsupervised.
    only_content = MARKED.replace(
        "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}",
        "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
    )
    ((ids, mask, readable),) = documents(make_tokenizer(only_content, words=WORDS), CHAT[:2])
    assert ids[-2:] == [283, 286]
    assert mask[-2:] == [1, 1]
    assert readable[-1] == ("Yes sir", True)


def test_earlier_thinking_is_dropped():
    first, second = documents(thinking(), THOUGHTS)
    # fmt: off
    assert first[0] == [
        1, 267, 14, 281, 2, 14, 1, 275, 14,                                 # user: Hi, assistant:
        293, 14, 111, 109, 114, 104, 14, 294, 14, 14, 283, 286, 2,          # <think>...Yes sir
    ]
    assert second[0] == [
        1, 267, 14, 281, 2, 14, 1, 275, 14, 283, 286, 2, 14,                # without its thinking
        1, 267, 14, 288, 2, 14, 1, 275, 14,
        293, 14, 119, 109, 118, 14, 294, 14, 14, 288, 2,                    # <think>...Bye
    ]
    # fmt: on
    assert first[1] == [0] * 9 + [1] * 13
    assert second[1] == [0] * 22 + [1] * 11


def test_thinking_can_be_left_unsupervised():
    with_thinking = documents(thinking(), THOUGHTS)
    without = documents(thinking(), THOUGHTS, train_thinking=False)
    for (ids, mask, _), (same_ids, less, readable) in zip(with_thinking, without, strict=True):
        assert same_ids == ids
        end = ids.index(294) + 1
        assert less == [0] * end + mask[end:]
        assert readable[-1][0].startswith("\n\n")


def test_thinking_switched_off_as_the_server_does():
    off = {"template_kwargs": {"enable_thinking": False}}
    first, second = documents(thinking(), CHAT, **off)
    # The prompt closes an empty thinking block; the reply is only the answer.
    assert first[0] == [1, 267, 14, 281, 2, 14, 1, 275, 14, 293, 14, 14, 294, 14, 14, 283, 286, 2]
    assert first[1] == [0] * 15 + [1] * 3
    assert second[2][-1] == ("Bye<|im_end|>", True)
    with pytest.raises(Dropped, match="not_serving_faithful"):
        documents(thinking(), THOUGHTS, **off)


def test_thinking_in_reply_to_a_prompt_that_forbids_it():
    # Finished turns are written without their thinking, and so is the reply's own prompt.
    closed = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ m['content'].split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
    )
    tokenizer = make_tokenizer(closed, words=WORDS)
    assert documents(tokenizer, CHAT[:2])[0][2][-1] == ("Yes sir<|im_end|>", True)
    with pytest.raises(Dropped, match="a prompt that forbids it"):
        documents(tokenizer, THOUGHTS[:2])


def test_thinking_opened_by_the_generation_prompt():
    first, second = documents(opened_thinking(), THOUGHTS)
    assert first[2] == [
        ("<|bos|><|User|>Hi<|Assistant|><think>\n", False),
        ("kind\n</think>\n\nYes sir<|eos|>", True),
    ]
    assert second[2][-1] == ("sir\n</think>\n\nBye<|eos|>", True)
    # A reply that holds only the closing tag is what such a target generates.
    ((ids, _, _),) = documents(
        opened_thinking(), [turn("user", "Hi"), turn("assistant", "kind\n</think>\n\nYes sir")]
    )
    assert ids == first[0]
    # Without any thinking, the reply cannot have followed that prompt.
    with pytest.raises(Dropped, match="not_serving_faithful"):
        documents(opened_thinking(), CHAT)


def test_reasoning_in_a_field_of_its_own():
    said = {**turn("assistant", "Yes sir"), "reasoning_content": "kind"}
    for tokenizer in (thinking(), opened_thinking()):
        assert (
            documents(tokenizer, [turn("user", "Hi"), said])[0][:2]
            == documents(tokenizer, THOUGHTS[:2])[0][:2]
        )
    with pytest.raises(Dropped, match="does not render reasoning"):
        documents(chatml(), [turn("user", "Hi"), said])


def test_template_without_any_header():
    ((_, _, readable),) = documents(brackets(), CHAT)
    assert readable == [
        ("<s>[INST] Hi [/INST]", False),
        (" Yes sir</s>", True),
        ("[INST] Bye [/INST]", False),
        (" Bye</s>", True),
    ]
    with pytest.raises(Dropped, match="roles must alternate"):
        documents(brackets(), [turn("user", "Hi"), *CHAT])


def test_text_that_looks_like_a_turn_is_never_supervised():
    ((_, _, readable),) = documents(
        brackets(), [turn("user", "Hi [/INST] Yes sir"), turn("assistant", "Bye")]
    )
    assert [text for text, supervised in readable if supervised] == [" Bye</s>"]
    plain = "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}"
    plain += "{% if add_generation_prompt %}### assistant:\n{% endif %}"
    tokenizer = make_tokenizer(plain, words=WORDS)
    ((_, _, readable),) = documents(tokenizer, CHAT[:2])
    assert readable[-1] == ("Yes sir", True)
    with pytest.raises(Dropped, match="control_token"):
        documents(tokenizer, [turn("user", "### assistant:\nYes"), turn("assistant", "Bye")])


def test_prompt_whose_ids_merge_with_the_reply_gets_documents_of_its_own():
    # In a later prompt the server finds "\n\n" where the generation prompt ended in "\n" and the
    # reply began with another one.
    tokenizer = make_tokenizer(CHATML, words=[*WORDS, "\n\n"])
    first, second = documents(
        tokenizer,
        [turn("user", "Hi"), turn("assistant", "\n\nHi"), turn("user", "Bye"), CHAT[-1]],
    )
    assert first[0][-5:] == [14, 14, 14, 281, 2]
    assert first[1][-5:] == [0, 1, 1, 1, 1]
    assert first[0] != second[0][: len(first[0])]
    assert sum(second[1]) == 2


def test_serving_faithful_whatever_the_template():
    for tokenizer in (chatml(), thinking(), brackets(), make_tokenizer(MARKED, words=WORDS)):
        expected = [
            tokenizer.apply_chat_template(CHAT[:end], add_generation_prompt=True)["input_ids"]
            for end in (1, 3)
        ]
        made = documents(tokenizer, CHAT)
        starts = []
        for ids, mask, _ in made:
            firsts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
            starts += [ids[:first] for first in firsts]
        assert starts == expected


def test_templates_that_cannot_train_are_refused():
    with pytest.raises(UserError, match="has no chat template"):
        documents(make_tokenizer(None), CHAT)
    with pytest.raises(UserError, match=r"cannot render a chat of two turns: .*unexpected"):
        documents(make_tokenizer("{{ messages | unexpected }}"), CHAT)
    with pytest.raises(UserError, match="does not write the assistant's reply"):
        documents(make_tokenizer("{{ messages[0]['content'] }}"), CHAT)
    ignores = CHATML.split("{% if add_generation_prompt %}")[0]
    with pytest.raises(UserError, match="ignores add_generation_prompt"):
        documents(make_tokenizer(ignores), CHAT)
    only_replies = "{% for m in messages if m['role'] == 'assistant' %}{{ m['content'] }}"
    with pytest.raises(Dropped, match="all_supervised"):
        documents(make_tokenizer(only_replies + "{{ '<|im_end|>' }}{% endfor %}"), CHAT)


def test_a_template_of_the_user(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(CHATML.replace("Be kind.", "Hi"))
    ((ids, _, _),) = documents(make_tokenizer(None, words=WORDS), CHAT, chat_template=str(path))
    assert ids[:6] == [1, 264, 14, 281, 2, 14]
    with pytest.raises(UserError, match="there is no file"):
        documents(chatml(), CHAT, chat_template=str(tmp_path / "other.jinja"))
    assert CHATML_TOKENS[MASK] == "<mask>"
