"""The target's chat template and tokenizer, as a server uses them.

Everything the rest of the package needs to know about a template is found out by rendering small
conversations with it, never by looking for known names in its text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from dflash_mp.config import DataConfig, UserError, require
from dflash_mp.data.sources import Dropped

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
THINK_END = "</think>"
PROBE_USER, PROBE_REPLY = "PROBE QUESTION", "PROBE REPLY"
# Noncharacters, which no text should contain: they fence the number of an escaped control token.
FENCE_OPEN, FENCE_CLOSE = "\ufdd0", "\ufdd1"
FENCED = re.compile(f"{FENCE_OPEN}(\\d+){FENCE_CLOSE}")


@dataclass(frozen=True)
class Rendered:
    """Text of a conversation and the ``[start, end)`` characters its generation markers enclose."""

    text: str
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class ChatFormat:
    """How conversations become text and text becomes ids for one target. Picklable."""

    name: str
    template: str
    template_kwargs: Mapping[str, Any]
    tokenizer: Tokenizer
    literal_tokenizer: Tokenizer
    """The same, but control tokens in its input are encoded as plain text."""

    vocab_size: int
    mask_token_id: int
    mask_token: str
    control_tokens: tuple[str, ...]
    control_ids: frozenset[int]
    control_pattern: re.Pattern[str]
    marked: bool
    """Whether the template has generation markers."""

    end_of_turn: str = ""
    """Control token that ends a reply; empty when the template has none."""

    end_of_turn_id: int = -1
    tail: str = ""
    """What a template without ``end_of_turn`` writes after a reply."""


def chat_format(tokenizer: Any, data: DataConfig, mask_token_id: int) -> ChatFormat:
    """Probe the chat template of ``tokenizer`` (or ``data.chat_template``).

    Raises ``UserError`` when there is no template, when it cannot render one question and its
    answer, or when it ignores ``add_generation_prompt`` although replies have a header.
    """
    name = tokenizer.name_or_path or type(tokenizer).__name__
    require(tokenizer.is_fast, f"target {name}: only fast tokenizers are supported")
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    literal = Tokenizer.from_str(backend.to_str())
    literal.encode_special_tokens = True
    added = tokenizer.added_tokens_decoder.values()
    control = {token.content for token in added if token.special} | set(
        tokenizer.all_special_tokens
    )
    template, origin = _template(tokenizer, name, data.chat_template)
    control_tokens = tuple(sorted(control, key=lambda token: (-len(token), token)))
    special = {
        key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)
    }
    plain = ChatFormat(
        name=origin,
        template=template,
        template_kwargs={**special, **(data.template_kwargs or {})},
        tokenizer=backend,
        literal_tokenizer=literal,
        vocab_size=len(tokenizer),
        mask_token_id=mask_token_id,
        mask_token=str(tokenizer.convert_ids_to_tokens(mask_token_id) or ""),
        control_tokens=control_tokens,
        control_ids=frozenset(tokenizer.convert_tokens_to_ids(list(control_tokens))),
        control_pattern=_any_of(control_tokens),
        marked=GENERATION_TAG.search(template) is not None,
    )
    return _probed(plain)


def _template(tokenizer: Any, name: str, path: str | None) -> tuple[str, str]:
    if path is not None:
        require(Path(path).is_file(), f"data.chat_template: there is no file {path}")
        return Path(path).read_text(encoding="utf-8"), path
    try:
        return tokenizer.get_chat_template(), f"the chat template of {name}"
    except ValueError:
        raise UserError(
            f"target {name} has no chat template: set data.chat_template to a Jinja file"
        ) from None


def _any_of(tokens: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def _probed(plain: ChatFormat) -> ChatFormat:
    """Learn how turns begin and end from one question and its answer."""
    asked = [{"role": "user", "content": PROBE_USER}]
    try:
        prompt = render(plain, asked, None, generation_prompt=True).text
        bare = render(plain, asked, None, generation_prompt=False).text
        answered = [*asked, {"role": "assistant", "content": PROBE_REPLY}]
        whole = render(plain, answered, None, generation_prompt=False).text
    except Dropped as error:
        raise UserError(f"{plain.name} cannot render a chat of two turns: {error.detail}") from None
    require(
        whole.count(PROBE_REPLY) == 1,
        f"{plain.name} does not write the assistant's reply: set data.chat_template",
    )
    before, after = whole.split(PROBE_REPLY)
    header = before.removeprefix(prompt) if before.startswith(prompt) else ""
    require(
        plain.marked or bare != prompt or not header.strip(),
        f"{plain.name} ignores add_generation_prompt and starts replies with {header.strip()!r}: "
        "set data.chat_template to one that renders it",
    )
    pattern = plain.control_pattern
    if not pattern.search(prompt) and prompt[len(bare) :].strip():
        # Such a template marks turns by plain text, which content can forge just as well.
        pattern = _any_of((*plain.control_tokens, prompt[len(bare) :].strip()))
    end = plain.control_pattern.search(after)
    if end is None:
        return replace(plain, control_pattern=pattern, tail=after)
    return replace(
        plain,
        control_pattern=pattern,
        end_of_turn=end.group(),
        end_of_turn_id=_ids(plain.tokenizer, end.group())[-1],
    )


def render(
    chat: ChatFormat,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    generation_prompt: bool,
) -> Rendered:
    """Render as a server does; raises ``Dropped("template_error")`` with the template's words."""
    try:
        # Lists of one: the function takes and returns batches.
        texts, spans = render_jinja_template(
            [messages],
            tools=tools,
            chat_template=chat.template,
            return_assistant_tokens_mask=chat.marked,
            add_generation_prompt=generation_prompt,
            **chat.template_kwargs,
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        cause = (str(error) or type(error).__name__).splitlines()[0]
        raise Dropped("template_error", f"{type(error).__name__}: {cause}") from None
    return Rendered(texts[0], list(spans[0]) if chat.marked else [])


def encode(chat: ChatFormat, text: str) -> list[int]:
    """Ids of rendered text; fenced control tokens are encoded as plain text."""
    if FENCE_OPEN not in text:
        return _ids(chat.tokenizer, text)
    ids: list[int] = []
    for index, part in enumerate(FENCED.split(text)):
        # Odd parts are the numbers between two fences.
        tokenizer = chat.literal_tokenizer if index % 2 else chat.tokenizer
        part = chat.control_tokens[int(part)] if index % 2 else part
        ids += _ids(tokenizer, part)
    return ids


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    # The batch call leaves out the character offsets, which take a sixth of the time.
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def fence(chat: ChatFormat, value: Any) -> Any:
    """``value`` with the control tokens in all its strings fenced, so that they forge nothing."""
    if isinstance(value, str):
        return chat.control_pattern.sub(lambda match: _fenced(chat, match.group()), value)
    if isinstance(value, dict):
        return {key: fence(chat, item) for key, item in value.items()}
    if isinstance(value, list):
        return [fence(chat, item) for item in value]
    return value


def _fenced(chat: ChatFormat, token: str) -> str:
    if token not in chat.control_tokens:
        raise Dropped("control_token", f"{token!r} has no other spelling")
    return f"{FENCE_OPEN}{chat.control_tokens.index(token)}{FENCE_CLOSE}"


def find_control_token(chat: ChatFormat, value: Any) -> str | None:
    """The mask token, else the first control token, in any string inside ``value``."""
    found: list[str] = []
    _collect(chat, value, found)
    return chat.mask_token if chat.mask_token in found else next(iter(found), None)


def _collect(chat: ChatFormat, value: Any, found: list[str]) -> None:
    if isinstance(value, str):
        found += chat.control_pattern.findall(value)
        if FENCE_OPEN in value:
            found.append(FENCE_OPEN)
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(chat, key, found)
            _collect(chat, item, found)
    elif isinstance(value, list):
        for item in value:
            _collect(chat, item, found)
