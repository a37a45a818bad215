"""What a lost target owes is made by the others; a real store and real edges, threads as ranks."""

import queue
import time
from collections.abc import Iterator

import pytest
import torch
from test_stream import LAYOUT, TIMEOUT, Cluster, content, open_all

from dflash_mp.cast import Cast
from dflash_mp.wire.plan import Frame, Kind, Plan
from dflash_mp.wire.receiver import Receiver
from dflash_mp.wire.stream import Sender, StreamError
from dflash_mp.wire.takeover import Debts, ElasticSender

LOST_AFTER = 3
ALONE = 9
"""Frames that the target that stays may make before the other has its last one."""


def fill(slot: torch.Tensor, frame: Frame) -> None:
    batch = LAYOUT.view(slot, frame.number)
    batch.hidden_states.fill_(content(frame))
    batch.document_ids.zero_()


def send_all(cast: Cast, plan: Plan) -> int:
    """A target that stays, and leaves the other its share however late that one comes."""
    sender = ElasticSender(cast, plan, LAYOUT, 2, open_all(cast), TIMEOUT)
    sent = 0
    for frame in sender.claims():
        fill(sender.slot(), frame)
        sender.submit(sender.slot(), frame)
        sent += 1
        # So that they take turns, mostly.
        time.sleep(0.01)
        if sent == ALONE:
            cast.store.wait(["lost one has its last"])
    sender.finish()
    return sent


def claimed(cast: Cast, plan: Plan, sender: Sender) -> Iterator[Frame]:
    for count, frame in enumerate(sender.claims()):
        yield frame
        if count == LOST_AFTER:
            return


def get_lost(cast: Cast, plan: Plan, how: str) -> None:
    """A target that is killed in its fourth frame, and what its launcher says of that."""
    edges = open_all(cast)
    sender = ElasticSender(cast, plan, LAYOUT, 2, edges, TIMEOUT)
    frames = claimed(cast, plan, sender)
    for _ in range(LOST_AFTER):
        frame = next(frames)
        fill(sender.slot(), frame)
        sender.submit(sender.slot(), frame)
    frame = next(frames)
    cast.store.set("lost one has its last", "")
    # Let what is on its way arrive.
    time.sleep(0.5)
    if how == "announced":
        header = sender._header(frame, sender.slot(), "")
        cast.store.set(f"ann/{frame.drafter}/{frame.k}", header.pack())
    if how == "unsigned":
        cast.store.delete_key(f"own/{frame.drafter}/{frame.k}")
    sender._outbox = queue.Queue()
    for edge in edges.values():
        edge.close()
    edges.clear()
    sender.edges = {}
    del edge
    for key in (f"lost/{cast.place.rank}", "lost", f"bye/{cast.place.rank}"):
        cast.store.set(key, "")


def receive_all(cast: Cast, plan: Plan) -> list[Frame]:
    debts = Debts(cast, plan, TIMEOUT)
    edges = open_all(cast)
    received = []
    for frame, batch in Receiver(cast, plan, LAYOUT, 2, edges, TIMEOUT, debts):
        if frame.kind is not Kind.PAD:
            assert (batch.hidden_states == content(frame)).all()
        received.append(frame)
    return received


@pytest.mark.parametrize(
    ("how", "drafters", "edge"),
    [
        ("claimed", 1, "shm"),
        ("claimed", 2, "shm"),
        ("announced", 1, "gloo"),
        ("announced", 1, "shm"),
        ("announced", 2, "shm"),
        ("unsigned", 1, "shm"),
        ("unsigned", 2, "gloo"),
    ],
)
def test_every_frame_comes_once_though_a_target_is_lost(
    cluster: Cluster,
    how: str,
    drafters: int,
    edge: str,
) -> None:
    plan = Plan(heldout=2, training=21, per_step=2, drafters=drafters)

    def work(cast: Cast) -> object:
        if cast.place.rank == 1:
            return get_lost(cast, plan, how)
        return send_all(cast, plan) if cast.place.rank == 0 else receive_all(cast, plan)

    sent, _, *received = cluster(2, drafters, work, edge)
    for drafter, frames in enumerate(received):
        assert frames == list(plan.received(drafter))
    # The fourth frame of the lost one was made again.
    assert sent + LOST_AFTER == 23


def test_without_any_target_the_frame_is_named(cluster: Cluster) -> None:
    plan = Plan(heldout=0, training=9, per_step=1, drafters=1)

    def work(cast: Cast) -> object:
        if cast.place.rank < 2:
            open_all(cast)
            for key in (f"lost/{cast.place.rank}", "own/0/0", "lost"):
                cast.store.set(key, "0")
            # Nobody makes it again, whoever takes the request.
            for number in range(2):
                cast.store.set(f"redo/0/{number}/by", str(cast.place.rank))
            return None
        with pytest.raises(StreamError, match="no target is left to make frame 0"):
            receive_all(cast, plan)
        return None

    cluster(2, 1, work)
