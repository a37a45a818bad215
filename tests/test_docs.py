"""README and docs/ name only what exists: links, files, commands, keys and make targets.

A block of commands that no test runs says why in a line (``MARKS``); all others are run here, on a
tiny target. The rule is told to people in docs/contributing.md.
"""

import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from dflash_mp import cli
from dflash_mp.config import config_dir, to_config
from dflash_mp.drafter_source import spell_path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("conf", "dflash_mp", "docs", "launch", "tests", ".ci")
FILES = {
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.iterdir(), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*")))
}

LINK = re.compile(r"\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`]+)`")
BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
NAMED_FILE = re.compile(r"[\w.+-]+(?:/[\w.+-]+)*(?:\.(?:py|md|yaml|sbatch|toml)|/)")

ROOT_KINDS = {
    "dflash_mp.train": "TrainConfig",
    "dflash_mp.doctor": "TrainConfig",
    "dflash_mp.evaluate": "EvaluateRun",
    "dflash_mp.export": "ExportConfig",
    "dflash_mp.plan": "PlanRun",
    "dflash_mp.data.report": "ReportConfig",
    "dflash_mp.data.generate": "GenerateConfig",
    "dflash_mp.diagnostics.race": "RaceConfig",
}
"""Modules that Hydra configures, and the dataclass of their root configuration, which they name."""

SHORT_KEYS = {"dflash_mp.export": "checkpoint", "dflash_mp.evaluate": "drafter"}
CPU_TARGETS = ("smollm2",)
NO_WEIGHTS = ("dflash_mp.plan", "dflash_mp.export")
"""Modules that run anywhere whatever the target."""

MARKS = ("# needs GPUs", "# needs the hub", "# runs for minutes")
PROGRAMS = (
    *("python", "torchrun", "dflash-mp", "make", "pip", "pytest", "vllm", "sbatch", "eval", "git"),
)
RUN_ELSEWHERE = {
    'eval "$(dflash-mp --completion)"': "test_commands.py",
    "python -m dflash_mp.diagnostics.race scenario=call-in-make-fx treatment=patch-after": (
        "diagnostics/test_race_command.py"
    ),
}
"""Unmarked commands and the test that does the same."""
ON_TINY_TARGET = {
    "dflash_mp.evaluate": ["max_new_tokens=4", "data.max_prompts=1", "run_name=evaluate"],
    "dflash_mp.data.report": ["data.heldout=null", "data.cache_dir=cache"],
    "dflash_mp.data.generate": ["max_new_tokens=4"],
}
"""Modules that load a target, and what makes them quick."""
AS_WRITTEN = ("dflash_mp.report", "dflash_mp.timeline", "dflash_mp.export", "dflash_mp.plan")
"""Modules that are quick as they are."""
REFUSED = ("gpu.memory_gb=40",)
"""Overrides of commands that are there for what they refuse."""
OF_TORCH = ("torch/", "eval_frame.py")
MADE_BY_RUNS = ("outputs/", "README.md")


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    module: str
    overrides: tuple[str, ...]
    line: str

    @property
    def needs_gpus(self) -> bool:
        """Whether it loads one of the large targets."""
        named = [o.removeprefix("target=") for o in self.overrides if o.startswith("target=")]
        large = bool(named) and named[-1] not in CPU_TARGETS
        return large and self.module not in NO_WEIGHTS


def blocks(text: str) -> list[str]:
    """Fenced blocks, and runs of lines that are indented by four."""
    return [*BLOCK.findall(text), *INDENTED.findall(BLOCK.sub("", text))]


def spans(text: str) -> list[str]:
    """Code inside sentences, each on one line."""
    return [" ".join(span.split()) for span in SPAN.findall(BLOCK.sub("", text))]


