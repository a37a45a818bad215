"""Start a training without torchrun: ``python -m launch.spawn --nproc 3 [key=value ...]``.

The parent hosts the store and sets the variables that torchrun would set; each child calls the
same ``dflash_mp.train.main``. One node only.
"""

import argparse
import multiprocessing.connection
import os
import signal
import sys
import time
from multiprocessing.process import BaseProcess

import torch.distributed as dist
import torch.multiprocessing as mp

GRACE_S = 5.0


def child(index: int, environment: dict[str, str], overrides: list[str]) -> None:
    """One rank: dress up as a torchrun worker and train."""
    os.environ.update(environment, RANK=str(index), LOCAL_RANK=str(index))
    sys.argv = ["dflash_mp.train", *overrides]
    from dflash_mp.train import main

    main()


def launch(nproc: int, overrides: list[str]) -> int:
    """Run ``nproc`` ranks to their end; returns the job's exit code.

    The first rank that fails ends the others within ``GRACE_S``.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
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
    }
    context = mp.start_processes(
        child, args=(environment, overrides), nprocs=nproc, join=False, start_method="spawn"
    )
    assert context is not None
    processes = list(context.processes)
    try:
        code = watch(processes)
    finally:
        stop(processes)
    if code:
        sys.stderr.write(f"launch.spawn: {describe(processes)}\n")
    return code


def watch(processes: list[BaseProcess]) -> int:
    """Wait until all have ended well (0) or one has not (its exit code, 128 + n for signal n)."""
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in multiprocessing.connection.wait(list(running)):
            process = running.pop(sentinel)  # type: ignore[arg-type]
            process.join()
            code = process.exitcode or 0
            if code:
                return code if code > 0 else 128 - code
    return 0


def stop(processes: list[BaseProcess]) -> None:
    """End whatever still runs: SIGTERM, and SIGKILL after the grace period."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def describe(processes: list[BaseProcess]) -> str:
    """Exit codes of the ranks in words."""
    words = []
    for rank, process in enumerate(processes):
        code = process.exitcode or 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        words.append(f"rank {rank} {how}")
    return ", ".join(words)


def main() -> None:
    """Parse ``--nproc``; everything else goes to the training."""
    parser = argparse.ArgumentParser(prog="python -m launch.spawn", description=__doc__)
    parser.add_argument("--nproc", type=int, required=True, help="number of ranks")
    arguments, overrides = parser.parse_known_args()
    raise SystemExit(launch(arguments.nproc, overrides))


if __name__ == "__main__":
    main()
