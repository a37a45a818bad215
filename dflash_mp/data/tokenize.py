"""Conversations become token ids and a loss mask, exactly as a server would have seen them.

For every supervised assistant turn the ids are the rendered prompt, generation prompt included,
followed by the ids of the response. Turns share one document when the prompt of the later turn,
tokenised on its own, begins with the earlier turn's ids; otherwise each gets its own document.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_mp.config import DataConfig
from dflash_mp.data.conversations import (
    ENDED,
    REASONING_KEYS,
    Conversation,
    Message,
    Row,
    TextRow,
    TokenRow,
)
from dflash_mp.data.sources import Dropped
from dflash_mp.data.template import (
    FENCE_OPEN,
    THINK_END,
    ChatFormat,
    Rendered,
    encode,
    fence,
    find_control_token,
    render,
)

Piece = tuple[list[int], bool]
"""Ids, and whether they are supervised."""


@dataclass(frozen=True)
class Document:
    """One training sequence: ``[n]`` int32 ids and ``[n]`` uint8 mask, 1 where supervised."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class Tokenised:
    """The documents of one row, and what was done to it."""

    documents: list[Document]
    repairs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Turn:
    """One supervised assistant turn: the ids of its prompt and the pieces of its response."""

    prompt: str
    prompt_ids: list[int]
    pieces: list[Piece]

    @property
    def ids(self) -> list[int]:
        """Everything up to the end of the response."""
        return [*self.prompt_ids, *(token for ids, _ in self.pieces for token in ids)]


def tokenise(chat: ChatFormat, data: DataConfig, row: Row) -> Tokenised:
    """All documents of one row, within ``data.max_length``; raises ``Dropped``."""
    notes: list[str] = []
    repairs: tuple[str, ...] = ()
    if isinstance(row, TokenRow):
        documents = [_token_document(chat, row)]
    elif isinstance(row, TextRow):
        documents, repairs = [_text_document(chat, row.text)], row.repairs
    else:
        row = _checked(chat, data, row)
        repairs = row.repairs
        documents = _conversation_documents(chat, data, row, notes)
    if not isinstance(row, Conversation) and data.last_turn_only:
        documents = [_last_run(document) for document in documents]
    if not any(document.loss_mask.any() for document in documents):
        raise Dropped("no_supervised_tokens", "no response has any content")
    for document in documents:
        if chat.mask_token_id in document.input_ids:
            raise Dropped("mask_token", f"{chat.mask_token!r} among the ids")
    kept = [piece for document in documents for piece in _fit(document, data, notes)]
    kept = [document for document in kept if _trainable(document, data)]
    if not kept:
        reason = "over_length" if "truncated" in notes else "too_few_supervised_tokens"
        raise Dropped(reason, f"fewer than {data.min_supervised_tokens} supervised tokens are left")
    return Tokenised(kept, repairs, tuple(dict.fromkeys(notes)))


def _token_document(chat: ChatFormat, row: TokenRow) -> Document:
    if row.input_ids and max(row.input_ids) >= chat.vocab_size:
        raise Dropped("bad_token_ids", f"id {max(row.input_ids)} is outside the vocabulary")
    return Document(np.array(row.input_ids, np.int32), np.array(row.loss_mask, np.uint8))


def _text_document(chat: ChatFormat, text: str) -> Document:
    """Rendered text: replies stand between the template's generation prompt and its end of turn."""
    asked: list[Message] = [{"role": "user", "content": "x"}]
    opened = render(chat, asked, None, generation_prompt=True).text
    start = encode(chat, opened.removeprefix(render(chat, asked, None, False).text))
    if not start or chat.end_of_turn_id < 0:
        raise Dropped("preformatted_text", "the template's turns have no control tokens")
    ids = encode(chat, text)
    mask = np.zeros(len(ids), np.uint8)
    at = 0
    while at + len(start) <= len(ids):
        if ids[at : at + len(start)] != start:
            at += 1
            continue
        begin = at + len(start)
        rest = ids[begin:]
        length = rest.index(chat.end_of_turn_id) + 1 if chat.end_of_turn_id in rest else len(rest)
        mask[begin : begin + length] = 1
        at = begin + length
    return Document(np.array(ids, np.int32), mask)


def _checked(chat: ChatFormat, data: DataConfig, row: Conversation) -> Conversation:
    """``row`` with nothing in it that the tokenizer would take for structure."""
    replies = iter(row.response_token_ids)
    texts = [
        # Exact ids need no protection: they are not made from the text.
        {**m, "content": None} if m["role"] == "assistant" and next(replies) is not None else m
        for m in row.messages
    ]
    found = find_control_token(chat, [texts, row.tools])
    if found is None:
        return row
    if data.control_tokens == "drop" or found in (chat.mask_token, FENCE_OPEN):
        raise Dropped("mask_token" if found == chat.mask_token else "control_token", repr(found))
    return Conversation(
        fence(chat, row.messages),
        row.finish_reasons,
        row.response_token_ids,
        fence(chat, row.tools),
        (*row.repairs, "control_tokens_escaped"),
    )


