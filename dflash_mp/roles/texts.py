"""Texts for the rows of real decoding, so that a report can show them without a tokenizer."""

from collections.abc import Sequence
from typing import Any

from dflash_mp.acceptance_summary import Row

SHOWN_PROMPTS = 4
"""Held-out prompts that come with texts."""
PROMPT_TOKENS = 200
"""Of a prompt, its last tokens."""


def with_texts(row: Row, prompt: Sequence[int], tokenizer: Any) -> Row:
    """``row`` with ``prompt_text`` and ``pieces``, the text of each token in its lists by its id.

    A token that is a part of a character has a replacement character for its text.
    """
    # Decoded alone, the first token of a text would lose the blank before its word.
    before = tokenizer.encode("a", add_special_tokens=False)

    def piece(token: int) -> str:
        return tokenizer.decode([*before, token]).removeprefix(tokenizer.decode(before))

    ids = {*row["tokens"], *(token for block in row["drafted"] for token in block)}
    start = "… " if len(prompt) > PROMPT_TOKENS else ""
    return {
        **row,
        "prompt_text": start + tokenizer.decode(prompt[-PROMPT_TOKENS:]),
        "pieces": {str(token): piece(token) for token in sorted(ids)},
    }
