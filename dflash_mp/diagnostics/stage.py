"""What the actors of one cell share: events under one deadline, a treatment, a record of what ran.

An *actor* is what one drafter thread, or one drafter process, does. Actors wait for each other's
events; there are no sleeps. When one actor ends, fails, or has to wait because the treatment
serialises them, all moments count as come: nobody waits for one that cannot come any more.
"""

import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
import torch.fx._symbolic_trace
import torch.fx.traceback
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from dflash_mp.diagnostics.plans import Treatment

FX_ERROR = "Detected that you are using FX to symbolically trace a dynamo-optimized function"


class DeadlinePassed(Exception):
    """An event did not come in time: the cell is inconclusive."""


class Event(Protocol):
    """The part that threading.Event and multiprocessing's event have in common."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...


@dataclass
class Failure:
    """An exception in an actor, and what the threads that were tracing did at that moment."""

    kind: str
    message: str
    # Innermost frame last, each as "file:line function".
    frames: list[str]
    tracing: dict[str, list[str]]


@dataclass
class ActorReport:
    """What became of one actor."""

    name: str
    failure: Failure | None = None
    late: str = ""
    calls: int = 0
    compiled_runs: int = 0
    findings: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What one process saw."""

    actors: list[ActorReport]
    left_behind: list[str]
    # The scenario came to the moment that it is about.
    reached: bool
    # The treatment made one actor wait for another.
    serialised: bool
    said: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def event_names(moments: tuple[str, ...], threads: int) -> list[str]:
    """Name the events of a cell: the scenario's moments, and those that steer random actors."""
    return [*moments, "stop", *(f"ready {i}" for i in range(threads))]


@dataclass(frozen=True)
class StageSettings:
    """What a stage is made of besides the treatment."""

    events: dict[str, Event]
    threads: int
    # CPU time for which random actors without an end of their own keep going.
    seconds: float
    # A value of time.monotonic().
    deadline: float
    device: str = "cpu"


