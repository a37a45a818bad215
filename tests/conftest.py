"""A tiny target with a tokenizer and a chat template, and a way to start real jobs."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra.core.config_store import ConfigStore

from tiny import LAUNCHED, TINY_RUN, make_conversations, make_tiny_target

torch.set_num_threads(1)
# Children (torchrun, spawn) read it when torch is loaded.
os.environ["OMP_NUM_THREADS"] = "1"
# Jobs of several ranks are tested on the CPU, whatever the machine has.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start jobs come first: with the quick ones last, two workers end together."""
    slow = {
        item.path
        for item in items
        if item.get_closest_marker("slow") or item.get_closest_marker("distributed")
    }
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny target."""
    return make_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 short conversations."""
    return make_conversations(tmp_path_factory.mktemp("data") / "train.jsonl", 24)


@pytest.fixture(scope="session")
def heldout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5 other conversations."""
    return make_conversations(tmp_path_factory.mktemp("data") / "heldout.jsonl", 5, seed=1)


@pytest.fixture
def own_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a module run as ``__main__`` registers with Hydra goes with the test."""
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", copy.deepcopy(store.repo))


TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
Launch = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def launch(launch_in: Launch, tmp_path: Path) -> Launch:
    """``launch_in`` the folder of the test."""
    return partial(launch_in, tmp_path)


@pytest.fixture(scope="session")
def launch_in(tiny_target: Path, conversations: Path, heldout: Path) -> Launch:
    """Train on the tiny target in real processes; later overrides win.

    ``launch_in(base, ranks, *overrides, spawn=True, script=None, timeout=120, wait=True)`` returns
    the finished launcher (the running one without ``wait``) with its output as text. ``script``
    replaces ``-m dflash_mp.train``; no ``ranks`` means no launcher, ``spawn`` not torchrun, which
    takes longer to start. The run folder is ``base / "run"`` unless given.
    """

    def run(
        base: Path,
        ranks: int,
        *overrides: str,
        spawn: bool = True,
        script: Path | None = None,
        timeout: float = 120,
        wait: bool = True,
    ) -> subprocess.CompletedProcess | subprocess.Popen:
        defaults = [
            f"target.name={tiny_target}",
            f"data.train={conversations}",
            f"data.heldout={heldout}",
            f"data.cache_dir={base / 'cache'}",
            f"output_dir={base / 'run'}",
            *TINY_RUN,
        ]
        keys = {override.split("=")[0] for override in overrides}
        arguments = [d for d in defaults if d.split("=")[0] not in keys] + list(overrides)
        program = ["-m", "dflash_mp.train"] if script is None else [str(script)]
        command = [sys.executable, *TORCHRUN, "--nproc_per_node", str(ranks), *program]
        if spawn:
            command = [sys.executable, "-m", "launch.spawn", "--nproc", str(ranks)]
            command += [] if script is None else ["--script", str(script)]
        if not ranks:
            command = [sys.executable, *program]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        # Accelerate, in another test, may have said that this process is a rank.
        pipes["env"] = {k: v for k, v in os.environ.items() if k not in LAUNCHED}
        if not wait:
            return subprocess.Popen(command + arguments, **pipes)
        return subprocess.run(command + arguments, timeout=timeout, check=False, **pipes)

    return run
