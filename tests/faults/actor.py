"""A rank without models: enough of a job to be watched by a sentinel, and to fail.

Targets post numbers in the store, drafters wait for them. Environment: ``FAULT`` (a name of
``faults.FAULTS``), ``FAULT_RANK``, and ``LIMITS``, JSON of ``failure`` settings.
"""

import json
import os
import time
from pathlib import Path

from faults import commit

from dflash_mp.cast import TARGET, connect, place_from_environment
from dflash_mp.config import FailureConfig, TopologyConfig
from dflash_mp.sentinel import Sentinel, guard

PRODUCTION = {
    **{"beat_s": 1.0, "silent_s": 90.0, "gil_s": 60.0, "setup_s": 1800.0, "step_s": 300.0},
    **{"save_s": 1800.0, "wait_s": 400.0, "stop_s": 25.0, "max_skips": 20},
}
AT = 5


def main() -> None:
    """Play one rank."""
    mine = place_from_environment(TopologyConfig(None, None, False))
    store = connect("actor")
    limits = FailureConfig(**PRODUCTION | json.loads(os.environ["LIMITS"]))
    fault = os.environ["FAULT"] if os.environ["FAULT_RANK"] == str(mine.rank) else ""
    with guard(mine, store, limits) as sentinel:
        play(mine, store, sentinel, fault)
        sentinel.bye()


def play(mine: object, store: object, sentinel: Sentinel, fault: str) -> None:
    """Send or receive numbers until asked to stop."""
    if mine.is_main:
        sentinel.training(True)
        if os.environ["FAULT_RANK"] == "-1":
            # Whoever interrupts the job waits for this.
            store.wait([f"hello/{rank}" for rank in range(mine.world_size)])
            Path(os.environ["FAULT_TIME"]).touch()
    steps = int(os.environ.get("STEPS", "100000"))
    for k in range(steps):
        if mine.role == TARGET:
            # The second target sends, the first one looks on.
            if mine.role_rank == 1:
                store.set(f"own/0/{k}", str(mine.rank))
            sentinel.phase("forward")
            if k == AT and fault:
                commit(fault)
            if mine.role_rank == 1 and not (fault == "lost" and k >= AT):
                store.set(f"frame/{k}", "")
            sentinel.wait("credit")
            store.wait([f"free/{k}"])
        else:
            sentinel.wait(f"frame {k}", frame=f"0/{k}")
            store.wait([f"frame/{k}"])
            sentinel.phase("step")
            if k == AT and fault:
                commit(fault)
            time.sleep(0.02)
            if mine.is_main and sentinel.stop_reason:
                sentinel.stopped(f"saved step {k}")
            store.set(f"free/{k}", "")


if __name__ == "__main__":
    main()
