"""Decoded text with its tokens coloured by where they came from."""

from collections.abc import Iterator, Sequence
from typing import Any

from dflash_mp.markup import Html, folded, text

STYLE = """
.answer, .prompt { white-space: pre-wrap; margin: .3rem 0 .6rem; padding: .5rem .8rem;
  border-left: 3px solid var(--line) }
.hit { background: var(--good) } .miss { background: var(--bad); text-decoration: line-through }
.own { border-bottom: 1px dotted var(--faint) }
.block { font-family: ui-monospace, monospace; font-size: .85rem; padding-left: 2.2rem;
  text-indent: -2.2rem; line-height: 1.7 }
.block > span { white-space: pre-wrap; margin-right: 2px; border-radius: 3px; padding: 1px 2px }
.block .count { display: inline-block; width: 1.6rem; text-align: right; color: var(--faint);
  margin-right: .4rem; text-indent: 0 }
"""

LEGEND = (
    '<p class="faint"><span class="hit">drafted and accepted</span> '
    '<span class="miss">drafted and rejected</span> <span class="own">the target\'s own</span></p>'
)


def shown_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the decoded prompts that came with texts."""
    return [row for row in rows if "pieces" in row]


def decoded_prompt(row: dict[str, Any], unfolded: bool = False) -> Html:
    """Prompt, answer, and every block of one decoded prompt (see ``roles.texts.with_texts``)."""
    cycles = list(_cycles(row))
    pieces = row["pieces"]
    first = _token(pieces, "own", row["tokens"][0])
    answer = "".join(
        "".join(_token(pieces, "hit", token) for token in hits)
        + "".join(_token(pieces, "own", token) for token in own)
        for hits, _, own in cycles
    )
    mean = sum(row["committed"]) / max(1, len(row["committed"]))
    blocks = "".join(_block(pieces, *cycle) for cycle in cycles)
    title = f"{len(cycles)} blocks, {mean:.2f} tokens per target forward"
    return (
        f"<h3>Prompt {text(row['prompt'])}</h3>"
        f'<div class="prompt faint">{text(row["prompt_text"])}</div>'
        f'<div class="answer">{first}{answer}</div>{folded(title, blocks, unfolded)}'
    )


def _cycles(row: dict[str, Any]) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Of each block: tokens accepted, tokens rejected, and the target's own token, if it came.

    It does not where a drafted token ended the text; nothing behind that one was put to the test.
    """
    position = 1
    lists = (row[key] for key in ("committed", "accepted", "proposed", "drafted"))
    for committed, accepted, proposed, drafted in zip(*lists, strict=True):
        new = row["tokens"][position : position + committed]
        yield drafted[:accepted], drafted[accepted:proposed], new[accepted:]
        position += committed


def _block(pieces: dict[str, str], hits: list[int], misses: list[int], own: list[int]) -> Html:
    spans = [_token(pieces, "hit", token, True) for token in hits]
    spans += [_token(pieces, "own", token, True) for token in own]
    spans += [_token(pieces, "miss", token, True) for token in misses]
    count = f'<span class="count">{len(hits) + len(own)}</span>'
    return f'<div class="block">{count}{"".join(spans)}</div>'


def _token(pieces: dict[str, str], kind: str, token: int, in_line: bool = False) -> Html:
    piece = pieces.get(str(token), f"[{token}]")
    if in_line:
        piece = piece.replace("\n", "↵")
    return f'<span class="{kind}">{text(piece)}</span>'
