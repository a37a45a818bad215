"""One row of any known shape becomes one conversation, or says why not.

A row that had to be changed names its ``repairs``; a row that cannot be used raises ``Dropped``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_mp.config import DataConfig
from dflash_mp.data.sources import Dropped, RawRow

Message = dict[str, Any]

ROLE_NAMES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter", "instruction"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "ai"), "assistant"),
    **dict.fromkeys(("chatgpt", "bing", "bard", "claude", "gemini"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
    **dict.fromkeys(("tool_response", "function_response"), "tool"),
}
"""Names of roles in public data; ``data.roles`` adds to them. Any other name drops the row."""

CONVERSATION_KEYS = ("messages", "conversations", "conversation")
COMPLETION_KEYS = ("completion", "response")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
MESSAGE_KEYS = ("name", "tool_calls", "tool_call_id", *REASONING_KEYS)
ENDED = (None, "stop", "eos", "tool_calls", "end_turn")
"""Finish reasons after which the end of turn is part of the response; no reason counts as ended."""

UNREADABLE = ("bad_json", "bad_encoding", "lone_surrogate", "not_an_object", "damaged_file")
"""Reasons that mean a broken file and not merely an unusable conversation."""


@dataclass(frozen=True)
class Conversation:
    """Messages in the order they were said, roles among ``dflash_mp.config.ROLES``.

    ``finish_reasons`` and ``response_token_ids`` have one entry per assistant message; ids are the
    exact ids that the target generated, where the row has them.
    """

    messages: list[Message]
    finish_reasons: list[str | None]
    response_token_ids: list[list[int] | None]
    tools: list[dict[str, Any]] | None = None
    repairs: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenRow:
    """A row that comes with its ids and its mask."""

    input_ids: list[int]
    loss_mask: list[int]


@dataclass(frozen=True)
class TextRow:
    """Text that was already rendered, control tokens included."""

    text: str
    repairs: tuple[str, ...] = ("preformatted_text",)


Row = Conversation | TokenRow | TextRow


@dataclass(frozen=True)
class RowNames:
    """The user's names for columns and roles, beside the known ones."""

    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)


def row_names(data: DataConfig) -> RowNames:
    """The names that the configuration adds."""
    roles = {name.strip().lower(): role for name, role in (data.roles or {}).items()}
    return RowNames(data.columns or {}, roles)


def parse_line(raw: RawRow) -> dict[str, Any]:
    """Decode one raw row; raises ``Dropped`` with a reason among ``UNREADABLE``."""
    if isinstance(raw.data, Dropped):
        raise raw.data
    row: Any = raw.data
    if isinstance(raw.data, bytes):
        try:
            row = json.loads(raw.data.decode().rstrip())
        except UnicodeDecodeError as error:
            raise Dropped("bad_encoding", str(error)) from None
        except (ValueError, RecursionError) as error:
            raise Dropped("bad_json", str(error)) from None
        if b"\\ud" not in raw.data.lower():
            return _as_object(row)
    _refuse_surrogates(row)
    return _as_object(row)


