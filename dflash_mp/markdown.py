"""Tables in Markdown, and pages that hold the tables of committed results."""

from collections.abc import Sequence

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, and an empty line."""
    lines = [header, ["---"] * len(header), *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def with_tables(document: str, tables: str) -> str:
    """``document`` with what stands between the two markers replaced by ``tables``."""
    head, rest = document.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n\n{tables}\n\n{END}{tail}"
