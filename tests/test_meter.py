"""Rates and means of a log interval that a stopped run began and a continued one ends."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from dflash_mp.cast import place
from dflash_mp.config import TopologyConfig
from dflash_mp.roles.meter import Meter


def counts(loss: float, tokens: float) -> torch.Tensor:
    """Of one step: loss, weight, correct, supervised, tokens, blocks, skipped, gradient norm."""
    return torch.tensor([loss, 1, 0, 0, tokens, 0, 0, 1], dtype=torch.float64)


def make_meter() -> Meter:
    cast = SimpleNamespace(
        store=dist.HashStore(),
        place=place(1, 2, 2, TopologyConfig(1, 1, False)),
        device=torch.device("cpu"),
    )
    job = SimpleNamespace(
        config=SimpleNamespace(
            data=SimpleNamespace(tokens_per_batch=100),
            loss=SimpleNamespace(reads_target=False),
            isolation="processes",
        ),
        plan=SimpleNamespace(batches_done=lambda step: 2 * step),
        order=SimpleNamespace(epochs=lambda done: done / 10),
        prepared=SimpleNamespace(train=SimpleNamespace(lengths=np.array([8]))),
        place=SimpleNamespace(drafters=1),
        drafter_config=None,
    )
    receiver = SimpleNamespace(clock=SimpleNamespace(seconds={}), bytes=0)
    return Meter(cast, job, receiver, peak=None)


@pytest.fixture
def schedule() -> LambdaLR:
    return LambdaLR(torch.optim.SGD([torch.zeros(1)], lr=0.5), lambda step: 1.0)


def test_a_continued_interval_has_all_steps_in_its_means_and_its_own_in_its_rates(
    schedule: LambdaLR,
) -> None:
    stopped, continued = make_meter(), make_meter()
    for _ in range(7):
        stopped.add(lambda: counts(loss=1.0, tokens=10.0))
    continued.restore(stopped.state())
    for _ in range(3):
        continued.add(lambda: counts(loss=2.0, tokens=100.0))
    values = continued.values(10, schedule)
    assert values["train/loss"] == pytest.approx((7 * 1.0 + 3 * 2.0) / 10)
    assert values["data/fill"] == pytest.approx((7 * 10 + 3 * 100) / (20 * 100))
    assert values["perf/tokens_per_s"] / values["perf/steps_per_s"] == pytest.approx(100)

    continued.add(lambda: counts(loss=4.0, tokens=50.0))
    values = continued.values(11, schedule)
    assert values["train/loss"] == pytest.approx(4.0)
    assert values["perf/tokens_per_s"] / values["perf/steps_per_s"] == pytest.approx(50)
    assert values["data/epoch"] == pytest.approx(2.2)
