"""An edge between two threads: the payload is copied from one's buffer into the other's."""

import queue
from datetime import timedelta

from torch import Tensor

from dflash_mp.wire.edge import Edge


class ThreadEdge(Edge):
    """Both ends of the edge between a target's and a drafter's thread, on the CPU.

    ``put`` returns when ``land`` has copied, so the sender's buffer is free as behind gloo's send.
    """

    kind = "threads"

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout.total_seconds()
        self._offered: queue.Queue[Tensor] = queue.Queue()
        self._taken: queue.Queue[None] = queue.Queue()

    def warm(self) -> None:
        """Nothing to connect."""

    def put(self, payload: Tensor) -> None:
        """Offer ``payload`` and wait until it is copied; raises ``queue.Empty`` after a while."""
        self._offered.put(payload)
        self._taken.get(timeout=self.timeout)

    def land(self, payload: Tensor) -> None:
        """Copy what is offered into ``payload``; raises ``queue.Empty`` after a while."""
        payload.copy_(self._offered.get(timeout=self.timeout))
        self._taken.put(None)

    def close(self) -> None:
        """Nothing to give back."""
