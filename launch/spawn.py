"""Start a training without torchrun: ``python -m launch.spawn --nproc 3 [key=value ...]``.

The parent hosts the store, on the loopback interface, and sets the variables that torchrun would
set; each child calls the same ``dflash_mp.train.main``. One node only. The parent alone learns by
which signal a child has died, so it speaks first about that; the last lines it prints are the
cause of a failure.
"""

import argparse
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import socket
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dflash_mp.cast import LAUNCHER, TARGET, current_job
from dflash_mp.judge import dead_peer
from dflash_mp.peers import read_hello
from dflash_mp.verdict import FAILURE, SILENT_END, STOPPED, USER_ERROR, Verdict

POLL_S = 0.1
GRACE_S = 5.0
TRAINING = "dflash_mp.train"


def child(index: int, environment: dict[str, str], overrides: list[str], program: str) -> None:
    """One rank: dress up as a torchrun worker and run ``program``, a module or a .py file."""
    os.environ.update(environment, RANK=str(index), LOCAL_RANK=str(index))
    sys.argv = [program, *overrides]
    if program.endswith(".py"):
        # As Python does for a script on its command line.
        sys.path.insert(0, str(Path(program).resolve().parent))
        runpy.run_path(program, run_name="__main__")
    elif program == TRAINING:
        from dflash_mp.train import main

        main()
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def launch(nproc: int, overrides: list[str], program: str = TRAINING) -> int:
    """Run ``nproc`` ranks to their end; returns the job's exit code.

    0 when all have ended well, 75 when the job was asked to stop and has saved, 2 after a user's
    mistake, 128 + n when the rank that failed has died of signal n, else 1.
    """
    store = host_store()
    # Read by libraries when they are loaded, so it must be there before the children start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    environment = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "spawn",
        "TORCHELASTIC_RESTART_COUNT": "0",
        LAUNCHER: "spawn",
    }
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(
            target=child, args=(index, environment, overrides, program), name=f"{index}"
        )
        for index in range(nproc)
    ]
    received = interrupts()
    for process in processes:
        process.start()
    bad = watch(processes, store, received)
    verdict = judge(store, bad) if bad is not None else None
    stop(processes, at_once=len(received) > 1)
    if bad is None:
        return 0
    return finish(verdict, processes, asked=bool(received))


