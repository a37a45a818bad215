"""Every command of README, BENCH.md and docs/ is run here, made quick, or named with a reason.

Trainings and other jobs run on the tiny target of ``tiny.py``, with the keys that the page gives
them and fewer steps, started by ``launch.spawn`` (the tests of the training start torchrun, too).
Commands that differ in nothing but the launcher or the number of ranks run once, and one that is
told without its keys counts as run with those of another page. A block that no test runs says so in
a line of its own (``MARKS``); docs/contributing.md tells people.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pages import PAGES, ROOT, Command, blocks, command_of, mark_of, programs, spans
from tiny import LAUNCHED, TINY_RUN

MOST_RANKS = 2
FIRST = "run_name=profiled"
"""In the command whose run folder the others read."""

TINY_DATA = ("data.train=my.jsonl", "data.heldout=heldout.jsonl")
TINY_TAPS = ("target.layer_ids=[0,2]", "drafter.tapped_layers=2")
QUICK = {
    "dflash_mp.train": (
        *("steps=3", "profile.skip=1", "profile.record=1", "data.cache_dir=cache"),
    ),
    "dflash_mp.doctor": (),
    "dflash_mp.evaluate": ("max_new_tokens=4", "data.max_prompts=1", "run_name=evaluate"),
    "dflash_mp.data.report": ("data.heldout=null", "data.cache_dir=cache"),
    "dflash_mp.data.generate": ("max_new_tokens=4",),
}
"""Modules that load a target, and what makes them quick whatever the page says."""
BARE = {"dflash_mp.doctor": (*TINY_TAPS, *TINY_DATA)}
"""The keys of a command that no page gives any."""
AS_WRITTEN = (
    *("dflash_mp.report", "dflash_mp.timeline", "dflash_mp.export", "dflash_mp.plan"),
    *("dflash_mp.bench.tables", "dflash_mp.diagnostics.tables"),
)
"""Modules that are quick as they are."""
REFUSED = ("gpu.memory_gb=40",)
"""Overrides of commands that are there for what they refuse."""

RACE_CELL = "scenario=call-in-make-fx treatment=patch-after"
THREADS = (
    "isolation=threads race.i_know=true topology.targets=1 topology.drafters=3 "
    "micro_batches_per_step=3 drafter.compile=aot_eager race.treatment=none"
)
RUN_ELSEWHERE = {
    'eval "$(dflash-mp --completion)"': "test_commands.py",
    "dflash-mp train": "test_commands.py",
    f"python -m dflash_mp.diagnostics.race {RACE_CELL}": "diagnostics/test_race_command.py",
}
"""Commands that a test of their own runs."""
NOT_RUN = {
    "make install": "everything is installed where tests run",
    "make lint": "a part of .ci/run",
    "make test": "runs this file",
    "make test-fast": "runs this file's neighbours",
    "make train": "ten minutes; a training like any other",
    "make interop": "installs other projects; their part is tests/interop/",
    "make fault-matrix": "minutes; a part of it is tests/faults/test_faults.py",
    "pytest -m stress": "many minutes: chance needs many runs",
    "make repro-race": "a minute; single cells are in diagnostics/test_race_command.py",
    "make repro-race TORCH=2.11.0": "installs another torch",
    "make bench": "over an hour; its quick forms are in bench/test_bench.py",
    "make bench FORM=full": "hours",
    "python -m dflash_mp.bench.step recompute": "minutes; the quick form is in bench/test_bench.py",
    "python -m dflash_mp.bench.plan": "a minute and more; a tiny shape is in bench/test_bench.py",
    "python -m dflash_mp.bench.wire_dtype outputs/smollm2_narrow/export": "the default target",
    f"python -m dflash_mp.train {THREADS}": "may end badly; test_threads.py runs it with a lock",
    "torchrun --max-restarts n": "a flag, no command; faults/test_faults.py sets it",
}
"""All others, and why none can."""


def of_blocks(page: Path) -> list[tuple[str | None, str]]:
    """Mark of its block, and line, of each command of a page that stands in a block."""
    return [
        (mark_of(block), line) for block in blocks(page.read_text()) for line in programs(block)
    ]


def of_sentences(page: Path) -> list[str]:
    """The commands inside sentences and tables."""
    return [line for span in spans(page.read_text()) for line in programs(span)]


def without_gpus() -> list[str]:
    """All commands that do not say that they need GPUs, each line once."""
    found = [line for page in PAGES for mark, line in of_blocks(page) if mark != "# needs GPUs"]
    found += [line for page in PAGES for line in of_sentences(page)]
    return list(dict.fromkeys(" ".join(line.split()) for line in found))


def run_here() -> list[Command]:
    """The commands that the last test runs."""
    found: dict[tuple[str, frozenset[str], bool], Command] = {}
    for line in without_gpus():
        command = command_of(line)
        if line not in RUN_ELSEWHERE and line not in NOT_RUN:
            assert command, f"{line}: no test can run it; say why in a mark, and here"
            alone = command.ranks == 0
            found.setdefault((command.module, frozenset(command.arguments), alone), command)
    with_keys = {(module, alone) for module, arguments, alone in found if arguments}
    return [
        command
        for (module, arguments, alone), command in found.items()
        if arguments or (module, alone) not in with_keys
    ]


def quick(command: Command, number: int, target: Path) -> list[str]:
    """The module of a command and its arguments, changed to run on a tiny target."""
    module, words = command.module, command.arguments or BARE.get(command.module, ())
    if module in QUICK:
        words = (*words, *QUICK[module], f"target.name={target}")
    if module == "dflash_mp.train":
        words = (*TINY_RUN, *TINY_DATA, f"run_name=command{number}", *words)
    if module in QUICK:
        # Of several that set a key, the last.
        words = tuple({word.split("=")[0]: word for word in words}.values())
    if not command.ranks:
        return [module, *words]
    ranks = min(command.ranks, MOST_RANKS)
    return ["launch.spawn", "--nproc", str(ranks), "--module", module, *words]


def test_commands_without_a_reason_can_be_run() -> None:
    known = {*QUICK, *AS_WRITTEN}
    slow = [command.line for command in run_here() if command.module not in known]
    assert not slow, "do these run in a second? Then name their modules here, else say why not"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_marks_say_what_is_not_run(page: Path) -> None:
    for mark, line in of_blocks(page):
        if mark != "# needs GPUs":
            assert (mark is not None) == (" ".join(line.split()) in NOT_RUN), f"{mark}: {line}"


def test_reasons_are_given_for_what_is_there() -> None:
    assert not {*NOT_RUN, *RUN_ELSEWHERE} - set(without_gpus())


def test_what_is_run_elsewhere_stands_there() -> None:
    for line, name in RUN_ELSEWHERE.items():
        code = (ROOT / "tests" / name).read_text()
        command = command_of(line)
        words = command.overrides if command else ()
        assert all(word in code for word in words or [line]), f"{name} does not run {line}"


def test_marks_count_in_indented_blocks_too(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    lines = "    python -m a\n    python -m b\n"
    page.write_text(f"text\n\n    # runs for minutes\n{lines}\ntext\n\n{lines}")
    marked = [(mark, "python -m " + name) for mark in ("# runs for minutes", None) for name in "ab"]
    assert of_blocks(page) == marked


@pytest.fixture(scope="module")
def workplace(
    tiny_target: Path,
    conversations: Path,
    heldout: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with the run of one of the commands, under all the names that the pages use."""
    folder = tmp_path_factory.mktemp("workplace")
    make_data(folder, conversations, heldout)
    first = [command for command in run_here() if FIRST in command.arguments]
    assert unexpected(first, tiny_target, folder) == ""
    make_runs(folder / "outputs")
    return folder


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("launched", [True, False], ids=["jobs", "single processes"])
def test_every_other_command_runs(launched: bool, workplace: Path, tiny_target: Path) -> None:
    others = [command for command in run_here() if FIRST not in command.arguments]
    those = [command for command in others if bool(command.ranks) == launched]
    assert unexpected(those, tiny_target, workplace) == ""


