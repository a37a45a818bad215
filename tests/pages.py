"""What README, BENCH.md and docs/ hold: blocks and spans of code, and the commands in them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from dflash_mp import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "BENCH.md", *sorted((ROOT / "docs").glob("*.md"))]

SPAN = re.compile(r"`([^`]+)`")
BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
RANKS = re.compile(r" --nproc(?:_per_node)? (\d+)")

CPU_TARGETS = ("smollm2",)
NO_WEIGHTS = ("dflash_mp.plan", "dflash_mp.export")
"""Modules that run anywhere whatever the target."""

MARKS = ("# needs GPUs", "# runs for minutes", "# may crash")
PROGRAMS = (
    *("python", "torchrun", "dflash-mp", "make", "pip", "pytest", "vllm", "sbatch", "eval", "git"),
)


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    module: str
    arguments: tuple[str, ...]
    ranks: int
    """Of its launcher, 0 without one."""
    line: str

    @property
    def overrides(self) -> tuple[str, ...]:
        """The arguments that set a key."""
        return tuple(word for word in self.arguments if "=" in word and word[0] != "-")

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
        module = "dflash_mp.train"
        while rest and rest[0].startswith("--"):
            module, rest = rest[1] if rest[0] == "--module" else module, rest[2:]
    if module.split(".")[0] != "dflash_mp":
        return None
    ranks = RANKS.search(line)
    return Command(module, tuple(rest), int(ranks[1]) if ranks else 0, line)


def commands(page: Path) -> list[Command]:
    """All commands of a page, those inside sentences included."""
    text = page.read_text()
    lines = [line for block in blocks(text) for line in lines_of(block)]
    lines += [line for span in spans(text) for line in lines_of(span)]
    return [command for line in lines if (command := command_of(line)) is not None]


def programs(text: str) -> list[str]:
    """The lines of a piece of code that run a program."""
    return [line for line in lines_of(text) if line.startswith(tuple(f"{p} " for p in PROGRAMS))]


def mark_of(block: str) -> str | None:
    """Why no test runs a block, if it says so."""
    lines = [line.strip() for line in block.splitlines()]
    return next((mark for mark in MARKS if any(line.startswith(mark) for line in lines)), None)