def _conversation_documents(
    chat: ChatFormat, data: DataConfig, row: Conversation, notes: list[str]
) -> list[Document]:
    replies = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    turns = []
    for number, index in enumerate(replies):
        if data.last_turn_only and number < len(replies) - 1:
            continue
        turn = _turn(chat, row, number, index)
        if turn is not None:
            turns.append(turn if data.train_thinking else _without_thinking(chat, turn))
    if turns and row.messages[replies[-1]].get("tool_calls"):
        _refuse_lost_tools(chat, row, render(chat, row.messages, row.tools, False).text)
    elif turns:
        _refuse_lost_tools(chat, row, turns[-1].prompt)
    documents = []
    current: list[Turn] = []
    for turn in turns:
        if current and not _continues(current[-1], turn):
            documents.append(_document(current))
            current = []
        current.append(turn)
    if current:
        documents.append(_document(current))
    if len(documents) > 1:
        notes.append("one_document_per_turn")
    return documents


def _turn(chat: ChatFormat, row: Conversation, number: int, index: int) -> Turn | None:
    """The assistant turn at message ``index``; None when it says nothing."""
    message = row.messages[index]
    exact = row.response_token_ids[number]
    ended = row.finish_reasons[number] in ENDED
    says_nothing = not (message["content"] or "").strip() and set(message) == {"role", "content"}
    if exact == [] or (exact is None and says_nothing):
        return None
    prompt = render(chat, row.messages[:index], row.tools, generation_prompt=True).text
    if exact is not None:
        pieces = [(_exact_response(chat, exact, ended), True)]
    else:
        pieces = _text_response(chat, row, index, prompt, ended)
    if prompt == "":
        raise Dropped("all_supervised", "the template writes nothing in front of a reply")
    return Turn(prompt, encode(chat, prompt), pieces) if pieces else None


def _exact_response(chat: ChatFormat, ids: list[int], ended: bool) -> list[int]:
    """Generated ids as they are; a response that ended gets the end of turn if it lacks it."""
    if max(ids) >= chat.vocab_size:
        raise Dropped("bad_token_ids", f"id {max(ids)} is outside the vocabulary")
    complete = not ended or chat.end_of_turn_id < 0 or ids[-1] in chat.control_ids
    return ids if complete else [*ids, chat.end_of_turn_id]


def _text_response(
    chat: ChatFormat, row: Conversation, index: int, prompt: str, ended: bool
) -> list[Piece]:
    """The response at message ``index`` in pieces of text, each tokenised by itself."""
    text = render(chat, row.messages[: index + 1], row.tools, generation_prompt=False)
    raw = _raw_response(chat, row.messages[index], prompt, text.text)
    if raw is not None:
        return [(encode(chat, raw + (chat.end_of_turn if ended else "")), True)]
    pieces: list[Piece] = []
    at = len(prompt)
    for start, end in _supervised_spans(chat, text, len(prompt), ended):
        if start > at:
            pieces.append((encode(chat, text.text[at:start]), False))
        pieces.append((encode(chat, text.text[start:end]), True))
        at = end
    return pieces


def _raw_response(chat: ChatFormat, message: Message, prompt: str, rendered: str) -> str | None:
    """What the target generated, where the template does not write it back; None where it does.

    Templates that open the thinking block in the generation prompt, or strip it from finished
    turns, render a reply differently from how it was generated.
    """
    content: str = message["content"] or ""
    reasoning: str = next((message[key] for key in REASONING_KEYS if key in message), "").strip()
    faithful = rendered.startswith(prompt)
    reply = rendered[len(prompt) :]
    lost = (THINK_END in content and THINK_END not in reply) or reasoning not in reply
    if faithful and not lost:
        return None
    if message.get("tool_calls"):
        raise Dropped("not_serving_faithful", "a turn with tool calls does not follow its prompt")
    if reasoning:
        if THINK_END not in chat.template:
            raise Dropped("not_serving_faithful", f"{chat.name} does not render reasoning")
        content = f"<think>\n{reasoning}\n{THINK_END}\n\n{content}"
    if prompt.rstrip().endswith(THINK_END):
        raise Dropped("not_serving_faithful", "thinking in reply to a prompt that forbids it")
    if prompt.rstrip().endswith("<think>") and THINK_END in content:
        return content.removeprefix("<think>").removeprefix("\n")
    if faithful:
        return content
    raise Dropped("not_serving_faithful", f"a reply does not follow its prompt {prompt[-30:]!r}")


