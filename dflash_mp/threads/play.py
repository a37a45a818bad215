"""Play all ranks in one process: the role loops as they are, threads in place of processes.

This is what ``isolation=processes`` avoids, kept to look at: whatever one thread traces or compiles
with torch.compile meets what the others call (docs/race.md).
"""

import logging
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import cast as typed

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState

from dflash_mp.cast import DRAFTER, Cast, LauncherStore, place
from dflash_mp.config import TopologyConfig, TrainConfig, UserError, one_of, require
from dflash_mp.diagnostics.plans import TREATMENTS, Treatment
from dflash_mp.job import Job
from dflash_mp.rank import begin, check, make_job
from dflash_mp.roles.drafter import run_drafter
from dflash_mp.roles.means import Means
from dflash_mp.roles.setup import mlps, untrained, use_bfloat16
from dflash_mp.roles.target import run_target
from dflash_mp.sentinel import Sentinel
from dflash_mp.threads.edge import ThreadEdge
from dflash_mp.threads.world import Meeting, NoVote, ThreadAccelerator, Watch
from dflash_mp.verdict import CAUSE, USER_ERROR, end, say

log = logging.getLogger(__name__)

DEFAULT_TARGETS, DEFAULT_DRAFTERS = 1, 3


@dataclass(frozen=True)
class Rank:
    """One thread to be."""

    cast: Cast
    watch: Watch
    work: Callable[[], None]


def play(config: TrainConfig, hydra_folder: Path) -> None:
    """Train as ``config`` describes, all in this process.

    Raises:
        UserError: where threads would be taken for the real thing.
    """
    treatment = refuse(config)
    folder, config = check(config, hydra_folder)
    torch.set_num_threads(config.threads or 1)
    log.warning(
        "isolation=threads: one process with a global FX tracing flag and one lock; for looking "
        "at the race, not for training (docs/race.md); to train, leave isolation out and start "
        "torchrun or launch.spawn"
    )
    casts = make_casts(config.topology)
    job = make_job(casts[0], config, folder, begin(casts[0], config, folder))
    drafters = casts[0].place.drafters
    with ExitStack() as stack:
        enter(stack, treatment.before_compile, "before torch.compile")
        if treatment.warm_up:
            warm_up(job, complete=treatment.warm_up == "all")
        built, go = threading.Barrier(drafters + 1), threading.Barrier(drafters + 1)
        ranks = make_ranks(casts, job, treatment, built, go)
        ended: queue.Queue[tuple[Rank, BaseException | None]] = queue.Queue()
        for rank in ranks:
            start(rank, ended)
        # Nothing but the drafters' models is built and wrapped here; a thread that fails before
        # breaks the barrier.
        supervise(ended, 0, until=built)
        enter(stack, treatment.after_compile, "after torch.compile")
        go.wait()
        supervise(ended, len(ranks))


def refuse(config: TrainConfig) -> Treatment:
    """Check that threads are what the user wants; returns the chosen treatment."""
    one_of("race.treatment", config.race.treatment, tuple(TREATMENTS))
    treatment = TREATMENTS[config.race.treatment]
    require(
        config.race.i_know,
        "isolation=threads crashes or silently slows down real training; it is there to look at "
        "the race: say race.i_know=true, or leave isolation=processes",
    )
    require(
        "RANK" not in os.environ,
        "isolation=threads is one process: start it as python -m dflash_mp.train isolation=threads "
        "..., without torchrun or launch.spawn",
    )
    require(
        not treatment.processes,
        "race.treatment=processes is what isolation=processes does: leave isolation out",
    )
    require(
        not torch.cuda.is_available(),
        "isolation=threads runs on the CPU only: set CUDA_VISIBLE_DEVICES=",
    )
    require(
        not config.target.compile,
        "target.compile=true: the treatments of race.treatment are of drafters, and a target that "
        "compiles beside them would spoil what is to be seen: use drafter.compile, or leave "
        "isolation=processes",
    )
    require(not config.topology.elastic, "topology.elastic=true needs isolation=processes")
    return treatment


def make_casts(topology: TopologyConfig) -> list[Cast]:
    """Places of all threads, with one store in memory."""
    targets = topology.targets or DEFAULT_TARGETS
    drafters = topology.drafters or DEFAULT_DRAFTERS
    ranks = targets + drafters
    launcher = LauncherStore(dist.PrefixStore("job", dist.HashStore()), 0)
    stated = TopologyConfig(targets, drafters, False)
    return [
        Cast(
            place(rank, ranks, ranks, stated),
            torch.device("cpu"),
            launcher.this_attempt(),
            launcher,
        )
        for rank in range(ranks)
    ]


