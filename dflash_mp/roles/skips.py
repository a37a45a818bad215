"""Micro-batches that cannot be used: kept out of the gradients, counted and named.

Whether a loss is finite is known on the device. The device itself keeps the gradient out, and the
host hears of it a step later: if it waited for the answer, the device would have nothing to do.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dflash_mp.warn_once import warn_once
from dflash_mp.wire.plan import Frame, Kind
from dflash_mp.wire.stream import to_host

log = logging.getLogger(__name__)

SKIP_ADVICE = "train/skipped counts them: if it grows, lower optim.lr, or see why its target failed"


class Gate:
    """Lets the gradients of a backward pass, or zeros instead of them.

    Parameters ask it as soon as they get a gradient: before that is added to those of other
    micro-batches, and before DDP sends it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self._usable: Tensor | None = None
        self._zero = torch.zeros((), device=device)
        for parameter in parameters:
            parameter.register_hook(self._through)

    @contextmanager
    def open_if(self, usable: Tensor) -> Iterator[None]:
        """For one backward; ``usable`` is a bool on the device.

        Outside it lets everything pass: ``drafter.slices`` takes gradients in the forward, before
        the loss is known.
        """
        self._usable = usable
        try:
            yield
        finally:
            self._usable = None

    def _through(self, gradient: Tensor) -> Tensor | None:
        if self._usable is None:
            return None
        # Not a product with zero: that leaves NaN what is NaN.
        return torch.where(self._usable, gradient, self._zero)


class SkippedTooMany(Exception):
    """So many micro-batches in a row were unusable that there is something wrong with all."""


class Skips:
    """Counts the micro-batches in a row that this drafter has left out, a step late."""

    def __init__(self, limit: int) -> None:
        self.limit, self.run = limit, 0
        self._unread: Callable[[], list[tuple[Frame, float]]] | None = None

    def tell(self, frames: list[Frame], losses: Tensor) -> None:
        """Take a step's micro-batches and their losses, and look at those of the step before.

        Args:
            frames: of this step, in order.
            losses: ``[len(frames)]``, may still be in the making.

        Raises:
            SkippedTooMany: as ``settle``.
        """
        # Begun before the wait, which then is for a step that has another one behind it.
        values = to_host(losses)
        self.settle()
        self._unread = lambda: list(zip(frames, values(), strict=True))

    def settle(self) -> None:
        """Look at what was told last; waits for the device.

        Raises:
            SkippedTooMany: ``limit`` micro-batches in a row were left out.
        """
        told, self._unread = self._unread, None
        for frame, loss in told() if told is not None else []:
            if frame.kind is not Kind.PAD:
                self.note(frame.number, unusable(frame, loss))

    def note(self, number: int, reason: str) -> None:
        """Micro-batch ``number`` is left out because of ``reason``, or it is not: then it is empty.

        Raises:
            SkippedTooMany: it is the last one of ``limit`` in a row.
        """
        self.run = self.run + 1 if reason else 0
        if not reason:
            return
        warn_once(log, f"micro-batch {number} is skipped: {reason}", SKIP_ADVICE)
        if self.run >= self.limit:
            raise SkippedTooMany(
                f"{self.run} micro-batches in a row were skipped (failure.max_skips), the last "
                f"one, {number}, because {reason}"
            )


def unusable(frame: Frame, loss: float) -> str:
    """Why a micro-batch is left out; empty when it is not."""
    if frame.kind is Kind.SKIP:
        return "its target could not make its features"
    return "" if math.isfinite(loss) else f"its loss is {loss}"