def lines_of(block: str) -> list[str]:
    """The lines of a block, continued ones joined, comments and what stands for a value cut."""
    joined = re.sub(r"\\\n\s*", " ", block).replace("loss=<tab>", "")
    return [
        re.sub(r"<[^>]*>", "placeholder", line).split(" #")[0].strip()
        for line in joined.splitlines()
    ]


def command_of(line: str) -> Command | None:
    """The module that a line runs and its overrides; None for any other line."""
    if not line.startswith(("python ", "torchrun ", "dflash-mp ")):
        return None
    words = [word for word in shlex.split(line) if word != "..."]
    if words[0] == "dflash-mp":
        if len(words) == 1 or words[1].startswith(("-", "placeholder")):
            return None
        module, rest = cli.COMMANDS[words[1]], words[2:]
    elif "-m" in words:
        at = words.index("-m")
        module, rest = words[at + 1], words[at + 2 :]
    else:
        return None
    if module == "launch.spawn":
        at = rest.index("--module") if "--module" in rest else None
        module = rest[at + 1] if at is not None else "dflash_mp.train"
    if module.split(".")[0] not in ("dflash_mp", "launch"):
        return None
    return Command(module, tuple(word for word in rest if "=" in word and word[0] != "-"), line)


def commands(page: Path) -> list[Command]:
    """All commands of a page, those inside sentences included."""
    text = page.read_text()
    lines = [line for block in blocks(text) for line in lines_of(block)]
    lines += [line for span in spans(text) for line in lines_of(span)]
    return [command for line in lines if (command := command_of(line)) is not None]


def exists(name: str) -> bool:
    """Whether a file or folder is called so, from the root or from the folder of its neighbours."""
    name = name.rstrip("/")
    return any(path == name or path.endswith(f"/{name}") for path in FILES)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    missing = [link for link in links if not (page.parent / link.split("#")[0]).exists()]
    assert not missing


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert not [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in readme]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_files_exist(page: Path) -> None:
    named = [span for span in spans(page.read_text()) if NAMED_FILE.fullmatch(span)]
    ours = [name for name in named if not name.startswith((*OF_TORCH, *MADE_BY_RUNS))]
    assert not [name for name in ours if not exists(name)]


