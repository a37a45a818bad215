"""Pieces of HTML for pages that load nothing from elsewhere.

Every function escapes the text it is given; what takes ``Html`` takes it as it is.
"""

import html
from collections.abc import Iterable, Sequence
from typing import Any

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2430; --line: #dde2e8;
  --faint: #616c7a; --good: #bfe8cb; --bad: #f6cdc8; --warn: #fff3d6 }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --ink: #dde3ea; --line: #343c46;
  --faint: #98a3b0; --good: #1d5233; --bad: #6b2a25; --warn: #4a3a12 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 84rem; margin: 0 auto; padding: 1rem;
  color: var(--ink); background: var(--paper); overflow-wrap: anywhere }
h1 { font-size: 1.5rem; line-height: 1.2 } h2 { font-size: 1.15rem; margin-top: 2rem }
h3 { font-size: 1rem }
.scroll { overflow-x: auto } table { border-collapse: collapse }
th, td { text-align: left; padding: .3rem 1.2rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: break-word }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
code, pre { font-size: .9em; white-space: pre-wrap; overflow-wrap: anywhere }
.warning { background: var(--warn); padding: .6rem 1rem }
.faint, figcaption .key { color: var(--faint); font-size: .9em }
.charts { display: grid; gap: 1rem 2rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)) }
figure { margin: 0 } svg { width: 100%; height: auto; display: block }
svg text { font-family: system-ui, sans-serif !important }
figcaption .key { display: inline-block; margin-left: .9rem }
figcaption .key::before { content: ""; display: inline-block; width: .75em; height: .75em;
  margin-right: .35em; background: var(--colour) }
figcaption .dashed::before { background: repeating-linear-gradient(90deg, var(--colour) 0 3px,
  transparent 3px 5px) }
"""

Html = str
"""Text that is HTML already."""


def text(value: Any) -> Html:
    """``value`` as text."""
    return html.escape(str(value))


def code(value: Any) -> Html:
    """``value`` in the type of code."""
    return f"<code>{text(value)}</code>"


def cell(value: Any) -> Html:
    """A number as the cells of tables show it; anything else as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text(value)
    return f"{value:,.3f}" if isinstance(value, float) and abs(value) < 100 else f"{value:,.0f}"


def table(head: Sequence[Any], rows: Iterable[Sequence[Html | float]]) -> Html:
    """A table; cells are numbers or HTML. It scrolls sideways where the page is too narrow."""

    def one(value: Html | float) -> Html:
        number = isinstance(value, int | float)
        return f'<td class="number">{cell(value)}</td>' if number else f"<td>{value}</td>"

    lines = ["".join(one(value) for value in row) for row in rows]
    names = "".join(f"<th>{text(name)}</th>" for name in head)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{names}</tr>{body}</table></div>'


def folded(title: str, body: Html, unfolded: bool = False) -> Html:
    """``body`` behind a line that opens it."""
    state = " open" if unfolded else ""
    return f"<details{state}><summary>{text(title)}</summary>{body}</details>"


def document(title: str, body: Iterable[Html], style: str = "") -> Html:
    """A whole page; ``style`` is added to what all pages share."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Without it a browser asks the page's server for an icon.
        f'<link rel="icon" href="data:,"><title>{text(title)}</title>'
        f"<style>{STYLE}{style}</style></head><body>{''.join(body)}</body></html>\n"
    )
