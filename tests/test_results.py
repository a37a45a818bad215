"""What a run says at its end."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydra import compose, initialize_config_dir

from dflash_mp.config import TargetConfig, TrainConfig, config_dir, to_config
from dflash_mp.drafter_source import spell_path
from dflash_mp.evaluate import EvaluateRun
from dflash_mp.export import ExportConfig
from dflash_mp.roles.results import next_commands, template_words

SERVING = Path(__file__).parents[1] / "docs" / "serving.md"


def lines(
    name: str, chat_template: str | None = None, template_kwargs: dict[str, Any] | None = None
) -> list[str]:
    """What a run says about the commands that come after it."""
    target = TargetConfig(name, "main", "auto", "sdpa", None, True)
    data = SimpleNamespace(chat_template=chat_template, template_kwargs=template_kwargs)
    job = SimpleNamespace(
        config=SimpleNamespace(target=target, data=data),
        folder=Path("outputs/qwen3_8b"),
        drafter_config=SimpleNamespace(block_size=16),
    )
    return next_commands(job)


def commands(name: str, **template: Any) -> dict[str, list[list[str]]]:
    """The words of these commands, by what they are for."""
    found: dict[str, list[list[str]]] = {}
    label = ""
    for line in lines(name, **template):
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


def test_prompts_are_rendered_as_in_training() -> None:
    given = {
        "enable_thinking": False,
        "date": "26 Jul 2024",
        "system": 'Say "it\'s", {no} $more = 1',
        "tools": [{"name": "add", "takes": [1, 2.5, None]}],
    }
    template = {"chat_template": "my/chat.jinja", "template_kwargs": given}
    found = commands("Qwen/Qwen3-8B", **template)
    with initialize_config_dir(config_dir(), version_base="1.3"):
        words = spell_path(found["evaluate"][0][3:], "drafter")
        data = to_config(compose("evaluate", words), EvaluateRun).data
    assert data.chat_template == "my/chat.jinja"
    assert data.template_kwargs == given
    vllm, sglang = (words for words in found["serve"] if words)
    for server in (vllm, sglang):
        assert server[server.index("--chat-template") + 1] == "my/chat.jinja"
    said = next(line for line in lines("Qwen/Qwen3-8B", **template) if "in each request" in line)
    assert json.loads(said[said.index("{") :]) == {"chat_template_kwargs": given}


def test_the_recipe_without_thinking_is_evaluated_without_it() -> None:
    with initialize_config_dir(config_dir(), version_base="1.3"):
        overrides = ["target=qwen3_8b", "data.train=my.jsonl"]
        trained = to_config(compose("train", overrides), TrainConfig).data
        words = template_words(trained)
        measured = to_config(compose("evaluate", [*words, "data.prompts=a.jsonl"]), EvaluateRun)
    assert measured.data.template_kwargs == trained.template_kwargs == {"enable_thinking": False}
