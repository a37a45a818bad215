"""The stream's invariants, with a real store and real edges; threads stand in for ranks."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from dflash_mp.cast import Cast
from dflash_mp.features import FeatureBatch
from dflash_mp.quantise import quantise
from dflash_mp.wire.connect import open_edges
from dflash_mp.wire.edge import Edge
from dflash_mp.wire.frame import DTYPES, FrameError, Header, Layout
from dflash_mp.wire.plan import Frame, Kind, Plan
from dflash_mp.wire.receiver import Receiver
from dflash_mp.wire.stream import SENDER_SLOTS, Clock, Sender, StreamError

LAYOUT = Layout(tokens=16, taps=1, hidden_width=4, final_width=0, dtype=torch.float32)
TIMEOUT = timedelta(seconds=20)
Cluster = Callable[..., list[object]]


both_edges = pytest.mark.parametrize("edge", ["gloo", "shm"])


def open_all(cast: Cast) -> dict[int, Edge]:
    kind = cast.store.get("kind of edges").decode()
    return open_edges(cast, kind, 4 * LAYOUT.nbytes, TIMEOUT)


def content(frame: Frame) -> float:
    return 1000.0 * frame.kind.value + frame.number


def send_all(cast: Cast, plan: Plan, slots: int, timeout: timedelta = TIMEOUT) -> int:
    """A target: fills every frame it claims with a value that names it."""
    sender = Sender(cast, plan, LAYOUT, slots, open_all(cast), timeout)
    sent = 0
    for frame in sender.claims():
        slot = sender.slot()
        batch = LAYOUT.view(slot, frame.number)
        batch.hidden_states.fill_(content(frame))
        batch.document_ids.zero_()
        sender.submit(slot, frame)
        sent += 1
    sender.finish()
    return sent


def receiver(cast: Cast, plan: Plan, slots: int, timeout: timedelta = TIMEOUT) -> Receiver:
    return Receiver(cast, plan, LAYOUT, slots, open_all(cast), timeout)


@both_edges
@pytest.mark.parametrize(
    ("targets", "drafters", "slots"), [(1, 1, 1), (2, 1, 3), (3, 2, 1), (2, 3, 2)]
)
def test_every_drafter_gets_its_frames_in_order_with_their_content(
    cluster: Cluster, targets: int, drafters: int, slots: int, edge: str
) -> None:
    plan = Plan(heldout=3, training=23, per_step=4, drafters=drafters)

    def work(cast: Cast) -> object:
        if cast.place.role == "target":
            return send_all(cast, plan, slots)
        received = []
        for frame, batch in receiver(cast, plan, slots):
            if frame.kind is Kind.PAD:
                assert (batch.document_ids == -1).all()
            else:
                assert (batch.hidden_states == content(frame)).all()
                assert batch.number == frame.number
            received.append(frame)
        return received

    results = cluster(targets, drafters, work, edge)
    assert sum(results[:targets]) == 3 + 23
    for drafter, received in enumerate(results[targets:]):
        assert received == list(plan.received(drafter))


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_a_drafter_gets_values_where_codes_are_sent(cluster: Cluster, dtype: str) -> None:
    layout = Layout(tokens=16, taps=2, hidden_width=8, final_width=4, dtype=DTYPES[dtype])
    plan = Plan(heldout=0, training=6, per_step=1, drafters=1)
    values = torch.arange(128.0).reshape(16, 8) - 60

    def work(cast: Cast) -> object:
        edges = open_edges(cast, "shm", 2 * layout.nbytes, TIMEOUT)
        if cast.place.role == "target":
            sender = Sender(cast, plan, layout, 2, edges, TIMEOUT)
            for frame in sender.claims():
                batch = layout.view(sender.slot(), frame.number)
                for tap, part in enumerate(values.chunk(2, 1)):
                    columns = slice(4 * tap, 4 * tap + 4)
                    codes, scales = batch.hidden_states[:, columns], batch.hidden_scales[:, tap]
                    quantise(part * (1 + frame.number), codes, scales)
                batch.final_hidden.fill_(frame.number)
                sender.submit(sender.slot(), frame)
            sender.finish()
            return None
        for frame, batch in Receiver(cast, plan, layout, 2, edges, TIMEOUT):
            assert batch.hidden_states.dtype == torch.bfloat16
            expected = (values * (1 + frame.number)).bfloat16()
            torch.testing.assert_close(batch.hidden_states, expected, rtol=0.07, atol=2.0)
            assert (batch.final_hidden == frame.number).all()
        return True

    assert cluster(1, 1, work)[1]


@pytest.mark.parametrize("slots", [1, 3])
def test_no_more_than_w_frames_are_announced_beyond_what_was_consumed(
    cluster: Cluster, slots: int
) -> None:
    """Memory is bounded however fast the target is: the drafter looks before each frame."""
    plan = Plan(heldout=0, training=20, per_step=1, drafters=1)
    claimed = []

    def work(cast: Cast) -> object:
        if cast.place.role == "target":
            return send_all(cast, plan, slots)
        ahead = []
        store = cast.client()
        for consumed, _ in enumerate(receiver(cast, plan, slots)):
            time.sleep(0.02)
            claimed.append(int(store.add("claim/0", 0)) - consumed)
            # Announcements are deleted when read, so look for any beyond the window.
            beyond = [f"ann/0/{k}" for k in range(consumed + slots, 20)]
            ahead.append(sum(store.check([key]) for key in beyond))
        return ahead

    _, ahead = cluster(1, 1, work)
    assert ahead == [0] * 20
    # In the window, in the sender's slots, and the one that waits for a slot.
    assert max(claimed) <= slots + SENDER_SLOTS + 1


def test_a_batch_is_not_overwritten_before_the_next_is_asked_for(cluster: Cluster) -> None:
    plan = Plan(heldout=0, training=12, per_step=1, drafters=1)

    def work(cast: Cast) -> object:
        if cast.place.role == "target":
            return send_all(cast, plan, slots=1)
        for frame, batch in receiver(cast, plan, slots=1):
            before = batch.hidden_states.clone()
            time.sleep(0.02)
            assert torch.equal(batch.hidden_states, before)
            assert (before == content(frame)).all()
        return True

    assert cluster(1, 1, work)[1]


def test_a_missing_frame_and_a_missing_credit_are_named(cluster: Cluster) -> None:
    plan = Plan(heldout=0, training=8, per_step=1, drafters=1)
    short = timedelta(seconds=1)
    started = threading.Event()

    def silent_target(cast: Cast) -> object:
        if cast.place.role == "target":
            open_all(cast)
            return None
        with pytest.raises(StreamError, match=r"drafter0: frame 0 .* within 1 s"):
            next(iter(receiver(cast, plan, 2, short)))
        started.set()
        return None

    cluster(1, 1, silent_target)
    assert started.is_set()


def test_a_drafter_that_stops_consuming_is_named(cluster: Cluster) -> None:
    plan = Plan(heldout=0, training=8, per_step=1, drafters=1)
    short = timedelta(seconds=1)
    done = threading.Event()

    def work(cast: Cast) -> object:
        if cast.place.role == "target":
            with pytest.raises(StreamError, match=r"target0: credit of drafter0 for frame 2"):
                send_all(cast, plan, 2, short)
            done.set()
            return None
        taken = receiver(cast, plan, 2)
        assert isinstance(next(iter(taken))[1], FeatureBatch)
        done.wait(20)
        return None

    cluster(1, 1, work)
    assert done.is_set()


def test_a_frame_that_is_not_the_planned_one_is_refused_with_both_ends_named(
    cluster: Cluster,
) -> None:
    plan = Plan(heldout=0, training=4, per_step=1, drafters=1)

    def work(cast: Cast) -> object:
        if cast.place.role == "target":
            open_all(cast)
            wrong = Header(0, 0, 0, Kind.TRAIN.value, number=3, nbytes=LAYOUT.nbytes, checksum=0)
            cast.store.set("ann/0/0", wrong.pack())
            return None
        with pytest.raises(FrameError, match=r"drafter0: target0 announced"):
            next(iter(receiver(cast, plan, 2)))
        return None

    cluster(1, 1, work)


def test_a_frame_that_cannot_be_made_comes_as_skip_and_is_never_seen(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    plan = Plan(heldout=0, training=8, per_step=1, drafters=1)

    def work(cast: Cast) -> object:
        if cast.place.role == "target":
            sender = Sender(cast, plan, LAYOUT, 2, open_all(cast), TIMEOUT)
            for frame in sender.claims():
                slot = sender.slot()
                batch = LAYOUT.view(slot, frame.number)
                assert torch.isfinite(batch.hidden_states).all()
                batch.hidden_states[0, 0] = torch.nan if frame.number == 2 else 1.0
                problem = "no memory" if frame.number == 5 else ""
                finite = torch.isfinite(batch.hidden_states).all()
                sender.submit(slot, frame, finite, problem)
            sender.finish()
            return None
        kinds = []
        for frame, batch in receiver(cast, plan, 2):
            assert torch.isfinite(batch.hidden_states).all()
            assert (frame.kind is Kind.SKIP) == bool((batch.document_ids == -1).all())
            kinds.append((frame.number, frame.kind))
        return kinds

    _, kinds = cluster(1, 1, work)
    skipped = [number for number, kind in kinds if kind is Kind.SKIP]
    assert skipped == [2, 5]
    assert [number for number, _ in kinds] == list(range(8))
    assert "micro-batch 2 is not sent: hidden states of the target that are not" in caplog.text
    assert "micro-batch 5 is not sent: no memory" in caplog.text


def test_a_payload_that_changed_on_the_way_is_refused_with_both_ends_named(
    cluster: Cluster,
) -> None:
    plan = Plan(heldout=0, training=3, per_step=1, drafters=1)

    def work(cast: Cast) -> str:
        edges = open_all(cast)
        if cast.place.role == "target":
            slot = LAYOUT.allocate(torch.device("cpu"))
            header = Header(
                0, 0, 0, Kind.TRAIN.value, 0, nbytes=LAYOUT.nbytes, checksum=edges[0].checksum(slot)
            )
            cast.store.set("ann/0/0", header.pack())
            slot[100] = 1
            edges[0].put(slot)
            return ""
        with pytest.raises(FrameError) as caught:
            next(iter(Receiver(cast, plan, LAYOUT, 2, edges, TIMEOUT)))
        return str(caught.value)

    _, message = cluster(1, 1, work)
    for words in ("drafter0", "target0", "micro-batch 0", "checksum"):
        assert words in message


def test_on_a_cpu_all_of_a_wait_counts_as_waiting() -> None:
    clock = Clock()
    with clock.waiting("wait", torch.device("cpu"), works="work"):
        time.sleep(0.02)
    assert clock.seconds["wait"] >= 0.02
    assert clock.seconds["work"] == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_wait_while_the_gpu_still_works_counts_as_work() -> None:
    clock, device = Clock(), torch.device("cuda", torch.cuda.current_device())
    # In cycles: far longer than the wait.
    torch.cuda._sleep(4 * 10**9)
    with clock.waiting("wait", device, works="work"):
        time.sleep(0.02)
    assert clock.seconds["wait"] == 0.0
    assert clock.seconds["work"] >= 0.02
    torch.cuda.synchronize()
    worked = clock.seconds["work"]
    with clock.waiting("wait", device, works="work"):
        time.sleep(0.02)
    assert clock.seconds["wait"] >= 0.01
    assert clock.seconds["work"] - worked < 0.01
