"""The report of a run: what it shows of whole, cut and bare runs, and that browsers like it."""

import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dflash_mp.charts import thinned
from dflash_mp.config import UserError
from dflash_mp.learning_config import OBJECTIVES
from dflash_mp.metrics import empty_counts
from dflash_mp.report.page import comparison_page, labels, run_page, write_report
from dflash_mp.report.run_files import changes, read_run
from dflash_mp.report.sections import losses
from dflash_mp.roles.live_report import LiveReport
from dflash_mp.tracking import loss_panels

EVIL = "<script>document.title='x'</script>&\"'"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), ""
)
DATA_PART = {
    "rows_read": 5, "trained": 4, "repaired": 0, "dropped": 1, "dropped_by_reason": {"empty": 1},
    "examples": {"empty": [f"a.jsonl:3: {EVIL}"]}, "repairs": {}, "notes": {}, "documents": 4,
    "tokens": 90, "supervised_tokens": 40, "supervised_share": 0.44, "duplicates": 0, "longest": 30,
    "length_histogram": {"16-31": 4}, "sources": [{"name": EVIL, "weight": 1.0, "documents": 4}],
}  # fmt: skip


def metrics(steps: int) -> list[dict]:
    rows: list[dict] = [{"step": 0, "seconds": 1.0, "eval/decoded_acceptance_length": 1.0}]
    for step in range(2, steps + 1, 2):
        row = {"step": step, "seconds": 5.0 * step, "train/loss": 9.0 / step, "train/lr": 1e-3}
        row |= {"train/grad_norm": 1.0, "train/skipped": 0.0, "perf/tokens_per_s": 1234.5}
        row |= {"perf/drafter_train": 0.5, "perf/drafter_wait": 0.25}
        row |= {"perf/target_forward": 0.5, "perf/target_decode": 0.1, "perf/target_wait": 0.3}
        if step % 4 == 0:
            row |= {"eval/loss": 3.0, "eval/acceptance_length": 1.0 + step / 10}
        rows.append(row)
    return rows