class Stage:
    """The meeting point of the actors of one cell in one process."""

    def __init__(self, treatment: Treatment, settings: "StageSettings") -> None:
        self.threads = settings.threads
        self.seconds = settings.seconds
        self.deadline = settings.deadline
        self.device = settings.device
        self.shared: Any = None
        self.met: set[str] = set()
        self.serialised = False
        self._events = settings.events
        self._section = treatment.make_section()
        self._calls: Counter[int] = Counter()
        self._runs: Counter[int] = Counter()
        self._findings: dict[int, list[str]] = {}

    def fire(self, name: str) -> None:
        """Set an event."""
        self._events[name].set()

    def fired(self, name: str) -> bool:
        """Tell whether an event is set."""
        return self._events[name].is_set()

    def _end_moments(self) -> None:
        for name, event in self._events.items():
            if name != "stop" and not name.startswith("ready "):
                event.set()

    def wait(self, name: str) -> None:
        """Wait for an event; raise DeadlinePassed when it does not come in time."""
        if not self._events[name].wait(max(0.0, self.deadline - time.monotonic())):
            raise DeadlinePassed(f"waited for {name!r} in vain")

    def meet(self, fire: str, wait: str) -> None:
        """Say that a moment has come, and stay in it until ``wait``."""
        self.met.add(fire)
        self.fire(fire)
        self.wait(wait)

    @contextmanager
    def section(self, *signature: Any) -> Iterator[None]:
        """Surround what compiles, calls compiled code or runs its backward."""

        def on_wait() -> None:
            self.serialised = True
            self._end_moments()

        with self._section(signature, on_wait):
            yield

    def call(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Call a compiled function the way a trainer does, and count the call."""
        shapes = tuple(a.shape for a in args if isinstance(a, Tensor))
        with self.section(id(function), shapes):
            self._calls[threading.get_ident()] += 1
            return function(*args, **kwargs)

    def expect(self, what: str, actual: Tensor, expected: Tensor) -> None:
        """Record a finding unless both agree within rounding."""
        if not torch.allclose(actual, expected, rtol=1e-4, atol=1e-5):
            worst = (actual - expected).abs().max().item()
            self.find(f"{what} wrong by {worst:.2g}")

    def find(self, finding: str) -> None:
        """Record something that is wrong although nothing was raised."""
        found = self._findings.setdefault(threading.get_ident(), [])
        if finding not in found:
            found.append(finding)

    def backend(self) -> Callable[..., Any]:
        """Return a torch.compile backend that counts the graphs each thread really executes."""
        return aot_autograd(fw_compiler=self._count_runs, bw_compiler=_run_as_it_is)

    def _count_runs(self, module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        # Not module(...): another thread's trace may stand on nn.Module.__call__.
        forward = module.forward

        def run(*args: Any) -> Any:
            self._runs[threading.get_ident()] += 1
            return forward(*args)

        return make_boxed_func(run)

    def act(self, name: str, actor: Callable[["Stage"], None]) -> ActorReport:
        """Run one actor to its end in the calling thread."""
        report = ActorReport(name)
        me = threading.get_ident()
        calls, runs = self._calls[me], self._runs[me]
        try:
            actor(self)
        except DeadlinePassed as late:
            report.late = str(late)
        except Exception as error:
            report.failure = failure_of(error)
        finally:
            self._end_moments()
            self.fire("stop")
        report.calls = self._calls[me] - calls
        report.compiled_runs = self._runs[me] - runs
        report.findings = self._findings.pop(me, [])
        # A call that raised ran nothing, and is not a silent fallback.
        expected_runs = report.calls - (report.failure is not None)
        if not report.late and report.compiled_runs < expected_runs:
            missing = expected_runs - report.compiled_runs
            report.findings.append(f"{missing} of {report.calls} calls ran uncompiled")
        return report


def _run_as_it_is(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    return make_boxed_func(module.forward)


def failure_of(error: BaseException) -> Failure:
    """Describe an exception, with the stacks of the other threads that are inside a trace."""
    me = threading.get_ident()
    names = {t.ident: t.name for t in threading.enumerate()}
    tracing = {
        names.get(ident, str(ident)): frame_list(frame)
        for ident, frame in sys._current_frames().items()
        if ident != me and in_tracer(frame)
    }
    walked = traceback.extract_tb(error.__traceback__)
    frames = [_place(f.filename, f.lineno or 0, f.name) for f in walked]
    return Failure(type(error).__name__, str(error).split("\n")[0], frames, tracing)


def in_tracer(frame: FrameType | None) -> bool:
    """Tell whether a stack is inside ``torch.fx.Tracer.trace``."""
    while frame is not None:
        if frame.f_code.co_qualname == "Tracer.trace":
            return True
        frame = frame.f_back
    return False


def in_current_tracer() -> bool:
    """Tell whether the calling thread is inside ``torch.fx.Tracer.trace``."""
    return in_tracer(sys._getframe(1))


def frame_list(frame: FrameType) -> list[str]:
    """Return a stack as "file:line function", innermost last."""
    walked = traceback.extract_stack(frame)
    return [_place(f.filename, f.lineno or 0, f.name) for f in walked]


def _place(filename: str, line: int, function: str) -> str:
    parts = filename.replace("\\", "/").split("/")
    for root in ("site-packages", "dflash_mp"):
        if root in parts:
            start = parts.index(root) + (root == "site-packages")
            return f"{'/'.join(parts[start:])}:{line} {function}"
    return f"{parts[-1]}:{line} {function}"


def left_behind() -> list[str]:
    """Name the process-wide state that should be at rest when no thread traces or compiles."""
    fx: Any = torch.fx._symbolic_trace
    found = []
    if fx.is_fx_tracing():
        found.append("the FX tracing flag is stuck on")
    methods = {"__call__": fx._orig_module_call, "__getattr__": fx._orig_module_getattr}
    if any(vars(torch.nn.Module)[name] is not method for name, method in methods.items()):
        found.append("a dead trace's hooks stay on nn.Module")
    if torch.fx.traceback.current_meta:
        found.append(f"trace metadata stays: {torch.fx.traceback.current_meta}")
    if torch.compiler.is_compiling():
        found.append("torch.compiler.is_compiling() is stuck on")
    return found
