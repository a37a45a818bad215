"""Runs one cell, scenario x treatment, in processes that nothing ran in before.

A trace that goes wrong can leave a process poisoned for good, so none is used twice. The server
that forks them has imported torch and has neither compiled anything nor started a thread.
"""

import logging
import multiprocessing as mp
import os
import sys
import threading
import time
import warnings
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

# What the fork server imports once; the children then start in a fraction of a second.
PRELOAD = [
    "torch._dynamo",
    "torch._dynamo.backends.common",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch.nn.attention.flex_attention",
    "torch.optim.adamw",
    "dflash_mp.diagnostics.stochastic",
]
# Set before torch is imported: one core per process, and no worker pool for C++ kernels.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # A hit in this cache skips the trace, and with it the race.
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}


@dataclass(frozen=True)
class Cell:
    """One scenario under one treatment."""

    scenario: str
    treatment: str
    threads: int = 3
    # CPU time for which random actors without an end of their own keep going.
    seconds: float = 3.0
    # After this many seconds the cell is given up.
    timeout: float = 60.0
    # Seconds between forced changes of threads, as for sys.setswitchinterval.
    switch_interval: float = 0.0005
    # Where random scenarios about attention put their tensors; "cuda" runs backwards as well.
    device: str = "cpu"


@dataclass
class Probe:
    """What one run of a cell saw: one report per process, or why there is none."""

    cell: Cell
    reports: list[dict[str, Any]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    wall: float = 0.0


def start_context() -> Any:
    """Return the multiprocessing context that starts fresh processes, with torch preloaded."""
    found = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # It takes the environment along, and imports while the caller goes on.
    forkserver.ensure_running()
    os.environ.clear()
    os.environ.update(found)
    return context


def run_cell(cell: Cell, context: Any) -> Probe:
    """Run a cell once: in one process, or with one process per actor if the treatment says so."""
    from dflash_mp.diagnostics.catalogue import SCENARIOS, TREATMENTS
    from dflash_mp.diagnostics.stage import event_names

    scenario, treatment = SCENARIOS[cell.scenario], TREATMENTS[cell.treatment]
    begin = time.monotonic()
    names: list[str | None] = [None]
    events = None
    if treatment.processes:
        names = list(scenario.actors(cell.threads))
        events = {n: context.Event() for n in event_names(scenario.events, cell.threads)}
    waiting: dict[Connection, tuple[Any, str]] = {}
    for name in names:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(cell, name, events, sender))
        process.start()
        sender.close()
        waiting[receiver] = process, name or "the probe"
    return _collect(Probe(cell), waiting, begin)


def _collect(probe: Probe, waiting: dict[Connection, tuple[Any, str]], begin: float) -> Probe:
    """Receive one report per process; kill what has not reported in time."""
    # The children give up by themselves first, which tells more than a kill.
    end = begin + probe.cell.timeout + 15
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            for process, name in waiting.values():
                process.kill()
                probe.lost.append(f"{name} did not report within {probe.cell.timeout:.0f} s")
            break
        for receiver in ready:
            assert isinstance(receiver, Connection)
            process, name = waiting.pop(receiver)
            try:
                received = receiver.recv()
                (probe.lost if isinstance(received, str) else probe.reports).append(received)
            except EOFError:
                process.join(5)
                probe.lost.append(f"{name} died with exit code {process.exitcode}")
            receiver.close()
            process.join(5)
            process.kill()
    probe.wall = time.monotonic() - begin
    return probe


def _child(cell: Cell, actor: str | None, events: Any, sender: Connection) -> None:
    """Run the cell, or one actor of it, and send the report; daemon threads end with this."""
    _quiet()
    sys.setswitchinterval(cell.switch_interval)
    from dflash_mp.diagnostics.stage import ActorReport, Report, failure_of
    from dflash_mp.diagnostics.treatments import TreatmentRefused

    try:
        report = run_here(cell, actor, events)
    except TreatmentRefused as refused:
        sender.send(f"refused: {refused}")
        return
    except Exception as error:
        # What surrounds the actors failed: the treatment, or the preparation under it.
        setup = ActorReport("setup", failure=failure_of(error))
        report = Report([setup], [], reached=True, serialised=False, said=[])
    sender.send(report.as_dict())


def _quiet() -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    if torch.version.cuda and not torch.cuda.is_available():
        # A CUDA build without a GPU registers a device guard at every entry of a fake-tensor
        # mode, which crashes when threads do it at once. Once is enough, and none of our matter.
        torch._C._ensureCUDADeviceGuardSet()
        torch._C._ensureCUDADeviceGuardSet = lambda: None


def run_here(cell: Cell, actor: str | None, events: Any) -> Any:
    """Run a cell in this process: all its actors as threads, or ``actor`` alone in this thread.

    Returns:
        A ``Report``.
    """
    from dflash_mp.diagnostics.catalogue import SCENARIOS, TREATMENTS
    from dflash_mp.diagnostics.stage import Report, Stage, StageSettings, event_names, left_behind

    scenario, treatment = SCENARIOS[cell.scenario], TREATMENTS[cell.treatment]
    events = events or {n: threading.Event() for n in event_names(scenario.events, cell.threads)}
    deadline = time.monotonic() + cell.timeout
    settings = StageSettings(events, cell.threads, cell.seconds, deadline, cell.device)
    stage = Stage(treatment, settings)
    actors = scenario.actors(cell.threads)
    said: list[str] = []
    with treatment.before_compile() as before:
        stage.shared = scenario.prepare(stage)
        with treatment.after_compile() as after:
            said += [before, after]
            if treatment.warm_up:
                scenario.warm_up(stage, treatment.warm_up == "all but one")
            if actor is not None:
                reports = [stage.act(actor, actors[actor])]
            else:
                reports = _run_threads(stage, actors, treatment, said)
            with treatment.in_worker():
                reports.append(stage.act("victim", scenario.victim))
            left = left_behind()
    said = sorted({s for s in said if s})
    return Report(reports, left, scenario.moment in stage.met, stage.serialised, said)


def _run_threads(stage: Any, actors: dict[str, Any], treatment: Any, said: list[str]) -> list[Any]:
    from dflash_mp.diagnostics.stage import ActorReport

    done: dict[str, Any] = {}

    def work(name: str) -> None:
        def treated(stage: Any) -> None:
            with treatment.in_worker() as told:
                said.append(told)
                actors[name](stage)

        done[name] = stage.act(name, treated)

    threads = [threading.Thread(target=work, args=(n,), name=n, daemon=True) for n in actors]
    for thread in threads:
        thread.start()
    for thread in threads:
        # Some seconds more than the events wait, so that an actor can say what it waited for.
        thread.join(max(0.0, stage.deadline - time.monotonic()) + 5)
    stuck = "did not come to an end"
    return [done.get(name) or ActorReport(name, late=stuck) for name in actors]
