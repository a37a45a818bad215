"""README, BENCH.md and docs/ name only what exists: links, files, commands, keys, make targets."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from dflash_mp.config import config_dir, to_config
from dflash_mp.drafter_source import spell_path
from pages import PAGES, ROOT, blocks, command_of, commands, lines_of, mark_of, spans

FOLDERS = ("conf", "dflash_mp", "docs", "launch", "tests", ".ci")
FILES = {
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.iterdir(), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*")))
}

LINK = re.compile(r"\]\(([^)\s]+)\)")
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
OF_TORCH = ("torch/", "eval_frame.py")
MADE_BY_RUNS = ("outputs/", "README.md")


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
    names = [page.relative_to(ROOT).as_posix() for page in PAGES[1:]]
    assert not [name for name in names if f"({name})" not in readme]


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
        marked = mark_of(block) == "# needs GPUs"
        assert marked == bool(needs), f"{page.name}: {needs or block}"
