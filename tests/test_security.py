"""Nothing that a job reads or listens to runs a stranger's code; see also ``test_checkpoint``."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_mp import cast
from dflash_mp.config import TopologyConfig, UserError, config_dir

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "dflash_mp").rglob("*.py"), *(ROOT / "launch").rglob("*.py")])
READS_PICKLES = re.compile(
    r"torch\.load\(|\bpickle\b.*\b(load|loads)\b|import pickle|allow_pickle=True"
)


def test_no_code_of_ours_reads_pickles() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES
        if "diagnostics" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if READS_PICKLES.search(line)
    ]
    assert found == []


def test_remote_code_is_off_in_every_shipped_target() -> None:
    files = sorted((Path(config_dir()) / "target").glob("*.yaml"))
    assert files
    for path in files:
        assert re.search(r"^trust_remote_code: false$", path.read_text(), re.M), path.name


def listeners(pids: set[int]) -> set[str]:
    """Hexadecimal addresses at which these processes listen."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            found = re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink()))
            inodes |= {found[1]} if found else set()
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.mark.distributed
def test_a_spawned_job_listens_on_loopback_only(tmp_path: Path) -> None:
    """The parent's store, and the process groups of the ranks."""
    script = tmp_path / "open.py"
    script.write_text(
        "import datetime, os, pathlib, time\n"
        "from dflash_mp.cast import enter, launcher_store, place_from_environment\n"
        "from dflash_mp.config import TopologyConfig\n"
        "mine = place_from_environment(TopologyConfig(1, 1, False))\n"
        "timeout = datetime.timedelta(minutes=1)\n"
        "with enter(mine, launcher_store('open'), None, timeout) as cast:\n"
        f"    pathlib.Path({str(tmp_path)!r}, f'up-{{mine.rank}}').write_text(str(os.getpid()))\n"
        "    time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "launch.spawn", "--nproc", "2", "--script", str(script)]
    parent = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        up = [tmp_path / f"up-{rank}" for rank in range(2)]
        deadline = time.monotonic() + 90
        while not all(path.exists() and path.read_text() for path in up):
            assert parent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        found = listeners({parent.pid, *(int(path.read_text()) for path in up)})
    finally:
        # The first asks its ranks to stop, the second does not wait for them.
        for _ in range(2):
            parent.terminate()
            time.sleep(0.3)
        parent.wait(30)
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert found
    assert found <= loopback


@pytest.mark.parametrize(
    ("launcher", "cuda", "words"),
    [
        (None, False, "needs python -m launch.spawn: torchrun ends all ranks"),
        ("spawn", True, "needs CPU ranks"),
        ("spawn", False, ""),
    ],
)
def test_elastic_is_refused_where_a_job_cannot_lose_a_rank(
    launcher: str | None, cuda: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cast.LAUNCHER, raising=False)
    if launcher:
        monkeypatch.setenv(cast.LAUNCHER, launcher)
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    cast.check_elastic(TopologyConfig(1, 1, False))
    if words:
        with pytest.raises(UserError, match=words):
            cast.check_elastic(TopologyConfig(1, 1, True))
    else:
        cast.check_elastic(TopologyConfig(1, 1, True))
