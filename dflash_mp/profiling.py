"""What a rank does, or holds, in some early steps, for people to look at: ``profile=...``.

A recording listens to the phases that the main thread tells its sentinel, so the role loops know
nothing of it and a run without one pays nothing. Drafters count their steps; the main one tells the
targets, through the store, when recording begins and ends: theirs covers the time of its own.
"""

import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from dflash_mp.cast import TARGET, Cast
from dflash_mp.config import require
from dflash_mp.job import Job
from dflash_mp.run_folder import PROFILE
from dflash_mp.sentinel import Sentinel
from dflash_mp.wire.stream import Clock

log = logging.getLogger(__name__)

BEGIN, END = "profile/begin", "profile/end"
WORK = {"target": "forward", "drafter": "step"}
"""The phase that begins a frame of a target and a step of a drafter."""
UNTIL_STOPPED = 10**9
CUDA_EVENTS = 100_000
"""Allocations that a snapshot of CUDA memory remembers."""
MIB = 2**20


class Recorder(Protocol):
    """Takes down what happens between ``begin`` and ``end``; called in the main thread."""

    def begin(self) -> None:
        """Recording begins."""

    def phase(self, name: str, works: bool) -> None:
        """The main thread enters a phase; ``works`` if it begins a frame or a step."""

    def end(self) -> Path:
        """Write what was recorded; returns the file."""