def decoded_row(prompt: int) -> dict:
    """Three cycles of block size 4: two accepted, none, and one that ends the text."""
    return {
        "prompt": prompt, "prompt_tokens": 3, "block_size": 4, "tokens": [10, 11, 12, 13, 14, 0],
        "committed": [3, 1, 1], "accepted": [2, 0, 1], "proposed": [3, 3, 1],
        "drafted": [[11, 12, 99], [98, 97, 96], [0, 96, 96]],
        "prefill_seconds": 0.1, "decode_seconds": 0.3, "plain_tokens": None, "plain_seconds": None,
        "verdict": "same", "largest_gap": 0.0, "prompt_text": f"say {EVIL}",
        "pieces": {str(i): f" t{i}" for i in (10, 11, 12, 13, 14, 96, 97, 98, 99)} | {"0": EVIL},
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has ended, as a run leaves it."""
    folder = tmp_path / "run"
    (folder / "decode").mkdir(parents=True)
    part = {"train": DATA_PART, "heldout": DATA_PART | {"rule": EVIL}}
    files = {
        "run.json": {"command": ["torchrun", EVIL], "commit": "0123456789abcdef", "packages": {}},
        "data.json": {"template": EVIL, "end_of_turn": "<|end|>", "mask_from": "markers", **part},
        "results.json": {"simulated": {}, "decoded_before": None, "decoded": None},
        "heldout.json": {
            "step": 8, "block_size": 4, "cycles": 4, "histogram": [1, 2, 1, 0],
            "slot_acceptance_rate": [0.75, 0.5, None],
        },
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "config.yaml").write_text(
        f"run_name: a\ntarget:\n  name: {json.dumps(EVIL)}\noptim:\n  lr: 0.125\nsteps: 8\n"
    )
    write_lines(folder / "metrics.jsonl", metrics(8))
    for step in (0, 4, 8):
        write_lines(folder / "decode" / f"step-{step:06d}.jsonl", [decoded_row(0), decoded_row(1)])
    return folder


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Page(HTMLParser):
    """Text and elements of a page; refuses what is closed in another order than opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.seen, self.ids, self.by_class = [], [], [], {}
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in ("meta", "link", "br"):
            self.open.append((tag, dict(attrs).get("class")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1][1]:
            self.by_class.setdefault(self.open[-1][1], []).append(data)


def test_a_whole_run(run: Path) -> None:
    raw = write_report(run).read_text()
    page = Page(raw)
    for word in ("8", "0:00:40", "2 of 2", "0123456789ab", "optim.lr", "0.125", "1,234"):
        assert word in page.text
    # Five curves, two of acceptance, two of times, two of the data.
    assert page.seen.count("svg") == 11
    assert len(page.ids) == len(set(page.ids))
    # lr differs from the default, the seed of the run is not even known: both are shown as such.
    assert "Settings that differ from the defaults" in page.text
    assert "running, or cut short" not in page.text


def test_blocks_are_coloured_by_what_became_of_their_tokens(run: Path) -> None:
    found = Page(write_report(run).read_text()).by_class
    legend = {
        "hit": "drafted and accepted",
        "miss": "drafted and rejected",
        "own": "the target's own",
    }
    spans = {
        kind: [token for token in found[kind] if token != name] for kind, name in legend.items()
    }
    # Twice for each of two prompts: in the answer and in its blocks.
    assert spans["hit"] == [" t11", " t12", EVIL] * 4
    assert spans["miss"] == [" t99", " t98", " t97", " t96"] * 2
    # The first one comes from the prefill; the stop token at the end was drafted.
    assert spans["own"] == [" t10", " t13", " t14", " t13", " t14"] * 2
    assert found["count"] == ["3", "1", "1"] * 2


@pytest.mark.parametrize("several", [False, True])
def test_text_from_data_is_text_and_nothing_is_loaded(run: Path, several: bool) -> None:
    evil = run.parent / "<b>$x_1$"
    shutil.copytree(run, evil)
    files = [read_run(run), read_run(evil)]
    raw = comparison_page(files) if several else run_page(files[1])
    page = Page(raw)
    assert EVIL in page.text
    assert "<b>$x_1$" in page.text
    assert "script" not in page.seen
    assert "b" not in page.seen
    assert not re.search(r"""(src|href)=["'](?!#|data:,)|@import|url\((?!#)""", raw)


@pytest.mark.parametrize(
    "missing",
    [
        ["results.json"],
        ["heldout.json", "decode/*"],
        ["data.json", "results.json"],
        ["metrics.jsonl", "heldout.json", "decode/*", "results.json"],
        ["config.yaml"],
        ["run.json", "config.yaml", "data.json", "heldout.json", "decode/*", "results.json"],
    ],
    ids=" ".join,
)
def test_whatever_is_missing_there_is_a_report(run: Path, missing: list[str]) -> None:
    for pattern in missing:
        for path in run.glob(pattern):
            path.unlink()
    page = Page(write_report(run).read_text())
    assert ("running, or cut short" in page.text) == ("results.json" in missing)
    assert ("nothing has been logged yet" in page.text) == ("metrics.jsonl" in missing)
    assert ("nothing has been measured yet" in page.text) == ("decode/*" in missing)


def test_comparison_with_a_run_that_has_nothing_yet(run: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.json").write_text("{}")
    page = Page(comparison_page([read_run(run), read_run(tmp_path / "new")]))
    assert page.seen.count("svg") == 9
    assert len(page.ids) == len(set(page.ids))


def test_a_comparison_begins_with_what_was_set_differently(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    config = (run / "config.yaml").read_text().replace("run_name: a", "run_name: b")
    (other / "config.yaml").write_text(config)
    alike = Page(comparison_page([read_run(run), read_run(other)])).text
    assert "the same settings in all of them" in alike
    assert "do not compare" not in alike
    changed = config.replace("0.125", "0.25") + "loss:\n  kind: tv\n"
    (other / "config.yaml").write_text(changed)
    (run / "config.yaml").write_text(config + "loss:\n  kind: kl\n")
    told = Page(comparison_page([read_run(run), read_run(other)])).text
    assert "Compared: run · other" in told
    assert "loss.kind differs: training losses of these runs do not compare" in told
    places = [told.index(word) for word in ("optim.lr0.1250.25", "steps88", "Tokens per second")]
    assert places == sorted(places)
    assert "run_name" not in told


def test_a_run_that_was_killed_while_it_wrote(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "seconds": 60.0, "train/lo')
    newest = run / "decode" / "step-000008.jsonl"
    newest.write_text(newest.read_text()[:40])
    (run / "results.json").write_text('{"simula')
    files = read_run(run)
    assert files.last_step == 8
    assert (files.decoded_step, len(files.decoded)) == (4, 2)
    assert "running, or cut short" in Page(run_page(files)).text


def test_values_that_are_no_numbers(run: Path) -> None:
    rows = [row | {"train/loss": float("nan")} for row in metrics(8)]
    rows[-1]["eval/decoded_acceptance_length"] = None
    write_lines(run / "metrics.jsonl", rows)
    assert "nan" in Page(write_report(run).read_text()).text


def test_command(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dflash_mp.report"]
    done = subprocess.run([*command, str(run)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{run / 'report.html'}\n"
    assert (run / "report.html").read_text() == run_page(read_run(run))
    again = [*command, str(run), str(run), "--output", str(tmp_path / "two.html")]
    subprocess.run(again, check=True)
    assert "2: run" in Page((tmp_path / "two.html").read_text()).text


def test_during_a_run_it_is_written_now_and_then(run: Path) -> None:
    page, counts, path = LiveReport(run, active=True), empty_counts(4), run / "report.html"
    page.update(stopping=False, last=False)
    assert not path.exists(), "nothing new to show"
    page.walked(6, counts)
    page.update(stopping=False, last=False)
    assert json.loads((run / "heldout.json").read_text())["step"] == 6
    path.unlink()
    page.walked(8, counts)
    page.update(stopping=False, last=False)
    assert not path.exists(), "the last one was just written"
    page.update(stopping=True, last=False)
    path.unlink()
    LiveReport(run, active=False).write()
    assert not path.exists(), "another drafter's"


def test_a_report_that_fails_does_not_end_the_training(tmp_path: Path, caplog) -> None:
    LiveReport(tmp_path, active=True).write()
    assert "the training goes on" in caplog.text
    assert "is no run folder" in caplog.text


def test_no_run_in_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run folder"):
        read_run(tmp_path)
    command = [sys.executable, "-m", "dflash_mp.report", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_runs_are_told_apart() -> None:
    assert labels([Path("/x/a"), Path("/x/b/")]) == ["a", "b"]
    assert labels([Path("/x/1/run"), Path("/x/2/run")]) == ["1/run", "2/run"]
    assert labels([Path("/x/run"), Path("/x/run")]) == ["1: run", "2: run"]


def test_changes_are_told_as_they_are_typed() -> None:
    same = {"seed": 0, "target.layer_ids": None}
    assert changes(same) == []
    told = changes(same | {"steps": 8, "trackers": [], "isolation": "threads"})
    assert told == [
        "steps=8 (default null)",
        'trackers=[] (default ["tensorboard"])',
        "isolation=threads (default processes)",
    ]


def test_losses_of_two_measures_never_share_an_axis(run: Path) -> None:
    same = {"training": "train/loss", "held out": "eval/loss"}
    apart = [{key: same[key]} for key in same]
    assert list(losses({"": read_run(run)}).values()) == [same]
    with (run / "config.yaml").open("a") as file:
        file.write("loss:\n  kind: tv\n")
    tv = losses({"": read_run(run)})
    assert list(tv.values()) == apart
    assert OBJECTIVES["tv"] in next(iter(tv))
    assert list(loss_panels(OBJECTIVES["tv"])) == [OBJECTIVES["tv"], OBJECTIVES["ce"]]
    assert loss_panels(OBJECTIVES["ce"]) == {OBJECTIVES["ce"]: {v: k for k, v in same.items()}}
    assert "Held-out loss: cross-entropy" in Page(run_page(read_run(run))).text


def test_long_series_keep_their_shape() -> None:
    points = [(float(i), float(i)) for i in range(100_001)]
    short = thinned(points, most=400)
    assert 300 < len(short) <= 400
    assert all(x == y for x, y in short)
    assert short[-1][0] > 99_000
    assert thinned(points[:400], most=400) == points[:400]


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("width", [400, 1400])
def test_in_a_browser(run: Path, tmp_path: Path, width: int) -> None:
    """No message on the console, and nothing is wider than the window."""
    long = run.parent / ("long" * 20)
    shutil.copytree(run, long)
    raw = {"one": run_page(read_run(run)), "two": comparison_page([read_run(run), read_run(long)])}
    # A window has a least width; a frame inside of it has the width it is told.
    probe = (
        "<body><script>onload = () => { const f = document.querySelector('iframe').contentWindow, "
        "d = f.document, e = d.documentElement, wide = [...d.querySelectorAll('svg')]"
        ".filter(s => s.getBoundingClientRect().width > 300); document.title = "
        "[f.innerWidth, e.clientWidth, e.scrollWidth, wide.length].join(' ') }</script>"
    )
    for name, page in raw.items():
        path = tmp_path / f"{name}.html"
        frame = f'<iframe width={width} height=2000 frameborder=0 srcdoc="{html.escape(page)}">'
        path.write_text(f"{probe}{frame}</iframe></body>")
        done = subprocess.run(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
                f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1500,2100",
                "--dump-dom", path.as_uri(),
            ],
            capture_output=True, text=True, timeout=100, check=True,
        )  # fmt: skip
        assert "CONSOLE" not in done.stderr
        found = re.search(r"<title>([\d ]+)</title>", done.stdout)
        assert found, done.stdout[:300]
        inner, client, scroll, drawn = map(int, found[1].split())
        assert inner == width
        assert scroll == client
        assert drawn == page.count("<svg")
