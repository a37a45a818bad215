"""A lost target's unfinished frames, made and delivered by the other targets of its node.

Only the launcher that can do without a rank (``launch.spawn``) says that one is lost. It writes
``lost`` and ``lost/<target>``; whatever that target had claimed and not delivered is then asked for
again by the drafter that waits for it, one frame at a time, in its order:

- ``redo/<node>/<i>``: the i-th request, JSON ``[drafter, k, attempt]``; ``.../by`` is the rank that
  took it.
- ``redone/<drafter>/<k>/<attempt>``: header and file of the frame. It travels through a file of
  the memory file system, not over an edge, so it waits neither for a credit nor behind a frame
  that waits for one.

The ledger ``own/<drafter>/<k>`` tells who has claimed a frame. A frame that is claimed and not in
the ledger was claimed by a target that died in between.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash_mp.cast import Cast
from dflash_mp.wire.edge import Edge
from dflash_mp.wire.frame import Header, Layout
from dflash_mp.wire.plan import Frame, Kind, Plan
from dflash_mp.wire.stream import Sender, StreamError

POLL_S = 0.02
LEDGER_S = 2.0
"""After a loss, a frame that stays claimed and unsigned for so long was the lost target's."""
LOSS_S = 5.0
"""How long a broken edge waits for the launcher to say that its target is lost."""


def memory_folder() -> str:
    """Where a file is memory, on Linux."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()


class Debts:
    """A drafter's side: finds out that a frame will not come, and has it made again."""

    def __init__(self, cast: Cast, plan: Plan, timeout: timedelta) -> None:
        self.place, self.plan, self.timeout = cast.place, plan, timeout.total_seconds()
        self.store = cast.client()
        self._unsigned: dict[int, float] = {}

    def announced(self, frame: Frame) -> bool:
        """Wait until ``frame`` is announced (True) or owed by a lost target (False)."""
        key = f"ann/{frame.drafter}/{frame.k}"
        self._until(lambda: self.store.check([key]) or self._owed(frame), frame)
        return self.store.check([key])

    def is_lost(self, target: int) -> bool:
        """Whether a target (role rank) is lost; waits a while for the launcher to say it."""
        deadline = time.monotonic() + LOSS_S
        while time.monotonic() < deadline:
            if self.store.check([f"lost/{target}"]):
                return True
            time.sleep(POLL_S)
        return False

    def redo(self, frame: Frame, slot: Tensor) -> Header:
        """Have ``frame`` made by another target and read it into ``slot``; returns its header."""
        place = self.place
        for attempt in range(place.targets_per_node):
            number = self.store.add(f"redo/{place.node}", 1) - 1
            request = f"redo/{place.node}/{number}"
            self.store.set(request, json.dumps([frame.drafter, frame.k, attempt]))
            done = f"redone/{frame.drafter}/{frame.k}/{attempt}"
            taker = f"{request}/by"
            self._until(lambda: self.store.check([done]) or self._taker_lost(taker), frame)  # noqa: B023
            if self.store.check([done]):
                return read(self.store.get(done), slot, place.name)
        raise StreamError(f"{place.name}: no target is left to make frame {frame.k}")

    def drained(self) -> None:
        """This drafter has all its frames; nothing more will be asked for."""
        self.store.set(f"drained/{self.place.role_rank}", "")

    def _until(self, ready: Callable[[], bool], frame: Frame) -> None:
        deadline = time.monotonic() + self.timeout
        while not ready():
            if time.monotonic() > deadline:
                raise StreamError(
                    f"{self.place.name}: frame {frame.k} (micro-batch {frame.number}) did not come "
                    f"within {self.timeout:g} s (wire.timeout_s)"
                )
            time.sleep(POLL_S)

    def _owed(self, frame: Frame) -> bool:
        if not self.store.check(["lost"]):
            return False
        owner = f"own/{frame.drafter}/{frame.k}"
        if self.store.check([owner]):
            return self._rank_lost(int(self.store.get(owner)))
        place = self.place
        first = place.node * place.drafters_per_node
        count = frame.k * place.drafters_per_node + frame.drafter - first
        if self.store.add(f"claim/{place.node}", 0) <= count:
            return False
        since = self._unsigned.setdefault(frame.k, time.monotonic())
        return time.monotonic() - since > LEDGER_S

    def _taker_lost(self, key: str) -> bool:
        return self.store.check([key]) and self._rank_lost(int(self.store.get(key)))

    def _rank_lost(self, rank: int) -> bool:
        # One node: the targets are its first ranks.
        return self.store.check([f"lost/{rank}"])


def read(announcement: bytes, slot: Tensor, reader: str) -> Header:
    """Fill ``slot`` from the file of a frame that was made again, and delete the file."""
    packed, path = json.loads(announcement)
    header = Header.unpack(bytes.fromhex(packed), reader)
    if header.kind != Kind.SKIP.value:
        slot.copy_(torch.from_numpy(np.fromfile(path, dtype=np.uint8)))
        Path(path).unlink()
    return header


class ElasticSender(Sender):
    """A target's end that also makes what lost targets owe, until all drafters have everything."""

    def __init__(
        self,
        cast: Cast,
        plan: Plan,
        layout: Layout,
        slots: int,
        edges: dict[int, Edge],
        timeout: timedelta,
    ) -> None:
        super().__init__(cast, plan, layout, slots, edges, timeout)
        self._spare = layout.allocate(cast.device)
        self._requests = cast.store
        self._seen = 0
        self._attempt = 0

    def claims(self) -> Iterator[Frame]:
        """Frames of the plan and, before each of them and while there is no slot, debts."""
        over = False
        while not (over and self._drained()):
            frame = self._debt()
            if frame is not None:
                self._slot = self._spare
                yield frame
            elif over:
                time.sleep(POLL_S)
            elif (slot := self._helper.poll(POLL_S)) is not None:
                assert isinstance(slot, Tensor)
                frame = self._claim()
                over = frame is None
                if frame is None:
                    self._free.put(slot)
                else:
                    self._slot = slot
                    yield frame

    def submit(
        self, slot: Tensor, frame: Frame, finite: Tensor | None = None, problem: str = ""
    ) -> None:
        """Hand a filled slot over; a debt is delivered at once."""
        if slot is not self._spare:
            super().submit(slot, frame, finite, problem)
            return
        if not problem and finite is not None and not bool(finite):
            problem = "hidden states of the target that are not finite"
        header, path = self._header(frame, slot, problem), ""
        if not problem:
            descriptor, path = tempfile.mkstemp(prefix="dflash_mp-", dir=memory_folder())
            with os.fdopen(descriptor, "wb") as file:
                slot.cpu().numpy().tofile(file)
        key = f"redone/{frame.drafter}/{frame.k}/{self._attempt}"
        self._requests.set(key, json.dumps([header.pack().hex(), path]))

    def _debt(self) -> Frame | None:
        """The next request that nobody has taken, taken by this target."""
        while self._requests.check([f"redo/{self.place.node}/{self._seen}"]):
            key = f"redo/{self.place.node}/{self._seen}"
            self._seen += 1
            mine = str(self.place.rank)
            if self._requests.compare_set(f"{key}/by", "", mine).decode() == mine:
                drafter, k, self._attempt = json.loads(self._requests.get(key))
                return self.plan.frame(drafter, k)
        return None

    def _drained(self) -> bool:
        place = self.place
        first = place.node * place.drafters_per_node
        keys = [f"drained/{first + i}" for i in range(place.drafters_per_node)]
        return self._requests.check(keys)