class StepTrace:
    """torch's profiler over all threads of this process, with the phases as spans.

    Args:
        stem: the path of the file without its ending.
        device: of this rank.
    """

    def __init__(self, stem: Path, device: torch.device) -> None:
        self.path = stem.with_name(f"{stem.name}.trace.json.gz")
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profiler = profile(
            activities=activities,
            # The profiler warms up in the first step or frame.
            schedule=schedule(wait=0, warmup=1, active=UNTIL_STOPPED),
            # The wire's threads were started before.
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._span: record_function | None = None

    def begin(self) -> None:
        """Start the profiler."""
        self.profiler.start()
        Clock.traced = True

    def phase(self, name: str, works: bool) -> None:
        """End the span of the phase before and begin that of ``name``."""
        self._close()
        if works:
            self.profiler.step()
        self._span = record_function(name)
        self._span.__enter__()

    def _close(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None

    def end(self) -> Path:
        """Stop the profiler and write the trace."""
        self._close()
        Clock.traced = False
        self.profiler.stop()
        self.profiler.export_chrome_trace(str(self.path))
        return self.path


class MemoryPeaks:
    """The most that each phase has held, of the process and of its GPU.

    On a GPU also a snapshot of torch's allocator, for https://pytorch.org/memory_viz.
    """

    def __init__(self, stem: Path, device: torch.device) -> None:
        self.path = stem.with_name(f"{stem.name}.memory.json")
        self.snapshot = stem.with_name(f"{stem.name}.cuda.pickle")
        self.cuda = device if device.type == "cuda" else None
        self.phases: dict[str, dict[str, float]] = {}
        self._now, self._since = "start", 0.0

    def begin(self) -> None:
        """Begin with an empty table."""
        if self.cuda is not None:
            torch.cuda.memory._record_memory_history(max_entries=CUDA_EVENTS)
        self._enter("start")

    def phase(self, name: str, works: bool) -> None:
        """Add what the phase before has held."""
        self._leave()
        # One line for the waiting for any frame.
        self._enter(re.sub(r"\d+", "k", name))

    def _enter(self, name: str) -> None:
        self._now, self._since = name, time.perf_counter()
        # Linux: forget the peak of this process.
        Path("/proc/self/clear_refs").write_text("5")
        if self.cuda is not None:
            torch.cuda.reset_peak_memory_stats(self.cuda)

    def _leave(self) -> None:
        held = {"peak_mib": resident("VmHWM"), "after_mib": resident("VmRSS")}
        if self.cuda is not None:
            held["cuda_peak_mib"] = torch.cuda.max_memory_allocated(self.cuda) / MIB
            held["cuda_after_mib"] = torch.cuda.memory_allocated(self.cuda) / MIB
        row = self.phases.setdefault(self._now, {"times": 0, "seconds": 0.0})
        row["times"] += 1
        row["seconds"] += time.perf_counter() - self._since
        for key, value in held.items():
            row[key] = max(row.get(key, 0.0), value) if "peak" in key else value

    def end(self) -> Path:
        """Write the table, and on a GPU the snapshot."""
        self._leave()
        rows = [
            {"phase": name} | {key: round(value, 3) for key, value in row.items()}
            for name, row in self.phases.items()
        ]
        self.path.write_text(json.dumps({"phases": rows}, indent=1) + "\n")
        if self.cuda is not None:
            torch.cuda.memory._dump_snapshot(str(self.snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
        return self.path


def resident(key: str) -> float:
    """A size in MiB from Linux's table of this process: ``VmRSS``, or its peak ``VmHWM``."""
    status = Path("/proc/self/status").read_text()
    return float(status.split(f"{key}:")[1].split()[0]) / 1024


class Window:
    """Begins and ends a recorder by the phases that this rank enters.

    Args:
        recorder: what records; begins at once if ``early``, else with step ``skip``.
        cast: this rank.
        skip: steps before the recorded ones.
        record: recorded steps.
        early: see above.
    """

    def __init__(self, recorder: Recorder, cast: Cast, skip: int, record: int, early: bool) -> None:
        self.recorder, self.cast = recorder, cast
        self.first, self.last = skip, skip + record
        self.steps = 0
        self.running, self.over = early, False
        if early:
            recorder.begin()

    def enter(self, name: str) -> None:
        """The main thread enters a phase."""
        if self.over:
            return
        works = name == WORK[self.cast.place.role]
        self.steps += works
        if not self.running:
            self.running = works and self._begins()
            if self.running:
                self.recorder.begin()
            return
        if self._ends():
            self.close()
        else:
            self.recorder.phase(name, works)

    def _begins(self) -> bool:
        if self.cast.place.role == TARGET:
            return self.cast.store.check([BEGIN])
        # Earlier than here: a frame of a target may take longer than a step, and it warms up, too.
        if self.cast.place.is_main and self.steps == max(1, self.first // 2):
            self.cast.store.set(BEGIN, "")
        return self.steps == self.first

    def _ends(self) -> bool:
        if self.cast.place.role == TARGET:
            return self.cast.store.check([END])
        if self.cast.place.is_main and self.steps > self.last:
            self.cast.store.set(END, "")
        return self.steps > self.last

    def close(self) -> None:
        """Write what there is, once."""
        if self.running and not self.over:
            log.info("profile: %s", self.recorder.end())
        self.over = True


@contextmanager
def recording(cast: Cast, job: Job, sentinel: Sentinel) -> Iterator[None]:
    """Record this rank in the body, as ``profile`` says; a body that fails leaves what there is.

    Raises:
        UserError: the run is over before the recording would be.
    """
    config = job.config.profile
    if config.kind == "none":
        yield
        return
    steps, last = job.plan.steps - job.start.step, config.skip + config.record
    if job.start.step and steps <= last:
        # Its configuration was right when it began, and ends well without.
        log.info("profile: nothing is recorded in the last %d steps of a continued run", steps)
        yield
        return
    require(
        steps > last,
        f"profile={config.kind} records up to step {last} and needs one more behind it, but this "
        f"run does {steps}: lower profile.skip or profile.record, or train longer",
    )
    folder = job.folder / PROFILE
    folder.mkdir(exist_ok=True)
    stem = folder / f"rank{cast.place.rank}-{cast.place.name}"
    kind = MemoryPeaks if config.kind == "memory" else StepTrace
    recorder: Recorder = kind(stem, cast.device)
    window = Window(recorder, cast, config.skip, config.record, early=config.kind == "memory")
    sentinel.on_phase = window.enter
    try:
        yield
    except BaseException:
        # What has failed is to be told, whatever becomes of its profile.
        try:
            window.close()
        except Exception:
            log.exception("the profile could not be written")
        raise
    finally:
        sentinel.on_phase = None
    window.close()
