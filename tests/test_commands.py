"""What the commands say about themselves, run as ``python -m`` and as ``dflash-mp`` runs them."""

import contextlib
import os
import runpy
import shutil
import subprocess
import sys
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dflash_mp import cli
from dflash_mp.config_comments import with_keys

SCREEN_LINES, SCREEN_COLUMNS = 24, 100
ROOT = Path(__file__).parents[1]
WORKERS = {
    "dflash_mp.bench.step_ours",
    "dflash_mp.bench.stream_rank",
    *(f"dflash_mp.bench.peers.{name}_step" for name in ("zlab", "specforge", "speculators")),
}
"""Started by other modules, with files as arguments."""


def run_with_m() -> set[str]:
    """The modules that do something when they are run, packages by their own name."""
    paths = [path for name in ("dflash_mp", "launch") for path in (ROOT / name).rglob("*.py")]
    runnable = [path for path in paths if '__name__ == "__main__"' in path.read_text()]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in runnable]
    return {name.removesuffix(".__main__") for name in names}


MODULES = sorted(run_with_m() - WORKERS)


def test_the_modules_that_are_run_are_known() -> None:
    assert {*cli.COMMANDS.values(), "launch.spawn"} <= set(MODULES)
    assert run_with_m() >= WORKERS


@pytest.mark.usefixtures("own_schemas")
@pytest.mark.parametrize("module", MODULES)
def test_help_fits_a_screen_and_has_an_example(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Another one may have imported it.
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.setenv("COLUMNS", str(SCREEN_COLUMNS))
    with contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    lines = capsys.readouterr().out.splitlines()
    assert 8 <= len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= SCREEN_COLUMNS
    assert any(f"-m {module}" in line for line in lines)


PROGRAM = "from dflash_mp.cli import main; main()"


def dflash_mp(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=os.environ | environment,
    )


def test_the_installed_command_passes_everything_on_to_the_module() -> None:
    module = subprocess.run(
        [sys.executable, "-m", "dflash_mp.train", "--cfg", "job", "seed=7"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert OmegaConf.create(module.stdout).seed == 7
    assert_commented(module.stdout.splitlines())
    assert dflash_mp("train", "--cfg", "job", "seed=7").stdout == module.stdout


@pytest.mark.parametrize("flags", [("--cfg", "job"), ("-c", "job"), ("--help",)])
def test_one_rank_shows_what_all_would_run(flags: tuple[str, ...]) -> None:
    first, second = (dflash_mp("train", *flags, RANK=rank) for rank in "01")
    assert (bool(first.stdout), second.stdout) == (True, "")
    assert first.returncode == second.returncode == 0


def assert_commented(lines: list[str]) -> None:
    """Each key has its comment above it, or its section has."""
    assert "# Seed of the initial weights, the order of the data and the anchors." in lines
    bare = {
        key
        for (before, _), (line, key) in pairwise([("", ""), *with_keys(lines)])
        if key and line.strip()[-1] != ":" and not before.lstrip().startswith("#")
    }
    assert bare == {"race.treatment", "race.i_know", "init.from", "init.revision"}


def above(lines: list[str], key: str) -> list[str]:
    """The comment lines above a dotted key."""
    at = next(i for i, (_, found) in enumerate(with_keys(lines)) if found == key)
    comment = list(takewhile(lambda line: line.lstrip().startswith("#"), reversed(lines[:at])))
    return [line.strip() for line in reversed(comment)]


def test_comments_are_those_of_the_options_that_were_chosen() -> None:
    def shown(command: str, *words: str) -> list[str]:
        return dflash_mp(command, "--cfg", "job", *words).stdout.splitlines()

    default, other = shown("train"), shown("train", "optim=muon", "schedule=wsd", "loss=ce+kl")
    assert above(default, "optim.kind") == ["# AdamW for all weights."]
    assert above(other, "optim.kind")[0].startswith("# Muon for matrices")
    assert "cosine" in above(default, "schedule.kind")[0]
    assert "constant stretch" in above(other, "schedule.kind")[0]
    # The default data is a file that starts from another one and says more of what it changes.
    assert above(default, "data.train") == ["# The shipped set."]
    assert above(default, "data.roles")[0].startswith("# Further names of roles")
    assert above(other, "loss.gamma") == above(default, "loss.gamma") != []
    plan = "\n".join(shown("plan", "gpu=h200"))
    assert "H200" in plan
    assert "A100" not in plan


@pytest.mark.parametrize("arguments", [[], ["fly"]])
def test_an_unknown_command_is_answered_with_the_list(arguments: list[str]) -> None:
    result = dflash_mp(*arguments)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert all(command in result.stderr for command in cli.COMMANDS)


def test_a_mistake_keeps_its_exit_code() -> None:
    result = dflash_mp("train", "optim.lrr=1")
    assert result.returncode == 2
    assert (
        result.stderr == "dflash_mp: unknown configuration key optim.lrr; did you mean optim.lr?\n"
    )


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("dflash-mp ", set(cli.COMMANDS)),
        ("dflash-mp tr", set(cli.COMMANDS)),
        ("dflash-mp train schedule=", {"schedule=constant", "schedule=cosine", "schedule=wsd"}),
        ("dflash-mp train seed=1 optim.l", {"optim.lr="}),
    ],
)
def test_tab_completes_commands_keys_and_choices(line: str, offered: set[str]) -> None:
    assert set(dflash_mp(*cli.QUERY, COMP_LINE=line).stdout.split()) == offered


@pytest.mark.skipif(shutil.which("bash") is None, reason="the completion is for bash")
def test_the_completion_works_in_bash(tmp_path: Path) -> None:
    command = tmp_path / "dflash-mp"
    command.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{PROGRAM}' \"$@\"\n")
    command.chmod(0o755)
    script = (
        'eval "$(dflash-mp --completion)"; COMP_LINE="dflash-mp train loss=d"; COMP_CWORD=2; '
        'COMP_WORDS=($COMP_LINE); _dflash_mp; echo "${COMPREPLY[@]}"; complete -p dflash-mp'
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PATH": path},
    )
    assert done.stdout.splitlines()[0] == "loss=dpace"