def _as_object(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise Dropped("not_an_object", f"a row must be an object, not {type(row).__name__}")
    return row


def _refuse_surrogates(value: Any) -> None:
    """JSON can spell half a character; no tokenizer and no file can hold it."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Dropped("lone_surrogate", str(error).split(":")[0]) from None
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_surrogates(key)
            _refuse_surrogates(item)
    elif isinstance(value, list):
        for item in value:
            _refuse_surrogates(item)


def read_row(row: dict[str, Any], names: RowNames) -> Row:
    """Recognise the shape of a row and normalise it; raises ``Dropped``."""
    whole, row = row, {key: value for key, value in row.items() if value is not None}
    for ours, theirs in names.columns.items():
        if theirs in row:
            row = {**row, ours: row[theirs]}
    if "input_ids" in row:
        return _token_row(row)
    key = next((key for key in CONVERSATION_KEYS if key in row), None)
    if key is not None:
        return _from_turns(row, row[key], names, () if key == "messages" else ("sharegpt",))
    answer = next((key for key in COMPLETION_KEYS if key in row), None)
    if "prompt" in row and answer is not None:
        return _from_turns(
            row,
            _turns(row["prompt"], "user") + _turns(row[answer], "assistant"),
            names,
            ("prompt_completion",),
        )
    if "instruction" in row and "output" in row:
        parts = [row["instruction"], row.get("input")]
        asked = "\n\n".join(part for part in parts if isinstance(part, str) and part.strip())
        turns = [*_turns(asked, "user"), *_turns(row["output"], "assistant")]
        if isinstance(row.get("system"), str) and row["system"].strip():
            turns.insert(0, {"role": "system", "content": row["system"]})
        return _from_turns(row, turns, names, ("alpaca",))
    if "text" in names.columns and isinstance(row.get("text"), str):
        return TextRow(row["text"])
    if isinstance(row.get("text"), str):
        raise Dropped("preformatted_text", "set data.columns.text=text to train on rendered text")
    if any(key in whole for key in CONVERSATION_KEYS):
        raise Dropped("empty_conversation", "null")
    raise Dropped("unknown_shape", f"keys {', '.join(sorted(map(str, whole))) or '(none)'}")


def _turns(value: Any, role: str) -> list[Any]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _token_row(row: dict[str, Any]) -> TokenRow:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if mask is None:
        raise Dropped("bad_token_ids", "input_ids without loss_mask")
    if not (_is_ids(ids) and isinstance(mask, list) and len(ids) == len(mask)):
        raise Dropped("bad_token_ids", "input_ids and loss_mask must be equally long lists of ints")
    if not all(type(value) in (int, bool) and value in (0, 1) for value in mask):
        raise Dropped("bad_token_ids", "loss_mask must hold 0 and 1 only")
    return TokenRow(ids, [int(value) for value in mask])


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _from_turns(
    row: dict[str, Any], turns: Any, names: RowNames, repairs: tuple[str, ...]
) -> Conversation:
    if isinstance(turns, str):
        turns = _parse_json(turns, "conversation is text that is not JSON")
        repairs += ("json_text_parsed",)
    if turns == []:
        raise Dropped("empty_conversation", "no messages")
    if not isinstance(turns, list):
        raise Dropped("unknown_shape", f"the conversation is a {type(turns).__name__}")
    changed: list[str] = []
    messages = [_message(turn, names, changed) for turn in turns]
    reasons, exact = _responses(row, turns, messages)
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise Dropped("no_assistant_turn", "roles: " + ", ".join(roles))
    if "user" not in roles:
        raise Dropped("no_user_turn", "roles: " + ", ".join(roles))
    start = roles.index("user")
    leading = roles[:start].count("assistant")
    if leading:
        changed.append("leading_assistant_dropped")
        messages = [m for m in messages[:start] if m["role"] == "system"] + messages[start:]
        reasons, exact = reasons[leading:], exact[leading:]
        if not reasons:
            raise Dropped("no_assistant_turn", "no reply after the first user turn")
    return Conversation(
        messages,
        reasons,
        exact,
        _tools(row.get("tools")),
        tuple(dict.fromkeys([*repairs, *changed])),
    )


def _responses(
    row: dict[str, Any], turns: list[Any], messages: list[Message]
) -> tuple[list[str | None], list[list[int] | None]]:
    """Finish reason and exact ids per assistant message.

    They stand on the message itself, or on the row: a single value then belongs to the last
    assistant message, a list to all of them.
    """
    replies = [turn for turn, m in zip(turns, messages, strict=True) if m["role"] == "assistant"]
    reasons: list[str | None] = [reply.get("finish_reason") for reply in replies]
    exact: list[list[int] | None] = [reply.get("response_token_ids") for reply in replies]
    if not replies:
        return reasons, exact
    reason, ids = row.get("finish_reason"), row.get("response_token_ids")
    if isinstance(reason, list):
        if len(reason) != len(replies):
            raise Dropped("bad_token_ids", "finish_reason needs one entry per assistant turn")
        reasons = list(reason)
    elif reason is not None:
        reasons[-1] = reason
    if isinstance(ids, list) and any(isinstance(item, list) for item in ids):
        if len(ids) != len(replies):
            raise Dropped("bad_token_ids", "response_token_ids needs one list per assistant turn")
        exact = list(ids)
    elif ids is not None:
        exact[-1] = ids
    if not all(item is None or _is_ids(item) for item in exact):
        raise Dropped("bad_token_ids", "response_token_ids must be lists of ints")
    return reasons, exact


def _message(turn: Any, names: RowNames, changed: list[str]) -> Message:
    if not isinstance(turn, dict):
        raise Dropped("unknown_shape", f"a message is a {type(turn).__name__}, not an object")
    turn = {key: value for key, value in turn.items() if value is not None}
    role_key = next((k for k in (names.columns.get("role"), "role", "from") if k in turn), None)
    if role_key is None:
        raise Dropped("missing_role", f"a message has the keys {', '.join(map(str, turn))}")
    role = _role(turn[role_key], names, changed)
    content_key = next(
        (k for k in (names.columns.get("content"), "content", "value") if k in turn), None
    )
    content = turn[content_key] if content_key is not None else None
    message: Message = {key: turn[key] for key in MESSAGE_KEYS if key in turn}
    if content is None and not message.get("tool_calls"):
        raise Dropped("missing_content", f"no content in a turn of the {role}")
    if not all(isinstance(message.get(key, ""), str) for key in REASONING_KEYS):
        raise Dropped("non_text_content", "reasoning is not text")
    message |= {"role": role, "content": _text(content, changed)}
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"])
    return message


def _role(name: Any, names: RowNames, changed: list[str]) -> str:
    key = name.strip().lower() if isinstance(name, str) else str(name)
    role = names.roles.get(key) or ROLE_NAMES.get(key)
    if role is None:
        raise Dropped(f"unknown_role:{name}", "map it with data.roles")
    if role != name:
        changed.append("role_alias")
    return role


def _text(content: Any, changed: list[str]) -> str | None:
    """Content as text; text parts are joined by a line break, as OpenAI-compatible servers do."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Dropped("non_text_content", f"content is a {type(content).__name__}")
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if not isinstance(text, str) or kind not in ("text", "input_text", "output_text"):
            raise Dropped("non_text_content", f"a content part of type {kind}")
        parts.append(text)
    changed.append("text_parts_joined")
    return "\n".join(parts)


def _tool_calls(calls: Any) -> list[Any]:
    """Tool calls with their arguments as objects, which is what chat templates expect."""
    if isinstance(calls, str):
        calls = _parse_json(calls, "tool_calls is text that is not JSON")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Dropped("bad_tool_calls", "tool_calls must be a list of objects")
    result = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Dropped("bad_tool_calls", "a tool call has no function name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            parsed = _parse_json(arguments or "{}", "tool call arguments are not JSON")
            arguments = parsed if isinstance(parsed, dict) else arguments
        result.append(
            {**call, "type": "function", "function": {**function, "arguments": arguments}}
        )
    return result


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tool definitions; a list, its JSON text, null and nothing are told apart by content only."""
    if isinstance(tools, str):
        tools = _parse_json(tools, "tools is text that is not JSON") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Dropped("bad_tools", "tools must be a list of objects")
    return tools


def _parse_json(text: str, problem: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Dropped("bad_json_text", problem) from None