def exit_code(command: Command) -> int:
    """What a command should end with."""
    return 2 if set(REFUSED) & set(command.arguments) else 0


def unexpected(commands: list[Command], target: Path, folder: Path) -> str:
    """Run commands in ``folder`` one by one; what they said, unless all end as expected."""
    assert commands
    given = [
        [exit_code(command), *quick(command, number, target)]
        for number, command in enumerate(commands)
    ]
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "many_commands.py"],
        input=json.dumps(given),
        text=True,
        capture_output=True,
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k not in LAUNCHED} | {"PYTHONPATH": str(ROOT)},
        timeout=280,
        check=False,
    )
    return done.stdout[-5000:] or f"code {done.returncode}" if done.returncode else ""


def make_data(folder: Path, conversations: Path, heldout: Path) -> None:
    """The files that the commands read: conversations, prompts, pages."""
    rows = [json.loads(line) for line in conversations.read_text().splitlines()]
    names = {"user": "customer", "assistant": "agent"}
    files = {
        "my": rows,
        "heldout": [json.loads(line) for line in heldout.read_text().splitlines()],
        "prompts": [row | {"messages": row["messages"][:1]} for row in rows[:3]],
        "dialogues": [
            {"dialogue": [turn | {"role": names[turn["role"]]} for turn in row["messages"]]}
            for row in rows
        ],
    }
    for name, content in files.items():
        text = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{name}.jsonl").write_text(text)
    more = [row | {"id": f"more-{row['id']}"} for row in rows[:6]]
    pq.write_table(pa.Table.from_pylist(more), folder / "more.parquet")
    (folder / "tests").symlink_to(ROOT / "tests")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "BENCH.md", folder)


def make_runs(outputs: Path) -> None:
    """The run of the first command, under all other names."""
    for name in ("outputs/my_run", "outputs/smollm2_narrow", "a", "b"):
        shutil.copytree(outputs / "profiled", outputs.parent / name)
    *_, last = sorted((outputs / "profiled" / "checkpoints").glob("step-*"))
    shutil.copytree(last, outputs / "my_run" / "checkpoints" / "step-500")
