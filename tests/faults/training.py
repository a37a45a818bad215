"""``dflash_mp.train`` on a tiny target, with a rank that fails (see ``faults``).

Environment as for ``actor.py``, and ``FAULT_FOLDER``, where ``tests/tiny.py`` has put a target and
conversations. Arguments are further overrides.
"""

import json
import os
import sys
import time
from pathlib import Path

from faults import commit

from dflash_mp import train
from dflash_mp.checkpoint import CheckpointWriter
from dflash_mp.roles import drafter
from dflash_mp.target.model import FeatureExtractor
from dflash_mp.wire.stream import Sender

AT = 12
"""Frames that the failing rank does well; more than the held-out ones."""


def settings() -> list[str]:
    """What makes it tiny, quick to notice, and long enough to fail in."""
    folder = os.environ["FAULT_FOLDER"]
    limits = json.loads(os.environ["LIMITS"])
    return [
        f"target.name={folder}/target",
        f"data.train={folder}/train.jsonl",
        f"data.heldout={folder}/heldout.jsonl",
        f"data.cache_dir={folder}/cache",
        f"output_dir={os.environ['FAULT_OUTPUT']}",
        *("data.max_length=64", "data.tokens_per_batch=64", "data.min_supervised_tokens=2"),
        *("drafter.block_size=4", "target.layer_ids=[0,2]", "drafter.tapped_layers=2"),
        *("drafter.anchors_per_batch=8", "drafter.precision=float32", "wire.dtype=float32"),
        *("steps=100000", "micro_batches_per_step=1", "log_interval=1", "trackers=[]"),
        *("evaluate.decode_prompts=0", "checkpoint.interval=5", "features.cache=off"),
        *(f"failure.{key}={value}" for key, value in limits.items()),
        *sys.argv[1:],
    ]


def arm(fault: str) -> None:
    """Let this rank fail with ``fault``: a target in a forward, a drafter in a step."""
    fill, step, submit = FeatureExtractor.fill, drafter.train_step, Sender.submit
    done = 0

    def due() -> bool:
        nonlocal done
        done += 1
        return done == AT

    def failing_fill(*arguments: object) -> None:
        if due() and fault != "lost":
            commit(fault)
        fill(*arguments)

    def failing_step(*arguments: object) -> object:
        if due():
            commit(fault)
        return step(*arguments)

    def losing_submit(self: Sender, slot: object, *rest: object) -> None:
        if fault == "lost" and done == AT:
            commit(fault)
            self._free.put(slot)
        else:
            submit(self, slot, *rest)

    FeatureExtractor.fill = failing_fill
    drafter.train_step = failing_step
    Sender.submit = losing_submit


def announce() -> None:
    """Tell whoever will interrupt the job that there is a checkpoint."""
    wait, step = CheckpointWriter.wait, drafter.train_step

    def telling_wait(self: CheckpointWriter) -> None:
        wait(self)
        if list(self.folder.glob("step-*")):
            Path(os.environ["FAULT_TIME"]).touch()

    def slow_step(*arguments: object) -> object:
        # So that the job still runs when the interrupt comes.
        time.sleep(0.1)
        return step(*arguments)

    CheckpointWriter.wait = telling_wait
    drafter.train_step = slow_step


def give_way() -> None:
    """Let the other target make most frames until it fails, however the ranks are scheduled.

    A claim goes to whoever asks first, so without this a short run can end before the other's turn.
    """
    fill = FeatureExtractor.fill

    def late_fill(*arguments: object) -> None:
        if not Path(os.environ["FAULT_TIME"]).exists():
            time.sleep(0.5)
        fill(*arguments)

    FeatureExtractor.fill = late_fill


if __name__ == "__main__":
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if os.environ["FAULT_RANK"] == os.environ["RANK"] and first:
        arm(os.environ["FAULT"])
    elif os.environ["FAULT_RANK"] == "-1":
        announce()
    elif (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "3"):
        give_way()
    sys.argv[1:] = settings()
    train.main()
