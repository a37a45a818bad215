"""Enter and leave the drafters' role many times, each time with a model that DDP has wrapped."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dflash_mp.cast import DRAFTER, LauncherStore, enter, launcher_store, place_from_environment
from dflash_mp.config import TopologyConfig

TIMES = 40


def learn() -> None:
    """A few steps whose buckets gloo's threads may still hold when the model is gone."""
    layers = [torch.nn.Linear(32, 32) for _ in range(6)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    for _ in range(3):
        model(torch.randn(4, 32)).sum().backward()
    # As Accelerate does when it ends its trackers; the model is still there.
    dist.destroy_process_group()


if __name__ == "__main__":
    mine = place_from_environment(TopologyConfig(1, 2, False))
    launcher = launcher_store("many roles")
    for time in range(TIMES):
        store = dist.PrefixStore(str(time), launcher.job)
        with enter(mine, LauncherStore(store, 0), None, timedelta(minutes=1)):
            if mine.role == DRAFTER:
                learn()
    launcher.this_attempt().set(f"bye/{mine.rank}", "")
