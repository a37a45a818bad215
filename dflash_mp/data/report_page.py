"""The data report as one HTML file: tables and plots, nothing loaded from elsewhere."""

from typing import Any

from dflash_mp.charts import bars, histogram
from dflash_mp.markup import Html, code, document, table, text

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


def page(report: dict[str, Any]) -> Html:
    """The whole page from what ``report.json`` holds."""
    head = ["<h1>Data report</h1>", _on_policy(report["on_policy"])]
    body = [*head, *summary_sections(report), _packing(report["packing"])]
    return document("Data report", body)


def summary_sections(summary: dict[str, Any]) -> list[Html]:
    """Tables and plots of what became of the rows, from what ``data.json`` holds."""
    body = [
        f"<p>{text(summary['template'])}; end of turn {code(summary['end_of_turn'])}; "
        f"mask from {text(summary['mask_from'])}.</p>",
        _counts(summary),
    ]
    for name, title in PARTS.items():
        part = summary[name]
        if part["rows_read"]:
            body += [f"<h3>{title}</h3>", _reasons(part), _sources(part), _lengths(title, part)]
    if summary["heldout"]["rows_read"]:
        body.append(f"<p>{text(summary['heldout']['rule'])}.</p>")
    return body


def _counts(report: dict[str, Any]) -> Html:
    rows: list[list[Any]] = [
        [label, *(report[name][key] for name in PARTS)] for key, label in COUNTS.items()
    ]
    shares = [report[name]["supervised_share"] for name in PARTS]
    return table(["", *PARTS.values()], [*rows, ["supervised share", *shares]])


def _packing(packing: dict[str, Any]) -> Html:
    return (
        f"<p>Packing: {packing['packs']:,} micro-batches of {packing['tokens_per_batch']:,} slots "
        f"per epoch, {packing['fill']:.1%} of the slots filled.</p>"
    )


def _on_policy(score: dict[str, Any] | None) -> Html:
    if score is None:
        return ""
    kind = "" if score["is_own"] else ' class="warning"'
    figure = histogram(
        "documents by agreement with the target's first choice", score["by_document"]
    )
    return f'<p{kind}>{text(score["line"])}.</p><div class="charts">{figure}</div>'


def _reasons(part: dict[str, Any]) -> Html:
    """Why rows were dropped and what was repaired, with examples."""
    result = ""
    if part["dropped_by_reason"]:
        rows = [
            [code(reason), count, "<br>".join(map(code, part["examples"].get(reason, [])))]
            for reason, count in part["dropped_by_reason"].items()
        ]
        result += table(["dropped because", "rows", "such as"], rows)
    for key, title in (("repairs", "repaired"), ("notes", "noted")):
        if part[key]:
            result += table([title, "rows"], [[code(k), n] for k, n in part[key].items()])
    return result


def _sources(part: dict[str, Any]) -> Html:
    rows = [[code(s["name"]), s["weight"], s["documents"]] for s in part["sources"]]
    return table(["source", "weight", "documents"], rows)


def _lengths(name: str, part: dict[str, Any]) -> Html:
    lengths, title = part["length_histogram"], f"{name}: documents by length in tokens"
    drawing = bars(title, list(lengths), {title: list(lengths.values())}) if lengths else ""
    return f'<div class="charts">{drawing}</div>'
