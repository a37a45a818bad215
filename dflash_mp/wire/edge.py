"""One edge: a process group of two, one target and one drafter, that carries whole frames.

The group is built from the public backend classes and is registered nowhere, so it neither
belongs to nor dies with a role's default group. Both ends call an edge only after the frame was
announced through the store: an operation on it is short, and a short timeout means something.
"""

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TARGET_END = 0
DRAFTER_END = 1


class Edge:
    """One end of the edge between target ``target`` and drafter ``drafter`` (role ranks).

    Only one thread of a process may use an edge after ``warm``.
    """

    def __init__(
        self,
        target: int,
        drafter: int,
        end: int,
        store: dist.Store,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        # Participants: this target and this drafter.
        prefix = dist.PrefixStore(f"edge/{target}-{drafter}", store)
        self.other = 1 - end
        self.end = end
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        # torch's stubs know no send and recv of its backend classes.
        self.group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            # A frame takes milliseconds; a few channels are enough and leave the GPU to compute.
            options.config.max_ctas = 4
            self.group = dist.ProcessGroupNCCL(prefix, end, 2, options)
            self.group.set_timeout(timeout)
            self.stream = torch.cuda.Stream(device, priority=-1)
        else:
            self.group = dist.ProcessGroupGloo(prefix, end, 2, timeout)

    def warm(self) -> None:
        """Exchange one byte, so that connections exist before the first frame.

        Blocks until the other end does the same: all ranks must warm their edges in one global
        order (``Edge`` pairs sorted by target, then drafter), or they wait in a circle.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        if self.end == TARGET_END:
            self.put(byte)
        else:
            self.land(byte)

    def put(self, payload: Tensor) -> None:
        """Send ``payload`` (uint8) and return when its buffer may be written again."""
        self._run(self.group.send, payload)

    def land(self, payload: Tensor) -> None:
        """Receive into ``payload`` (uint8) and return when it is complete."""
        self._run(self.group.recv, payload)

    def checksum(self, payload: Tensor) -> int:
        """Sum of the 64-bit words of ``payload`` (uint8), modulo 2**64."""
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            return int(payload.view(torch.int64).sum())

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
        """Give the connections back; no operation may be under way."""
        self.group.shutdown()
