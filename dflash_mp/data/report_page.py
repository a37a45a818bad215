"""The data report as one HTML file: tables and plots, nothing loaded from elsewhere."""

import html
import io
from collections.abc import Iterable
from typing import Any

from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c2430; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #e3e7ec;
  vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
code { font-size: .9em; overflow-wrap: anywhere }
.warning { background: #fff3d6; padding: .6rem 1rem }
figure { display: inline-block; margin: 0 1rem 0 0; max-width: 29rem } svg { max-width: 100%;
  height: auto }
"""
PARTS = {"train": "Training", "heldout": "Held out"}
COUNTS = {
    "rows_read": "rows read",
    "trained": "trained",
    "repaired": "of these repaired",
    "dropped": "dropped",
    "documents": "documents",
    "duplicates": "duplicate documents",
    "tokens": "tokens",
    "supervised_tokens": "supervised tokens",
    "longest": "longest document, tokens",
}


def page(report: dict[str, Any]) -> str:
    """The whole page from what ``report.json`` holds."""
    body = [
        "<h1>Data report</h1>",
        f"<p>{_text(report['template'])}; end of turn {_code(report['end_of_turn'])}; "
        f"mask from {_text(report['mask_from'])}.</p>",
        _on_policy(report["on_policy"]),
        _counts(report),
        _packing(report["packing"]),
    ]
    for name, title in PARTS.items():
        part = report[name]
        if part["rows_read"]:
            body += [f"<h2>{title}</h2>", _plots(part), _reasons(part), _sources(part)]
    if report["heldout"]["rows_read"]:
        body.append(f"<p>{_text(report['heldout']['rule'])}.</p>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Data report</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _text(value: Any) -> str:
    return html.escape(str(value))


def _code(value: Any) -> str:
    return f"<code>{_text(value)}</code>"


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, int | float):
            shown = f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
            return f'<td class="number">{shown}</td>'
        return f"<td>{value}</td>"

    lines = ["".join(cell(value) for value in row) for row in rows]
    names = "".join(f"<th>{_text(name)}</th>" for name in head)
    return f"<table><tr>{names}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _counts(report: dict[str, Any]) -> str:
    rows: list[list[Any]] = [
        [label, *(report[name][key] for name in PARTS)] for key, label in COUNTS.items()
    ]
    shares = [report[name]["supervised_share"] for name in PARTS]
    return _table(["", *PARTS.values()], [*rows, ["supervised share", *shares]])


def _packing(packing: dict[str, Any]) -> str:
    return (
        f"<p>Packing: {packing['packs']:,} micro-batches of {packing['tokens_per_batch']:,} slots "
        f"per epoch, {packing['fill']:.1%} of the slots filled.</p>"
    )


def _on_policy(score: dict[str, Any] | None) -> str:
    if score is None:
        return ""
    kind = "" if score["is_own"] else ' class="warning"'
    figure = _histogram(score["by_document"], "agreement with the target's first choice")
    return f"<p{kind}>{_text(score['line'])}.</p>{figure}"


def _reasons(part: dict[str, Any]) -> str:
    """Why rows were dropped and what was repaired, with examples."""
    result = ""
    if part["dropped_by_reason"]:
        rows = [
            [_code(reason), count, "<br>".join(map(_code, part["examples"].get(reason, [])))]
            for reason, count in part["dropped_by_reason"].items()
        ]
        result += _table(["dropped because", "rows", "such as"], rows)
    for key, title in (("repairs", "repaired"), ("notes", "noted")):
        if part[key]:
            result += _table([title, "rows"], [[_code(k), n] for k, n in part[key].items()])
    return result


def _sources(part: dict[str, Any]) -> str:
    rows = [[_code(s["name"]), s["weight"], s["documents"]] for s in part["sources"]]
    return _table(["source", "weight", "documents"], rows)


def _plots(part: dict[str, Any]) -> str:
    lengths = part["length_histogram"]
    return _bars(list(lengths), list(lengths.values()), "documents by length in tokens")


def _bars(labels: list[str], values: list[int], title: str) -> str:
    figure = Figure(figsize=(5.5, 2.8))
    axes = figure.subplots()
    axes.bar(range(len(values)), values, color="#3b6ea5")
    axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
    return _svg(figure, axes, title)


def _histogram(values: list[float], title: str) -> str:
    figure = Figure(figsize=(5.5, 2.8))
    axes = figure.subplots()
    axes.hist(values, bins=20, range=(0, 1), color="#3b6ea5")
    axes.set_ylabel("documents", fontsize=8)
    return _svg(figure, axes, title)


def _svg(figure: Any, axes: Any, title: str) -> str:
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    drawing = out.getvalue()
    return f"<figure>{drawing[drawing.index('<svg') :]}</figure>"
