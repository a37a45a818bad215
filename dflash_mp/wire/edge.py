"""One edge: the way of whole frames from one target to one drafter of the same node.

Both ends call an edge only after the frame was announced through the store: an operation on it is
short, and a short timeout means something.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_mp.wire.frame import zeroed

TARGET_END = 0
DRAFTER_END = 1


class Edge(ABC):
    """One end of an edge. Only one thread of a process may use it after ``warm``."""

    kind: str
    """What carries the bytes, as ``wire.edge`` names it."""

    device = torch.device("cpu")
    stream: torch.cuda.Stream | None = None
    """Where transfers and checksums of a GPU are queued."""

    @abstractmethod
    def warm(self) -> None:
        """Connect with the other end, before the first frame.

        Blocks until the other end does the same: all ranks must warm their edges in one global
        order (pairs sorted by target, then drafter), or they wait in a circle.
        """

    def buffers(self, nbytes: int, count: int) -> list[Tensor]:
        """``count`` buffers (``[nbytes]`` uint8) to ``land`` in; each call may give the same."""
        return [zeroed(nbytes, self.device) for _ in range(count)]

    @abstractmethod
    def put(self, payload: Tensor) -> None:
        """Send ``payload`` (uint8) and return when its buffer may be written again."""

    @abstractmethod
    def land(self, payload: Tensor) -> None:
        """Receive into ``payload`` (uint8, of ``buffers``) and return when it is complete."""

    def checksum(self, payload: Tensor) -> int:
        """Sum of the 64-bit words of ``payload`` (uint8), modulo 2**64."""
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            return int(payload.view(torch.int64).sum())

    @abstractmethod
    def close(self) -> None:
        """Give the connections back; no operation may be under way."""


class GroupEdge(Edge):
    """A process group of two: gloo between CPUs, NCCL between GPUs.

    The group is built from the public backend classes and is registered nowhere, so it neither
    belongs to nor dies with a role's default group.

    Args:
        end: ``TARGET_END`` or ``DRAFTER_END``.
        store: of this edge alone.
        device: where frames are.
        timeout: of connecting and of each operation.
    """

    def __init__(
        self, end: int, store: dist.Store, device: torch.device, timeout: timedelta
    ) -> None:
        self.other = 1 - end
        self.end = end
        self.device = device
        # torch's stubs know no send and recv of its backend classes.
        self.group: Any
        # Participants: this target and this drafter.
        if device.type == "cuda":
            self.kind = "nccl"
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            # A frame takes milliseconds; a few channels are enough and leave the GPU to compute.
            options.config.max_ctas = 4
            self.group = dist.ProcessGroupNCCL(store, end, 2, options)
            self.group.set_timeout(timeout)
            self.stream = torch.cuda.Stream(device, priority=-1)
        else:
            self.kind = "gloo"
            self.group = dist.ProcessGroupGloo(store, end, 2, timeout)

    def warm(self) -> None:
        """Exchange one byte."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        if self.end == TARGET_END:
            self.put(byte)
        else:
            self.land(byte)

    def put(self, payload: Tensor) -> None:
        """See ``Edge``."""
        self._run(self.group.send, payload)

    def land(self, payload: Tensor) -> None:
        """See ``Edge``; any buffer of the device will do."""
        self._run(self.group.recv, payload)

    def _run(self, operation: Callable[..., dist.Work], payload: Tensor) -> None:
        if self.stream is None:
            operation([payload], self.other, 0).wait()
            return
        with torch.cuda.stream(self.stream):
            operation([payload], self.other, 0).wait()
        # wait() only orders streams; the caller is a helper thread and may block until the
        # transfer is really over.
        self.stream.synchronize()

    def close(self) -> None:
        """See ``Edge``."""
        self.group.shutdown()
