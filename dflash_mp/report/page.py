"""``report.html`` of one run, and the page that compares several."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from dflash_mp.data.report_page import summary_sections
from dflash_mp.markup import Html, code, document, folded, table, text
from dflash_mp.report import blocks, sections
from dflash_mp.report.run_files import REPORT, RunFiles, read_run


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into the run folder; returns its path.

    Raises:
        UserError: there is no run in it.
    """
    return write_page(folder / REPORT, run_page(read_run(folder)))


def write_page(path: Path, page: Html) -> Path:
    """Write ``page`` so that a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(page, encoding="utf-8")
    return partial.replace(path)


def run_page(run: RunFiles) -> Html:
    """The report of one run, of whatever is there by now."""
    runs = {"": run}
    command = " ".join(run.facts.get("command", []))
    body = [
        f"<h1>{text(run.name)}</h1>",
        f"<p>{code(command)}</p>" if command else "",
        sections.overview(runs),
        "<h2>Training</h2>",
        _charts(sections.curves(runs), "nothing has been logged yet"),
        "<h2>Acceptance by length and position</h2>",
        _charts(sections.acceptance(runs), "nothing has been measured yet (data.heldout)"),
        "<h2>Where the time went</h2>",
        _charts(sections.times(runs), "no times have been logged yet"),
        "<h2>Held-out prompts</h2>",
        _decoded(run),
        "<h2>Settings that differ from the defaults</h2>",
        sections.changed_settings({"this run": run}) if run.settings else _absent("no config.yaml"),
        _all_settings(run),
        "<h2>Data</h2>",
        *(summary_sections(run.data) if run.data else [_absent("no data has been prepared yet")]),
    ]
    return document(f"{run.name}: training report", body, blocks.STYLE)


def comparison_page(runs: Sequence[RunFiles]) -> Html:
    """Several runs side by side."""
    named = dict(zip(labels([run.folder for run in runs]), runs, strict=True))
    body = [
        f"<h1>Compared: {text(' · '.join(named))}</h1>",
        f"<p>{len(runs)} runs, a column each, and in the charts a colour each. What was set "
        "differently comes first; what came of it, behind.</p>",
        *_listed(named),
        "<h2>Settings that differ</h2>",
        _warning(sections.not_comparable(named)),
        sections.different_settings(named) or _absent("none: the same settings in all of them"),
        "<h2>Results</h2>",
        sections.overview(named),
        "<h2>Training</h2>",
        _charts(sections.curves(named), "nothing has been logged yet"),
        "<h2>Acceptance by length and position</h2>",
        _charts(sections.acceptance(named), "nothing has been measured yet (data.heldout)"),
        "<h2>Where the time went</h2>",
        _charts(sections.times(named), "no times have been logged yet"),
    ]
    return document(f"{len(runs)} runs compared", body)


def _listed(runs: Mapping[str, RunFiles]) -> list[Html]:
    """Which folders the names stand for, and the commands of the runs."""
    rows = [
        [text(name), code(run.folder), code(" ".join(run.facts.get("command", [])))]
        for name, run in runs.items()
    ]
    return [folded("folders and commands", table(["run", "folder", "command"], rows))]


def _warning(lines: Sequence[str]) -> Html:
    return f'<p class="warning">{"<br>".join(map(text, lines))}</p>' if lines else ""


def labels(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart; numbered if they are the same."""
    paths = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{number}: {folder.name}" for number, folder in enumerate(folders, 1)]


def _charts(charts: Sequence[Html], otherwise: str) -> Html:
    return f'<div class="charts">{"".join(charts)}</div>' if charts else _absent(otherwise)


def _absent(why: str) -> Html:
    return f'<p class="faint">{text(why)}</p>'


def _decoded(run: RunFiles) -> Html:
    shown = blocks.shown_rows(run.decoded)
    if not shown:
        return _absent("no prompts with texts have been decoded yet (evaluate.decode_prompts)")
    prompts = [blocks.decoded_prompt(row, index == 0) for index, row in enumerate(shown)]
    return f"<p>Decoded after step {run.decoded_step:,}.</p>{blocks.LEGEND}{''.join(prompts)}"


def _all_settings(run: RunFiles) -> Html:
    if not run.settings:
        return ""
    return folded("all settings", f"<pre>{text(OmegaConf.to_yaml(run.settings))}</pre>")
