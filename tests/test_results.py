"""What a run says at its end."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

from hydra import compose, initialize_config_dir

from dflash_mp.config import TargetConfig, config_dir, to_config
from dflash_mp.drafter_source import spell_path
from dflash_mp.evaluate import EvaluateRun
from dflash_mp.export import ExportConfig
from dflash_mp.roles.results import next_commands

SERVING = Path(__file__).parents[1] / "docs" / "serving.md"


def commands(name: str) -> dict[str, list[list[str]]]:
    """The words of the commands that a run ends with, by what they are for."""
    target = TargetConfig(name, "main", "auto", "sdpa", None, True)
    job = SimpleNamespace(
        config=SimpleNamespace(target=target),
        folder=Path("outputs/qwen3_8b"),
        drafter_config=SimpleNamespace(block_size=16),
    )
    found: dict[str, list[list[str]]] = {}
    label = ""
    for line in next_commands(job):
        label = line[:12].strip() or label
        found.setdefault(label, []).append(shlex.split(line[12:], comments=True))
    return found


def test_servers_are_started_as_the_page_about_them_says() -> None:
    page = re.sub(r"\\\n\s*", " ", SERVING.read_text())
    written = [
        shlex.split(line) for line in page.splitlines() if line.startswith(("vllm", "python"))
    ]
    vllm, sglang = (words for words in commands("Qwen/Qwen3-8B")["serve"] if words)
    assert vllm in written
    assert sglang in written


def test_the_other_commands_name_drafter_and_target() -> None:
    found = commands("Qwen/Qwen3-8B")
    (evaluate,), (check, convert) = found["evaluate"], found["export"]
    with initialize_config_dir(config_dir(), version_base="1.3"):
        run = to_config(compose("evaluate", spell_path(evaluate[3:], "drafter")), EvaluateRun)
        assert run.drafter.path == "outputs/qwen3_8b/export"
        assert (run.target.name, run.target.revision) == ("Qwen/Qwen3-8B", "main")
        assert run.target.trust_remote_code
        assert to_config(compose("export", check[3:]), ExportConfig).check == run.drafter.path
        other = to_config(compose("export", spell_path(convert[3:], "checkpoint")), ExportConfig)
    assert (other.format, other.checkpoint.path) == ("speculators", run.drafter.path)
    assert other.target == run.target
