"""When a recording begins and ends, and what is refused; real ones are in test_training.py."""

import gzip
import json
import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dflash_mp.cast import place
from dflash_mp.config import TopologyConfig, UserError
from dflash_mp.profiling import Window, recording
from dflash_mp.run_config import ProfileConfig
from dflash_mp.timeline import read_lanes

STEP = ("step", "wait for frame 1", "compute", "evaluate, log, save")


class Notes:
    """A recorder that notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def begin(self) -> None:
        self.heard.append("begin")

    def phase(self, name: str, works: bool) -> None:
        self.heard.append(f"{name}{'!' * works}")

    def end(self) -> Path:
        self.heard.append("end")
        return Path("x")


def rank(number: int, store: dist.Store) -> SimpleNamespace:
    """One of a target and two drafters."""
    mine = place(number, 3, 3, TopologyConfig(1, 2, False))
    return SimpleNamespace(place=mine, store=store, device=torch.device("cpu"))


def job(folder: Path, kind: str, steps: int, done: int = 0) -> SimpleNamespace:
    config = SimpleNamespace(profile=ProfileConfig(kind, 2, 3))
    plan, start = SimpleNamespace(steps=steps), SimpleNamespace(step=done)
    return SimpleNamespace(config=config, plan=plan, start=start, folder=folder)


def test_drafters_count_their_steps_and_take_the_targets_along() -> None:
    store = dist.HashStore()
    notes = [Notes() for _ in range(3)]
    target, *drafters = [
        Window(recorder, rank(i, store), skip=2, record=3, early=False)
        for i, recorder in enumerate(notes)
    ]
    target.enter("forward")
    assert notes[0].heard == []
    for _ in range(6):
        for phase in STEP:
            for drafter in drafters:
                drafter.enter(phase)
        target.enter("forward")
        target.enter("wait for a free slot")
    first, *rest = STEP
    warm_up = ["begin", *rest]
    assert notes[1].heard == notes[2].heard == [*warm_up, *([f"{first}!", *rest] * 3), "end"]
    # Told in the first step, as half of two skipped ones; over with the sixth.
    waits = "wait for a free slot"
    assert notes[0].heard == ["begin", *[waits, "forward!"] * 4, waits, "end"]


def test_a_body_that_fails_leaves_what_there_is(tmp_path: Path) -> None:
    sentinel = SimpleNamespace(on_phase=None)
    mine = rank(1, dist.HashStore())

    def body() -> None:
        with recording(mine, job(tmp_path, "memory", 6), sentinel):
            sentinel.on_phase("load the drafter")
            # A mapping goes back to the system at once; what tensors free may be kept.
            memory = mmap.mmap(-1, 2**26)
            memory.write(b"x" * 2**26)
            memory.close()
            sentinel.on_phase("step")
            raise MemoryError

    with pytest.raises(MemoryError):
        body()
    assert sentinel.on_phase is None
    found = json.loads((tmp_path / "profile" / "rank1-drafter0.memory.json").read_text())["phases"]
    _, load, step = found
    assert [row["phase"] for row in found] == ["start", "load the drafter", "step"]
    # 64 MiB came and went.
    assert load["peak_mib"] - load["after_mib"] > 60
    assert load["peak_mib"] - step["peak_mib"] > 60


def test_a_profile_that_cannot_be_written_does_not_hide_what_failed(tmp_path: Path) -> None:
    folder = tmp_path / "profile"

    def body() -> None:
        with recording(
            rank(1, dist.HashStore()), job(tmp_path, "memory", 6), SimpleNamespace(on_phase=None)
        ):
            folder.rmdir()
            raise MemoryError

    with pytest.raises(MemoryError):
        body()


def test_the_short_rest_of_a_continued_run_goes_without(tmp_path: Path) -> None:
    sentinel = SimpleNamespace(on_phase=None)
    with recording(rank(1, dist.HashStore()), job(tmp_path, "steps", 20, 16), sentinel):
        assert sentinel.on_phase is None


def write_trace(path: Path, *spans: tuple[str, int, int]) -> None:
    """Spans ``(name, thread, begin)`` of a millisecond each."""
    events = [
        {"cat": "user_annotation", "ph": "X", "name": name, "tid": thread, "ts": begin, "dur": 1000}
        for name, thread, begin in spans
    ]
    with gzip.open(path, "wt") as file:
        json.dump({"baseTimeNanoseconds": 0, "traceEvents": events}, file)


def test_a_rank_that_did_nothing_while_recorded_has_empty_lines(tmp_path: Path) -> None:
    write_trace(tmp_path / "rank0-target0.trace.json.gz", ("send", 7, 500))
    path = tmp_path / "rank1-drafter0.trace.json.gz"
    write_trace(path, ("ProfilerStep#1", 1, 0), ("compute", 1, 0))
    bars = [(lane.name, lane.bars) for lane in read_lanes(tmp_path)]
    assert bars == [
        ("target0", {}),
        ("wire", {"sending": [(0.5, 0.5)]}),
        ("drafter0", {"drafter: micro-batches": [(0.0, 1.0)]}),
        ("wire", {}),
    ]
    write_trace(path, ("compute", 1, 0))
    with pytest.raises(UserError, match="holds no step"):
        read_lanes(tmp_path)


def test_without_a_profile_nobody_listens(tmp_path: Path) -> None:
    sentinel = SimpleNamespace(on_phase=None)
    with recording(rank(1, dist.HashStore()), job(tmp_path, "none", 1), sentinel):
        assert sentinel.on_phase is None
    assert not list(tmp_path.iterdir())


def test_mistakes(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"records up to step 5 .* this run does 5"),
        recording(rank(1, dist.HashStore()), job(tmp_path, "steps", 5), SimpleNamespace()),
    ):
        pass
    with pytest.raises(UserError, match=r"profile\.skip=0: must be at least 1"):
        ProfileConfig("steps", 0, 1)
    with pytest.raises(UserError, match=r"profile\.kind"):
        ProfileConfig("step", 1, 1)
    with pytest.raises(UserError, match="train with profile=steps"):
        read_lanes(tmp_path)