def host_store() -> dist.TCPStore:
    """The job's store, which nobody outside of this machine can reach."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def interrupts() -> list[str]:
    """From here on, the names of the SIGINT and SIGTERM that have come."""
    received: list[str] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: received.append(signal.Signals(n).name))
    return received


def watch(
    processes: list[BaseProcess], store: dist.Store, received: list[str]
) -> BaseProcess | None:
    """Wait for the end; returns the first process that has ended badly.

    The first interrupt asks the ranks to save and leave; the second one is for ``stop``.
    """
    running: dict[Any, BaseProcess] = {process.sentinel: process for process in processes}
    passed_on = False
    while running and len(received) < 2:
        if received and not passed_on:
            passed_on = True
            job = current_job(store)
            if job is not None:
                job.compare_set("stop", "", received[0])
            for process in running.values():
                # At a terminal they have had their own SIGINT; this one does not count twice.
                os.kill(process.pid or 0, signal.SIGUSR1)
        for sentinel in multiprocessing.connection.wait(list(running), POLL_S):
            process = running.pop(sentinel)
            process.join()
            if forgiven(store, process, list(running.values())):
                continue
            if process.exitcode or not said_goodbye(store, process):
                return process
    return next(iter(running.values()), None)


def forgiven(store: dist.Store, bad: BaseProcess, others: list[BaseProcess]) -> bool:
    """Whether the job goes on without a rank that was killed (``topology.elastic``).

    It does without a target while it trains, as long as there is another target.
    """
    job = current_job(store)
    if job is None or (bad.exitcode or 0) >= 0 or not job.check(["elastic", "training"]):
        return False
    lost = read_hello(job, int(bad.name))
    names = [hello.name for other in others if (hello := read_hello(job, int(other.name)))]
    left = [name for name in names if name.startswith(TARGET)]
    if lost is None or not lost.name.startswith(TARGET) or not left or job.check(["verdict"]):
        return False
    if job.get("training") != b"yes":
        return False
    sys.stderr.write(
        f"\nlaunch.spawn: WARNING: rank {lost.rank} ({lost.name}, pid {lost.pid}) is lost, "
        f"{how_it_ended(bad.exitcode or 0)}; {', '.join(left)} take over its work\n"
    )
    # In this order: nobody may miss its goodbye before its work is known to be free.
    job.set(f"lost/{lost.rank}", "")
    job.set("lost", "")
    job.set(f"bye/{lost.rank}", "")
    return True


def said_goodbye(store: dist.Store, process: BaseProcess) -> bool:
    """Whether a rank that has left with exit code 0 had come to its end."""
    job = current_job(store)
    # Without a job in the store there was nothing to do, as for ``--cfg job``.
    return job is None or job.check([f"bye/{process.name}"])


def judge(store: dist.Store, bad: BaseProcess) -> Verdict | None:
    """The job's verdict: what was said first, or what the parent sees; None if nobody knows."""
    job = current_job(store)
    if job is None:
        return None
    hello, code = read_hello(job, int(bad.name)), bad.exitcode
    if hello is not None and code is not None:
        seen = dead_peer(job, hello, how_it_ended(code))
        first = Verdict.unpack(job.compare_set("verdict", "", seen.pack()))
        # A neighbour that was quicker did not know the signal.
        return seen if first.rank == seen.rank and first.reason == SILENT_END else first
    return Verdict.unpack(job.get("verdict")) if job.check(["verdict"]) else None


def how_it_ended(code: int) -> str:
    """In words, for a process that has not said it itself."""
    if code == -signal.SIGKILL:
        return "killed by SIGKILL: by somebody, or by the system for want of memory"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"left with exit code {code} and without a word"


def stop(processes: list[BaseProcess], at_once: bool) -> None:
    """End whatever still runs: SIGTERM, and SIGKILL after the grace period."""
    for process in processes:
        if process.is_alive():
            process.kill() if at_once else process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def finish(verdict: Verdict | None, processes: list[BaseProcess], asked: bool) -> int:
    """Print the cause of a bad end as the last lines, and choose the exit code."""
    codes = [process.exitcode or 0 for process in processes]
    if verdict is None:
        if USER_ERROR in codes:
            # Said before there was a job; a rank that was slower to find it has had a SIGTERM.
            return USER_ERROR
        sys.stderr.write(f"launch.spawn: {describe(codes)}\n")
        return STOPPED if asked else max(128 - code if code < 0 else code for code in codes)
    if verdict.kind == FAILURE:
        sys.stderr.write(f"launch.spawn: {describe(codes)}\n{verdict.text}")
        died = codes[verdict.rank]
        return 128 - died if died < 0 else verdict.code
    return verdict.code


def describe(codes: list[int]) -> str:
    """Exit codes of the ranks in words."""
    words = []
    for rank, code in enumerate(codes):
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        words.append(f"rank {rank} {how}")
    return ", ".join(words)


def main() -> None:
    """Parse ``--nproc``; everything else goes to the training."""
    parser = argparse.ArgumentParser(prog="python -m launch.spawn", description=__doc__)
    parser.add_argument("--nproc", type=int, required=True, help="number of ranks")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--module", default=TRAINING, help="run this instead of the training")
    instead.add_argument("--script", default="", help="run this file instead of the training")
    arguments, overrides = parser.parse_known_args()
    raise SystemExit(launch(arguments.nproc, overrides, arguments.script or arguments.module))


if __name__ == "__main__":
    main()
