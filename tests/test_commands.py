"""What the commands say about themselves, run as ``python -m`` and as ``dflash-mp`` runs them."""

import contextlib
import importlib.util
import runpy
import subprocess
import sys

import pytest

from dflash_mp import cli

SCREEN_LINES, SCREEN_COLUMNS = 24, 100
MODULES = [*cli.COMMANDS.values(), "dflash_mp.bench.data", "launch.spawn"]


def missing(module: str) -> bool:
    return importlib.util.find_spec(module) is None


@pytest.mark.parametrize("module", MODULES)
def test_help_fits_a_screen_and_has_an_example(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if missing(module):
        pytest.skip(f"{module} does not exist yet")
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.setenv("COLUMNS", str(SCREEN_COLUMNS))
    with contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    lines = capsys.readouterr().out.splitlines()
    assert 8 <= len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= SCREEN_COLUMNS
    assert any(f"-m {module}" in line for line in lines)


def dflash_mp(*arguments: str) -> subprocess.CompletedProcess:
    program = "from dflash_mp.cli import main; main()"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_the_installed_command_passes_everything_on_to_the_module() -> None:
    module = subprocess.run(
        [sys.executable, "-m", "dflash_mp.train", "--cfg", "job", "seed=7"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "seed: 7" in module.stdout
    assert dflash_mp("train", "--cfg", "job", "seed=7").stdout == module.stdout


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
