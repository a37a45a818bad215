"""The command: what it runs, what it prints, how it exits."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dflash_mp.config import UserError, config_dir
from dflash_mp.diagnostics import mechanism, text
from dflash_mp.diagnostics.catalogue import SCENARIOS, TREATMENTS, full_matrix, quick_matrix
from dflash_mp.diagnostics.race import RaceConfig, cell_exit, plan, race
from dflash_mp.diagnostics.tables import RESULTS
from dflash_mp.diagnostics.verdict import Tally, read_results


def config(*overrides: str) -> RaceConfig:
    with initialize_config_dir(config_dir(), version_base="1.3"):
        made = OmegaConf.to_object(compose("race", list(overrides)))
    assert isinstance(made, RaceConfig)
    return made


def test_every_key_of_the_config_has_a_comment_above_it():
    lines = (Path(config_dir()) / "race.yaml").read_text().splitlines()
    keys = [i for i, line in enumerate(lines) if line[:1].isalpha()]
    assert len(keys) > 10
    assert [lines[i] for i in keys if not lines[i - 1].startswith("#") and i > 10] == []


@pytest.mark.parametrize(
    "override",
    ["matrix=big", "repeats=0", "seconds=-1", "switch_interval=0", "device=tpu", "jobs=0"],
)
def test_nonsense_is_refused(override):
    with pytest.raises(UserError, match=override.split("=")[0]):
        config(override)


@pytest.mark.parametrize("override", ["scenario=nope", "treatment=nope"])
def test_unknown_names_are_answered_with_the_list(override):
    with pytest.raises(UserError, match=r"must be one of .*call-in-compile|.*patch-before"):
        plan(config(override))


def test_quick_matrix_shows_every_scenario_and_every_treatment():
    cells = quick_matrix()
    assert len(set(cells)) == len(cells)
    assert {s for s, t in cells if t == "none"} == set(SCENARIOS)
    assert {t for s, t in cells if s == "call-in-make-fx"} == set(TREATMENTS)
    assert {s for s, t in cells if t == "processes"} == set(SCENARIOS) - {"trace-over-inductor"}
    assert set(cells) <= set(full_matrix())


def test_full_matrix_repeats_random_cells_more_often_with_and_without_everything():
    runs = {(c.scenario, c.treatment): n for c, n in plan(config("matrix=full", "repeats=3"))}
    assert runs["call-in-make-fx", "none"] == 3
    assert runs["flex-threads", "lock"] == 1
    assert runs["flex-threads", "none"] == runs["mask-threads", "processes"] == 4


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([{"ok": 2}], 0),
        ([{"ok": 1, "loud": 1}], 10),
        ([{"silent": 1}, {"ok": 1}], 11),
        ([{"silent": 1}, {"loud": 1}], 12),
        ([{"inconclusive": 1}, {"ok": 1}], 3),
    ],
)
def test_exit_code_of_cells(outcomes, code):
    assert cell_exit([Tally("s", "t", False, o) for o in outcomes]) == code


def test_a_bad_cell_is_shown_with_its_traceback(tmp_path, capsys):
    output = tmp_path / "race.json"
    assert race(config("scenario=call-in-symbolic-trace", f"output={output}")) == 10
    shown = capsys.readouterr().out
    assert "loud: NameError" in shown
    assert "caller fails" in shown
    assert "| tracer is tracing" in shown
    written = json.loads(output.read_text())
    assert written["cells"][0]["outcomes"] == {"loud": 1}
    assert written["cells"][0]["example"]["kind"] == "NameError"


@pytest.mark.slow
def test_the_cell_that_the_page_shows(tmp_path):
    overrides = ("scenario=call-in-make-fx", "treatment=patch-after")
    expected = 0 if mechanism.features().flag_per_thread else 10
    assert race(config(*overrides, f"output={tmp_path / 'race.json'}")) == expected


def test_a_good_cell_exits_with_zero(tmp_path):
    overrides = ("scenario=call-in-symbolic-trace", "treatment=backport-hooks", "repeats=2")
    assert race(config(*overrides, f"output={tmp_path / 'race.json'}")) == 0


@pytest.mark.parametrize("path", sorted(RESULTS.glob("torch-*.json")), ids=lambda p: p.stem)
def test_the_matrix_fits_a_terminal_and_shows_every_cell(path):
    _, tallies = read_results(path)
    shown = text.matrix(tallies)
    assert max(map(len, shown.splitlines())) <= text.WIDTH
    found = {}
    for part in shown.strip().split("\n\n")[1:]:
        head, *lines = part.splitlines()
        starts = {word.group(): word.start() for word in re.finditer(r"\S+", head)}
        ends = dict(zip(starts, [*list(starts.values())[1:], None], strict=True))
        for line in lines:
            for treatment, start in starts.items():
                if cell := line[start : ends[treatment]].strip():
                    found[line.split()[0], treatment] = cell
    assert found == {(c.scenario, c.treatment): f"{c.outcome} {c.in_short()}" for c in tallies}


def test_outcomes_are_grouped_by_what_happened():
    cells = [
        Tally("s", "none", False, {"loud": 1}, {"FX error": 1}),
        Tally("s", "shim", False, {"loud": 1}, {"FX error": 1}),
        Tally("s", "lock", True, {"ok": 20}),
    ]
    lines = text.outcomes(cells, {"s": "about s"}).splitlines()
    assert any("FX error" in line and "none 1/1; shim 1/1" in line for line in lines)
    assert any(line.strip().startswith("ok") and "lock 0/20 (<14 %)" in line for line in lines)


def test_two_wrapper_frames_are_explained():
    frames = [
        "torch/_dynamo/eval_frame.py:1024 compile_wrapper",
        "torch/nn/attention/flex_attention.py:1731 flex_attention",
        "torch/_dynamo/eval_frame.py:989 compile_wrapper",
    ]
    example = {"actor": "a", "kind": "RuntimeError", "message": "m", "frames": frames}
    cell = Tally("s", "none", False, {"loud": 1}, example={**example, "tracing": {}})
    assert "recompile limit" in text.details(cell, "nothing")
    example["frames"] = frames[-1:]
    cell = Tally("s", "none", False, {"loud": 1}, example={**example, "tracing": {}})
    assert "recompile limit" not in text.details(cell, "nothing")


def test_mechanism_quotes_lines_of_the_installed_torch():
    import torch

    # From the first compile on torch's own functions are wrapped by functions of other files.
    torch.compile(torch.neg, backend="eager")(torch.zeros(1))
    statements = mechanism.explanation()
    assert len(statements) == 5
    for _, source in statements:
        place, _, quoted = source.partition("  ")
        file, _, number = place.partition(":")
        lines = (Path(torch.__file__).parent.parent / file).read_text().splitlines()
        assert lines[int(number) - 1].strip() == quoted


def test_verdict_speaks_of_processes_and_of_an_unknown_version():
    cells = [
        Tally("call-in-compile", "none", False, {"loud": 1}),
        Tally("call-in-compile", "processes", False, {"ok": 2}),
    ]
    said = text.verdict("unknown version", None, cells, mechanism.features(), "9.9")
    assert "unknown version" in said
    assert "fails while another thread compiles" in said
    assert "0 bad of 2 runs in 1 scenarios" in said


@pytest.mark.stress
def test_a_mistake_is_one_line_and_exit_code_two(tmp_path):
    command = [sys.executable, "-m", "dflash_mp.diagnostics.race", "scenario=nope"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
