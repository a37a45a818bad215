"""The doctor: what it says about a healthy run, and that it notices each kind of illness."""

import runpy
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from transformers import Qwen3_5TextConfig, Qwen3Config

from dflash_mp.checkup import machine
from dflash_mp.checkup.finding import OK, PROBLEM, WARNING
from dflash_mp.checkup.run import check_run, fast_kernels, roles
from dflash_mp.config import TrainConfig, config_dir, to_config


def composed(*overrides: str) -> TrainConfig:
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return to_config(compose("doctor", list(overrides)), TrainConfig)


def tiny(target: Path) -> list[str]:
    return [f"target.name={target}", "target.layer_ids=[0,2]", "drafter.tapped_layers=2"]


def test_a_healthy_run_has_no_problem(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dflash_mp.doctor", *tiny(tiny_target)])
    runpy.run_module("dflash_mp.doctor", run_name="__main__", alter_sys=True)
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) > 10
    assert {line.split()[0] for line in lines} <= {OK, WARNING}
    assert last.startswith("no problems")
    assert any("reads target layers [0, 2], mask token 1" in line for line in lines)
    assert any("a reply ends with <|end|>" in line for line in lines)


def test_it_takes_the_keys_of_the_training_and_needs_no_data() -> None:
    config = composed("target=qwen3_8b", "optim.lr=1e-4", "experiment=smoke")
    assert (config.optim.lr, config.run_name, config.data.train) == (1e-4, "smoke", None)


def test_a_target_without_a_template_is_a_problem_with_its_fix(
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bare = shutil.copytree(tiny_target, tmp_path / "target")
    (bare / "chat_template.jinja").unlink()
    monkeypatch.setattr(sys, "argv", ["dflash_mp.doctor", *tiny(bare), "data.train=/nowhere"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("dflash_mp.doctor", run_name="__main__", alter_sys=True)
    said = capsys.readouterr()
    assert end.value.code == 2
    assert said.err == "dflash_mp: 2 problem(s): chat template, data\n"
    assert "set data.chat_template to a Jinja file" in said.out


def test_a_target_that_is_not_there_or_too_shallow_is_a_problem(tiny_target: Path) -> None:
    for overrides, words in (
        (["target.name=/nowhere"], "no such folder"),
        ([f"target.name={tiny_target}", "target.layer_ids=[0,9]", "drafter.tapped_layers=2"], "9"),
    ):
        findings, needed = check_run(composed(*overrides), 3, 1)
        assert findings[-1].level == PROBLEM
        assert words in findings[-1].found
        assert needed == 0


def test_checkpoints_of_a_run_are_counted(tiny_target: Path) -> None:
    findings, needed = check_run(composed(*tiny(tiny_target)), 3, 1)
    assert {finding.level for finding in findings} == {OK}
    parameters = needed / 12 / 4
    assert parameters == int(parameters)
    assert 10_000 < parameters < 100_000


@pytest.mark.parametrize(
    ("ranks", "nodes", "per_step", "level"),
    [(3, 1, 1, OK), (8, 1, 6, OK), (8, 1, 4, WARNING), (8, 1, 2, PROBLEM), (8, 2, 3, PROBLEM)],
)
def test_roles(ranks: int, nodes: int, per_step: int, level: str) -> None:
    config = composed(f"micro_batches_per_step={per_step}")
    assert roles(config, ranks, nodes).level == level


def test_roles_that_do_not_add_up() -> None:
    finding = roles(composed("topology.targets=2", "topology.drafters=2"), 8, 1)
    assert (finding.level, "need 4 ranks a node" in finding.found) == (PROBLEM, True)


def test_only_a_target_with_linear_attention_needs_fast_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert fast_kernels(Qwen3Config(num_hidden_layers=4)) == []
    # An import of None fails, installed or not.
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    found = fast_kernels(Qwen3_5TextConfig(num_hidden_layers=8))
    assert [finding.fix for finding in found] == [
        "pip install flash-linear-attention",
        "pip install causal-conv1d",
    ]
    assert all("6 layers" in finding.found for finding in found)


def test_space(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    deep = tmp_path / "not" / "yet"
    assert machine.disk("folder", deep, free / 3).level == OK
    assert machine.disk("folder", deep, free * 0.75).level == WARNING
    assert machine.disk("folder", deep, free * 2).level == PROBLEM
    assert not deep.exists()
    file = tmp_path / "file"
    file.write_text("")
    assert machine.disk("folder", file / "below", 0).level == PROBLEM
    assert machine.shared_memory(tmp_path, free * 2).level == WARNING
    assert machine.shared_memory(tmp_path, 0).level == OK


def test_a_resolver_that_does_not_answer_is_noticed_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert machine.reverse_lookup().found.startswith("the name of ::ffff:127.0.0.1 takes")
    monkeypatch.setattr(socket, "getnameinfo", lambda *_: time.sleep(20))
    finding = machine.reverse_lookup()
    assert finding.level == WARNING
    assert "more than 1.0 s" in finding.found
    assert "/etc/hosts" in finding.fix


def test_a_requirement_that_is_not_met_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.unmet_requirements("no-such-package") == []
    folder = tmp_path / "made_up-1.0.dist-info"
    folder.mkdir()
    required = ("torch<2", "pytest>=1", "no-such-package>=1", 'hydra-core<1; extra == "dev"')
    lines = [f"Requires-Dist: {requirement}" for requirement in required]
    (folder / "METADATA").write_text("\n".join(["Name: made-up", "Version: 1.0", *lines]) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert machine.unmet_requirements("made-up") == [
        f"torch<2 (found {torch.__version__})",
        "no-such-package>=1 (missing)",
    ]


def test_a_patched_torch_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.torch_race().level == OK
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    assert "torch.compiler.is_compiling" in machine.torch_race().found


def start(tiny_target: Path, *command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command, *tiny(tiny_target)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.distributed
def test_under_torchrun_every_edge_is_measured(tiny_target: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3"]
    result = start(tiny_target, *torchrun, "-m", "dflash_mp.doctor")
    assert result.returncode == 0, result.stderr[-2000:]
    for target in (0, 1):
        assert result.stdout.count(f"target{target} > drafter0 shm, ") == 1
    assert result.stdout.splitlines()[-1].startswith("no problems")


@pytest.mark.distributed
def test_a_problem_ends_all_ranks_with_one_line_and_exit_code_two(tiny_target: Path) -> None:
    command = ["-m", "launch.spawn", "--nproc", "2", "--module", "dflash_mp.doctor"]
    result = start(tiny_target, *command, "data.train=/nowhere")
    assert result.returncode == 2
    assert result.stderr == "dflash_mp: 1 problem(s): data\n"
    assert result.stdout.count("target0 > drafter0 shm, ") == 1
