"""The stream of frames: claims, credits, announcements, rings, and the threads that move bytes.

Protocol, for frame ``k`` of drafter ``d`` (all keys live in the launcher's store):

1. A target claims the next frame of its node: ``claim/<node>`` (atomic add), writes it into one
   of its own ``SENDER_SLOTS`` slots, and signs for it in the ledger: ``own/<d>/<k>``.
2. Its sender thread waits for the credit ``free/<d>/<k - W>``: the drafter has consumed the frame
   that used slot ``k % W`` before. It announces ``ann/<d>/<k>`` and sends.
3. The drafter's receiver thread waits for the announcement, receives into slot ``k % W`` and hands
   the frame to the main thread, which gives the credit ``free/<d>/<k>`` when it asks for the next.

Invariants:

- A slot has one owner at a time: in a target main thread -> sender thread -> main thread (two
  queues), in a drafter receiver thread -> main thread -> the credit.
- Memory is bounded by W slots a drafter and ``SENDER_SLOTS`` a target, whatever the speeds: no
  payload is sent without its credit.
- No deadlock: claims are handed out in the order of consumption and a target sends in the order
  of its claims, so the lowest undelivered frame always has its slot and is never behind another.
- Every wait ends: on its key, on an error in the helper thread (passed on by the queue), or after
  ``timeout`` with an error that names what was missing.
- Helper threads call no model and no compiled code.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from dflash_mp.cast import Cast
from dflash_mp.warn_once import warn_once
from dflash_mp.wire.edge import Edge
from dflash_mp.wire.frame import Header, Layout
from dflash_mp.wire.plan import Frame, Kind, Plan

log = logging.getLogger(__name__)

SENDER_SLOTS = 2
UNSENT_ADVICE = (
    "drafters leave it out: lower data.tokens_per_batch if memory is short, and try "
    "target.dtype=float32 if values are not finite"
)


class StreamError(Exception):
    """The stream cannot go on: a frame or a credit did not come."""

    consequence = True
    """Something else has failed before, probably."""


class Clock:
    """Seconds spent per label; one instance may be used by several threads."""

    traced = False
    """Whether the spans of this process also show in torch's profiler (``profiling``)."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, label: str, seconds: float) -> None:
        """Add ``seconds`` to ``label``."""
        with self._lock:
            self.seconds[label] = self.seconds.get(label, 0.0) + seconds

    @contextmanager
    def span(self, label: str) -> Iterator[None]:
        """Add the time of the body to ``label``."""
        start = time.perf_counter()
        with record_function(label) if Clock.traced else nullcontext():
            yield
        self.add(label, time.perf_counter() - start)

    @contextmanager
    def waiting(self, label: str, device: torch.device, works: str | None = None) -> Iterator[None]:
        """Add the time of the body, which waits for other ranks, to ``label``.

        A GPU may still be at what this thread has launched before: the host runs ahead. Only the
        time in which it had nothing to do counts as waiting, and the rest is added to ``works``.
        """
        before = timed_event(device)
        start = time.perf_counter()
        with record_function(label) if Clock.traced else nullcontext():
            yield
        seconds = time.perf_counter() - start
        idle = seconds if before is None else min(seconds, idle_since(before, device))
        self.add(label, idle)
        if works is not None:
            self.add(works, seconds - idle)


def timed_event(device: torch.device) -> torch.cuda.Event | None:
    """An event behind all that this thread has launched on a GPU; ``None`` on the CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def idle_since(event: torch.cuda.Event, device: torch.device) -> float:
    """For how many seconds this thread's stream has had nothing to do behind ``event``.

    It never waits for what is not over. A drafter's stream may hold an all-reduce, which needs
    other drafters, and a target has a free slot before its last forward is over: to wait for the
    stream would leave the GPU without the next one, and make ranks depend on each other's speed.
    """
    if not event.query():
        return 0.0
    now = timed_event(device)
    assert now is not None
    # Alone on its stream: over at once.
    now.synchronize()
    return event.elapsed_time(now) / 1e3


class Helper:
    """A thread whose exception is raised in the main thread at its next look into ``inbox``."""

    def __init__(self, name: str, work: Callable[[], None], inbox: queue.Queue) -> None:
        self.inbox = inbox
        self.work = work
        # Torch's current GPU is each thread's own and begins as the first one of the node, where
        # whatever a thread does without naming a GPU would take memory of another rank.
        self.gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            if self.gpu is not None:
                torch.cuda.set_device(self.gpu)
            self.work()
        except BaseException as error:
            self.inbox.put(error)

    def take(self) -> object:
        """The next item for the main thread; raises what the helper raised."""
        return self._checked(self.inbox.get())

    def poll(self, seconds: float) -> object:
        """As ``take``, but None when nothing comes within ``seconds``."""
        try:
            return self._checked(self.inbox.get(timeout=seconds))
        except queue.Empty:
            return None

    @staticmethod
    def _checked(item: object) -> object:
        if isinstance(item, BaseException):
            raise item
        return item


def recorded(buffer: Tensor) -> torch.cuda.Event | None:
    """An event behind all work queued so far on the buffer's GPU; ``None`` on the CPU."""
    if not buffer.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(buffer.device))
    return event


def to_host(values: Tensor) -> Callable[[], list[float]]:
    """Begin to copy ``values [n]``; what is returned waits until they are there."""
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    there.copy_(values, non_blocking=True)
    copied = recorded(values)

    def read() -> list[float]:
        if copied is not None:
            copied.synchronize()
        numbers: list[float] = there.tolist()
        return numbers

    return read