def _supervised_spans(
    chat: ChatFormat, rendered: Rendered, start: int, ended: bool
) -> list[tuple[int, int]]:
    """Supervised characters from ``start`` on: the marked ones, or all up to the end of turn."""
    text = rendered.text
    if chat.end_of_turn:
        content_end = text.find(chat.end_of_turn, start)
        content_end = len(text) if content_end < 0 else content_end
        end = min(len(text), content_end + len(chat.end_of_turn))
    else:
        content_end = end = len(text) - (len(chat.tail) if text.endswith(chat.tail) else 0)
    limit = end if ended else content_end
    spans = rendered.spans if chat.marked else [(start, limit)]
    cut = [(max(a, start), min(b, limit)) for a, b in spans]
    return [(a, b) for a, b in cut if a < b]


def _without_thinking(chat: ChatFormat, turn: Turn) -> Turn:
    """The same ids, but those up to the end of the thinking block are not supervised."""
    pieces: list[Piece] = []
    for ids, supervised in turn.pieces:
        cut = _thinking_length(chat, ids) if supervised else 0
        pieces += [(ids[:cut], False), (ids[cut:], supervised)] if cut else [(ids, supervised)]
    return Turn(turn.prompt, turn.prompt_ids, pieces)


def _thinking_length(chat: ChatFormat, ids: list[int]) -> int:
    """Smallest ``n`` such that ``ids[:n]`` decodes to text with the end of a thinking block."""
    low, high = 0, len(ids)
    if THINK_END not in chat.tokenizer.decode(ids, skip_special_tokens=False):
        return 0
    while low < high:
        middle = (low + high) // 2
        if THINK_END in chat.tokenizer.decode(ids[:middle], skip_special_tokens=False):
            high = middle
        else:
            low = middle + 1
    return low


def _refuse_lost_tools(chat: ChatFormat, row: Conversation, text: str) -> None:
    """A template without tool support writes calls as empty turns; such a row teaches nonsense."""
    calls = [call for message in row.messages for call in message.get("tool_calls", ())]
    missing = [name for call in calls if (name := call["function"]["name"]) not in text]
    if missing:
        raise Dropped("tools_not_rendered", f"{chat.name} does not write the call of {missing[0]}")


def _continues(earlier: Turn, turn: Turn) -> bool:
    """Whether the prompt of ``turn`` begins with everything up to the response before it."""
    ids = earlier.ids
    return turn.prompt_ids[: len(ids)] == ids


def _document(turns: list[Turn]) -> Document:
    """The turns of one document; each prompt begins with all that stands before it."""
    pieces: list[Piece] = []
    known = 0
    for turn in turns:
        pieces += [(turn.prompt_ids[known:], False), *turn.pieces]
        known = len(turn.ids)
    ids = np.array([token for piece, _ in pieces for token in piece], np.int32)
    mask = np.repeat([int(s) for _, s in pieces], [len(p) for p, _ in pieces]).astype(np.uint8)
    return Document(ids, mask)


def _last_run(document: Document) -> Document:
    """Only the last run of supervised tokens stays supervised."""
    unsupervised = np.flatnonzero(document.loss_mask == 0)
    supervised = np.flatnonzero(document.loss_mask)
    if len(supervised) == 0:
        return document
    before = unsupervised[unsupervised < supervised[-1]]
    mask = document.loss_mask.copy()
    mask[: before[-1] if len(before) else 0] = 0
    return Document(document.input_ids, mask)


def _fit(document: Document, data: DataConfig, notes: list[str]) -> list[Document]:
    """``document`` within ``data.max_length``, by ``data.over_length``."""
    length, limit = len(document.input_ids), data.max_length
    if length <= limit:
        return [document]
    if data.over_length == "drop":
        raise Dropped("over_length", f"{length} tokens, data.max_length={limit}")
    notes.append("truncated" if data.over_length == "truncate" else "split")
    stop = limit if data.over_length == "truncate" else length
    return [
        Document(document.input_ids[at : at + limit], document.loss_mask[at : at + limit])
        for at in range(0, stop, limit)
    ]


def _trainable(document: Document, data: DataConfig) -> bool:
    """Enough supervised tokens, and two of them side by side: an anchor and its first label."""
    mask = document.loss_mask
    return bool(mask.sum() >= data.min_supervised_tokens and np.any(mask[:-1] & mask[1:]))


def describe(document: Document, chat: ChatFormat) -> list[tuple[str, bool]]:
    """Readable runs of a document: decoded text and whether it is supervised."""
    runs: list[tuple[str, bool]] = []
    edges: Any = np.flatnonzero(np.diff(document.loss_mask)) + 1
    for part in np.split(np.arange(len(document.input_ids)), edges):
        ids = document.input_ids[part].tolist()
        text = chat.tokenizer.decode(ids, skip_special_tokens=False)
        runs.append((text, bool(document.loss_mask[part[0]])))
    return runs