def enter(stack: ExitStack, context: Callable[[], AbstractContextManager[str]], when: str) -> None:
    """Enter a part of the treatment until the end, and log what it says of itself."""
    said = stack.enter_context(context())
    if said:
        log.info("race.treatment, %s: %s", when, said)


def make_ranks(
    casts: list[Cast],
    job: Job,
    treatment: Treatment,
    built: threading.Barrier,
    go: threading.Barrier,
) -> list[Rank]:
    """What each thread does."""
    loading = threading.Lock()
    means = make_means(casts, job, treatment)

    def drafter_built() -> None:
        built.wait()
        go.wait()

    def rank(cast: Cast) -> Rank:
        drafts = cast.place.role == DRAFTER
        watch = Watch(loading, drafter_built if drafts else lambda: None)
        mine = replace(job, place=cast.place)

        def work() -> None:
            sentinel = typed(Sentinel, watch)
            if not drafts:
                run_target(cast, mine, sentinel, means)
                return
            with ExitStack() as stack:
                enter(stack, treatment.in_worker, f"in {cast.place.name}")
                run_drafter(cast, mine, sentinel, means)

        return Rank(cast, watch, work)

    return [rank(cast) for cast in casts]


def make_means(casts: list[Cast], job: Job, treatment: Treatment) -> Means:
    """Queues for edges and a meeting for the drafters' process group."""
    topology = casts[0].place
    meeting, section = Meeting(topology.drafters), treatment.make_section()
    timeout = timedelta(seconds=job.config.wire.timeout_s)
    edges = {
        (target, drafter): ThreadEdge(timeout)
        for target in range(topology.targets)
        for drafter in range(topology.drafters)
    }
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()

    def open_edges(cast: Cast, _: Job) -> dict[int, ThreadEdge]:
        mine, drafts = cast.place.role_rank, cast.place.role == DRAFTER
        return {
            (target if drafts else drafter): edge
            for (target, drafter), edge in edges.items()
            if mine == (drafter if drafts else target)
        }

    def make_accelerator(cast: Cast, config: TrainConfig, folder: Path) -> ThreadAccelerator:
        return ThreadAccelerator(
            cast.place.role_rank,
            meeting,
            section,
            cpu=True,
            mixed_precision="bf16" if use_bfloat16(config, cast.device) else "no",
            log_with=(list(config.trackers) or None) if cast.place.is_main else None,
            project_dir=folder,
        )

    return Means(open_edges, make_accelerator, NoVote)  # type: ignore[arg-type]


def warm_up(job: Job, complete: bool) -> None:
    """Compile what drafters will call, in this thread; all replicas share the code.

    Args:
        job: of the run.
        complete: also what is called with gradients; the rest is then left to the threads.
    """
    model = untrained(job, torch.device("cpu"))
    width, size = job.drafter_config.hidden_size, job.config.drafter.block_size
    # torch.compile treats lengths of 0 and 1 as constants: each is a signature of its own.
    shapes = [(blocks, size, width) for blocks in (1, 2)] + [(rows, width) for rows in (0, 1, 2)]
    precise = not use_bfloat16(job.config, torch.device("cpu"))
    for mlp in mlps(model):
        for shape in shapes:
            with torch.autocast("cpu", torch.bfloat16, enabled=not precise):
                with torch.no_grad():
                    mlp(torch.zeros(shape))
                if complete:
                    mlp(torch.zeros(shape, requires_grad=True)).sum().backward()


def start(rank: Rank, ended: queue.Queue) -> None:
    """Run ``rank`` in a thread that tells how it ended."""

    def run() -> None:
        try:
            rank.work()
        except BaseException as error:
            ended.put((rank, error))
        else:
            ended.put((rank, None))

    threading.Thread(target=run, name=rank.cast.place.name, daemon=True).start()


def supervise(ended: queue.Queue, threads: int, until: threading.Barrier | None = None) -> None:
    """Wait until ``threads`` of them have ended well, or until all have come to the barrier.

    The first exception ends the process: the other threads may wait for this one for ever.
    """
    if until is not None:
        waiter = threading.Thread(target=until.wait, daemon=True)
        waiter.start()
    while threads or until is not None:
        if until is not None and not waiter.is_alive():
            return
        try:
            rank, error = ended.get(timeout=0.1)
        except queue.Empty:
            continue
        threads -= 1
        if error is not None:
            fail(rank, error)


def fail(rank: Rank, error: BaseException) -> None:
    """End the process because of the first thread that failed; does not return."""
    if isinstance(error, UserError):
        say(f"dflash_mp: {error}\n")
        end(USER_ERROR)
    say("".join(traceback.format_exception(error)))
    place = rank.cast.place
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    say(f"ROOT CAUSE: thread {place.rank} ({place.name}), phase {rank.watch.now}: {reason}\n")
    sys.stdout.flush()
    end(CAUSE)
