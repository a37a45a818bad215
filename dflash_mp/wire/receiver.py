"""The drafter's end of the stream; see ``stream`` for the protocol and its invariants."""

import queue
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import torch
from torch import Tensor

from dflash_mp.cast import Cast
from dflash_mp.features import FeatureBatch
from dflash_mp.wire.edge import Edge
from dflash_mp.wire.frame import FrameError, Header, Layout, decode
from dflash_mp.wire.plan import Frame, Kind, Plan
from dflash_mp.wire.stream import Clock, Helper, await_key, recorded
from dflash_mp.wire.takeover import Debts


class Receiver:
    """The drafter's end: receives frames in order in the background, W slots ahead."""

    def __init__(
        self,
        cast: Cast,
        plan: Plan,
        layout: Layout,
        slots: int,
        edges: dict[int, Edge],
        timeout: timedelta,
        debts: Debts | None = None,
    ) -> None:
        self.place, self.plan, self.layout = cast.place, plan, layout
        self.edges, self.timeout, self.debts = edges, timeout, debts
        self.device = cast.device
        self.clock = Clock()
        self.bytes = 0
        # All edges of a drafter land in the same slots.
        self._ring = next(iter(edges.values())).buffers(layout.nbytes, slots)
        plain = layout.plain
        self._padding = plain.view(plain.allocate(cast.device), -1)
        self._padding.document_ids.fill_(-1)
        # Where the values of a quantised batch are, until the next one is asked for.
        self._decoded = plain.view(plain.allocate(cast.device), -1) if layout.quantised else None
        self._ready_store = cast.client()
        self._credit_store = cast.client()
        self._done: queue.Queue[tuple[int, torch.cuda.Event | None] | None] = queue.Queue()
        self._ready: queue.Queue = queue.Queue()
        self._pump = Helper("receiver", self._receive_all, self._ready)
        self._releaser = Helper("credits", self._release_all, self._ready)

    def __iter__(self) -> Iterator[tuple[Frame, FeatureBatch]]:
        """All frames of this drafter in the plan's order.

        PAD, and SKIP instead of what a target could not make, come as a batch without documents. A
        batch is valid until the next one is asked for.
        """
        for frame in self.plan.received(self.place.role_rank):
            with self.clock.waiting("recv_wait", self.device):
                slot = self._pump.take()
            if isinstance(slot, Tensor):
                batch = self.layout.view(slot, frame.number)
                yield frame, batch if self._decoded is None else decode(batch, self._decoded)
            else:
                assert isinstance(slot, Kind)
                yield replace(frame, kind=slot), self._padding
            self._done.put((frame.k, recorded(self._ring[0])))
        self._done.put(None)
        self._releaser.thread.join()

    def _receive_all(self) -> None:
        for frame in self.plan.received(self.place.role_rank):
            if frame.kind is Kind.PAD:
                self._ready.put(Kind.PAD)
                continue
            slot = self._ring[frame.k % len(self._ring)]
            header = self._receive(frame, slot)
            self._ready_store.delete_key(f"own/{frame.drafter}/{frame.k}")
            self._ready.put(Kind.SKIP if header.kind == Kind.SKIP.value else slot)
        if self.debts is not None:
            self.debts.drained()

    def _receive(self, frame: Frame, slot: Tensor) -> Header:
        """Get ``frame`` into ``slot`` from its claimer or, if that one is lost, made again."""
        if self.debts is None:
            return self._land(self._announcement(frame), frame, slot)
        if self.debts.announced(frame):
            header = self._announcement(frame)
            try:
                return self._land(header, frame, slot)
            except RuntimeError:
                if not self.debts.is_lost(header.source):
                    raise
        header = self.debts.redo(frame, slot)
        check(header, frame, slot.numel(), self.place.name)
        return header

    def _announcement(self, frame: Frame) -> Header:
        key = f"ann/{frame.drafter}/{frame.k}"
        missing = f"{self.place.name}: frame {frame.k} (micro-batch {frame.number})"
        await_key(self._ready_store, key, self.timeout, missing)
        header = Header.unpack(self._ready_store.get(key), self.place.name)
        self._ready_store.delete_key(key)
        return header

    def _land(self, header: Header, frame: Frame, slot: Tensor) -> Header:
        check(header, frame, slot.numel(), self.place.name)
        if header.kind == Kind.SKIP.value:
            return header
        with self.clock.span("receive"):
            edge = self.edges[header.source]
            edge.land(slot)
            check_payload(header, edge.checksum(slot), self.place.name)
        self.bytes += header.nbytes
        return header

    def _release_all(self) -> None:
        while (item := self._done.get()) is not None:
            k, event = item
            if event is not None:
                event.synchronize()
            self._credit_store.set(f"free/{self.place.role_rank}/{k}", "")


def check(header: Header, frame: Frame, nbytes: int, reader: str) -> None:
    """Raise ``FrameError`` unless ``header`` announces ``frame`` with ``nbytes`` of payload."""
    skipped = header.kind == Kind.SKIP.value
    kind, size = (Kind.SKIP.value, 0) if skipped else (frame.kind.value, nbytes)
    announced = (header.drafter, header.k, header.kind, header.number, header.nbytes)
    expected = (frame.drafter, frame.k, kind, frame.number, size)
    if announced != expected:
        raise FrameError(
            f"{reader}: target{header.source} announced (drafter, k, kind, number, nbytes) = "
            f"{announced}, expected {expected}"
        )


def check_payload(header: Header, found: int, reader: str) -> None:
    """Raise ``FrameError`` unless a payload has the checksum that was announced."""
    if found != header.checksum:
        raise FrameError(
            f"{reader}: frame {header.k} of target{header.source} (micro-batch {header.number}) "
            f"arrived with checksum {found:#x}, but was sent with {header.checksum:#x}"
        )
