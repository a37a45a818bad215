"""The plan is judged by what a run needs of it, over many sizes."""

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from dflash_mp.wire.plan import Frame, Kind, Plan

SIZES = list(
    itertools.product([0, 1, 5], [1, 7, 12], [1, 3, 4], [1, 2, 3])  # heldout, training, G, D
)


@pytest.mark.parametrize(("heldout", "training", "per_step", "drafters"), SIZES)
def test_every_micro_batch_is_received_exactly_once(
    heldout: int, training: int, per_step: int, drafters: int
) -> None:
    plan = Plan(heldout, training, per_step, drafters)
    received = [f for d in range(drafters) for f in plan.received(d) if f.kind is not Kind.PAD]
    counted = Counter((f.kind, f.number) for f in received)
    expected = [(Kind.HELDOUT, n) for n in range(heldout)]
    expected += [(Kind.TRAIN, n) for n in range(training)]
    assert counted == Counter(expected)


@pytest.mark.parametrize(("heldout", "training", "per_step", "drafters"), SIZES)
def test_a_step_holds_the_same_micro_batches_for_any_number_of_drafters(
    heldout: int, training: int, per_step: int, drafters: int
) -> None:
    plan = Plan(heldout, training, per_step, drafters)
    for step in range(plan.steps):
        start = plan.heldout_frames + step * plan.step_frames
        frames = [
            plan.frame(d, k)
            for d in range(drafters)
            for k in range(start, start + plan.step_frames)
        ]
        numbers = sorted(f.number for f in frames if f.kind is Kind.TRAIN)
        assert numbers == list(range(step * per_step, min((step + 1) * per_step, training)))


@pytest.mark.parametrize("nodes", [1, 2])
def test_claims_of_all_nodes_cover_all_frames_in_order_of_k(nodes: int) -> None:
    per_node = 2
    plan = Plan(heldout=3, training=10, per_step=4, drafters=nodes * per_node)
    claimed = []
    for node in range(nodes):
        frames = list(iter_claims(plan, node, per_node))
        assert [f.k for f in frames] == sorted(f.k for f in frames)
        claimed += frames
    everything = [plan.frame(d, k) for d in range(nodes * per_node) for k in range(plan.frames)]
    assert sorted((f.drafter, f.k) for f in claimed) == sorted((f.drafter, f.k) for f in everything)


def test_a_resumed_plan_continues_where_the_first_part_stopped() -> None:
    whole = Plan(heldout=2, training=11, per_step=3, drafters=2)
    rest = Plan(heldout=2, training=11, per_step=3, drafters=2, first_step=2, first_batch=6)
    assert rest.steps == whole.steps
    skipped = 2 * whole.step_frames
    for drafter in range(2):
        expected = [f for f in whole.received(drafter) if f.k >= whole.heldout_frames + skipped]
        resumed = [f for f in rest.received(drafter) if f.k >= rest.heldout_frames]
        assert [(f.kind, f.number) for f in resumed] == [(f.kind, f.number) for f in expected]


@pytest.mark.parametrize("drafters", [1, 2, 3])
@pytest.mark.parametrize("stopped", [1, 3, 4])
def test_more_steps_after_a_short_one_train_every_micro_batch_once(
    stopped: int, drafters: int
) -> None:
    # 11 micro-batches in steps of 3: the fourth step has two.
    first = Plan(heldout=2, training=11, per_step=3, drafters=drafters)
    done = first.batches_done(stopped)
    assert done == min(3 * stopped, 11)
    rest = Plan(2, 25, 3, drafters, first_step=stopped, first_batch=done)
    numbers = [f.number for d in range(drafters) for f in rest.received(d) if f.kind is Kind.TRAIN]
    assert sorted(numbers) == list(range(done, 25))
    assert rest.steps == stopped + -(-(25 - done) // 3)
    assert rest.batches_done(rest.steps) == 25


def iter_claims(plan: Plan, node: int, per_node: int) -> Iterator[Frame]:
    for count in itertools.count():
        frame = plan.claim(count, node, per_node)
        if frame is None:
            return
        yield frame