def await_key(store: dist.Store, key: str, timeout: timedelta, missing: str) -> None:
    """Wait for ``key``; raises ``StreamError(missing)`` when it does not come in time."""
    try:
        store.wait([key], timeout)
    except dist.DistStoreError:
        raise StreamError(
            f"{missing} did not come within {timeout.total_seconds():g} s (wire.timeout_s)"
        ) from None


@dataclass(frozen=True)
class Outgoing:
    """A filled slot on its way; ``finite`` (one bool) and ``problem`` say if it is to go."""

    slot: Tensor
    frame: Frame
    filled: torch.cuda.Event | None
    finite: Callable[[], list[float]] | None
    problem: str

    def unusable(self) -> str:
        """Why the frame must not be trained on; waits until the slot is filled."""
        if self.filled is not None:
            self.filled.synchronize()
        if self.problem or self.finite is None or self.finite()[0]:
            return self.problem
        return "hidden states of the target that are not finite"


class Sender:
    """The target's end: claims frames, lends slots to the forward, sends them in the background."""

    def __init__(
        self,
        cast: Cast,
        plan: Plan,
        layout: Layout,
        slots: int,
        edges: dict[int, Edge],
        timeout: timedelta,
    ) -> None:
        self.place, self.plan, self.layout, self.credit = cast.place, plan, layout, slots
        self.edges, self.timeout, self.device = edges, timeout, cast.device
        self.clock = Clock()
        self._claims = cast.store
        self._store = cast.client()
        self._outbox: queue.Queue[Outgoing | None] = queue.Queue()
        self._free: queue.Queue = queue.Queue()
        for _ in range(SENDER_SLOTS):
            self._free.put(layout.allocate(cast.device))
        self._helper = Helper("sender", self._send_all, self._free)

    def claims(self) -> Iterator[Frame]:
        """The frames that fall to this target, PAD left out, until the plan is used up."""
        while True:
            # A frame is claimed when it can be made at once: who waits for a slot owes nothing.
            with self.clock.waiting("send_wait", self.device, works="forward"):
                slot = self._helper.take()
            assert isinstance(slot, Tensor)
            frame = self._claim()
            if frame is None:
                self._free.put(slot)
                return
            self._slot = slot
            yield frame

    def _claim(self) -> Frame | None:
        node = self.place.node
        while True:
            count = self._claims.add(f"claim/{node}", 1) - 1
            frame = self.plan.claim(count, node, self.place.drafters_per_node)
            if frame is None:
                return None
            if frame.kind is not Kind.PAD:
                self._claims.set(f"own/{frame.drafter}/{frame.k}", str(self.place.rank))
                return frame

    def slot(self) -> Tensor:
        """The slot (``[nbytes]`` uint8) for the frame that ``claims`` has given last."""
        return self._slot

    def submit(
        self, slot: Tensor, frame: Frame, finite: Tensor | None = None, problem: str = ""
    ) -> None:
        """Hand a filled slot over; the caller must not touch it any more.

        Args:
            slot: from ``slot``.
            frame: what it holds.
            finite: scalar bool on the slot's device; False makes the frame SKIP.
            problem: why the frame could not be made; makes it SKIP.
        """
        # Read on the GPU by the sender thread, it would wait for the next forward as well.
        flag = None if finite is None else to_host(finite.reshape(1))
        self._outbox.put(Outgoing(slot, frame, recorded(slot), flag, problem))

    def finish(self) -> None:
        """Wait until everything submitted has been sent."""
        self._outbox.put(None)
        for _ in range(SENDER_SLOTS):
            self._helper.take()
        self._helper.thread.join()

    def _send_all(self) -> None:
        while (item := self._outbox.get()) is not None:
            slot, frame = item.slot, item.frame
            # Announced before it is filled, the drafter's receive would spin through the forward.
            problem = item.unusable()
            with self.clock.span("credit_wait"):
                self._await_credit(frame)
            announcement = self._header(frame, slot, problem).pack()
            # torch's stubs know only text; the store takes bytes.
            self._store.set(f"ann/{frame.drafter}/{frame.k}", announcement)  # type: ignore[arg-type]
            if problem:
                warn_once(log, f"micro-batch {frame.number} is not sent: {problem}", UNSENT_ADVICE)
                # Rows that the next frame leaves as they are must not hold what is not finite.
                slot.zero_()
            else:
                with self.clock.span("send"):
                    self.edges[frame.drafter].put(slot)
            self._free.put(slot)

    def _header(self, frame: Frame, slot: Tensor, problem: str) -> Header:
        return Header(
            source=self.place.role_rank,
            drafter=frame.drafter,
            k=frame.k,
            kind=Kind.SKIP.value if problem else frame.kind.value,
            number=frame.number,
            nbytes=0 if problem else slot.numel(),
            checksum=0 if problem else self.edges[frame.drafter].checksum(slot),
        )

    def _await_credit(self, frame: Frame) -> None:
        earlier = frame.k - self.credit
        if earlier < 0:
            return
        key = f"free/{frame.drafter}/{earlier}"
        await_key(
            self._store,
            key,
            self.timeout,
            f"{self.place.name}: credit of drafter{frame.drafter} for frame {frame.k}",
        )
        self._store.delete_key(key)