def test_every_reason_to_drop_a_row_is_explained() -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    code = "".join(path.read_text() for path in (ROOT / "dflash_mp" / "data").glob("*.py"))
    reasons = set(re.findall(r'Dropped\(f?"(\w+)', code))
    assert len(reasons) > 20
    assert not [reason for reason in reasons if f"`{reason}" not in page]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = page.read_text()
    lines = [line for code in (*blocks(text), *spans(text)) for line in lines_of(code)]
    asked = [line.split()[1] for line in lines if line.startswith("make ")]
    assert not set(asked) - set(targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_name_modules_and_keys_that_exist(page: Path) -> None:
    with initialize_config_dir(config_dir(), version_base="1.3"):
        for command in dict.fromkeys(commands(page)):
            assert importlib.util.find_spec(command.module), command.line
            kind = ROOT_KINDS.get(command.module)
            if kind is None:
                assert not command.overrides, f"{command.line}: takes no keys"
            elif command.overrides:
                # A package is run by its __main__, which names its configuration.
                inside = f"{command.module}.__main__"
                package = (ROOT / command.module.replace(".", "/") / "__main__.py").is_file()
                module = importlib.import_module(inside if package else command.module)
                short = SHORT_KEYS.get(command.module)
                given = list(command.overrides)
                given = spell_path(given, short) if short else given
                to_config(compose(command.module.split(".")[-1], given), getattr(module, kind))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_blocks_that_need_gpus_say_so(page: Path) -> None:
    for block in blocks(page.read_text()):
        lines = lines_of(block)
        found = [command for line in lines if (command := command_of(line)) is not None]
        needs = [c.line for c in found if c.needs_gpus]
        needs += [line for line in lines if line.startswith(("vllm", "python -m sglang", "sbatch"))]
        marked = any(line.strip().startswith("# needs GPUs") for line in block.splitlines())
        assert marked == bool(needs), f"{page.name}: {needs or block}"


def unmarked(page: Path) -> list[str]:
    """The lines of a page that run a program and do not stand in a block with a mark."""
    return [
        line
        for block in blocks(page.read_text())
        if not any(line.strip().startswith(MARKS) for line in block.splitlines())
        for line in lines_of(block)
        if line.startswith(tuple(f"{program} " for program in PROGRAMS))
    ]


def run_here() -> list[str]:
    """The commands that the test below runs."""
    lines = dict.fromkeys(line for page in PAGES for line in unmarked(page))
    return [line for line in lines if line not in RUN_ELSEWHERE]


def quick(line: str, target: Path) -> list[str]:
    """The module of a command and its arguments, changed to run on a tiny target."""
    module, *words = shlex.split(line)[2:]
    if module in ON_TINY_TARGET:
        words += [f"target.name={target}", *ON_TINY_TARGET[module]]
    return [module, *words]


def exit_code(line: str) -> int:
    """What a command should end with."""
    return 2 if set(REFUSED) & set(line.split()) else 0


def test_commands_without_a_mark_can_be_run() -> None:
    for line in run_here():
        command = command_of(line)
        assert command, f"{line}: no test can run it; say why in a mark"
        known = command.module in {*ON_TINY_TARGET, *AS_WRITTEN} and "launch.spawn" not in line
        assert known, f"{line}: does it run in a second? Then name its module here, else say why"


def test_what_is_run_elsewhere_stands_there() -> None:
    lines = {line for page in PAGES for line in unmarked(page)}
    for line, name in RUN_ELSEWHERE.items():
        assert line in lines, f"{line}: on no page any more"
        code = (ROOT / "tests" / name).read_text()
        command = command_of(line)
        words = command.overrides if command else [line]
        assert all(word in code for word in words), f"{name} does not run {line}"


def test_marks_count_in_indented_blocks_too(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    commands_of = "    python -m a\n    python -m b\n"
    page.write_text(f"text\n\n    # runs for minutes\n{commands_of}\ntext\n\n{commands_of}")
    assert unmarked(page) == ["python -m a", "python -m b"]


@pytest.mark.slow
@pytest.mark.distributed
def test_every_command_without_a_mark_runs(
    launch: Callable[..., Any], tiny_target: Path, conversations: Path, tmp_path: Path
) -> None:
    """In a folder with one tiny run, under all the names that the pages use."""
    profile = ["profile=steps", "profile.skip=1", "profile.record=1"]
    run = tmp_path / "run"
    ended = launch(2, *profile, f"output_dir={run}")
    assert ended.returncode == 0, ended.stderr[-3000:]
    make_files(tmp_path, run, conversations)
    given = [[exit_code(line), *quick(line, tiny_target)] for line in run_here()]
    assert len(given) > 10
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "many_commands.py"],
        input=json.dumps(given),
        text=True,
        capture_output=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def make_files(folder: Path, run: Path, conversations: Path) -> None:
    """What the commands read: data, runs, exports."""
    rows = [json.loads(line) for line in conversations.read_text().splitlines()]
    names = {"user": "customer", "assistant": "agent"}
    files = {
        "my": rows,
        "prompts": [row | {"messages": row["messages"][:1]} for row in rows[:3]],
        "dialogues": [
            {"dialogue": [turn | {"role": names[turn["role"]]} for turn in row["messages"]]}
            for row in rows
        ],
    }
    for name, content in files.items():
        text = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{name}.jsonl").write_text(text)
    for name in ("my_run", "profiled", "smollm2_narrow"):
        shutil.copytree(run, folder / "outputs" / name)
    (last,) = (run / "checkpoints").glob("step-*4")
    shutil.copytree(last, folder / "outputs" / "my_run" / "checkpoints" / "step-500")
    (folder / "tests").symlink_to(ROOT / "tests")
