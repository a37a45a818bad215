"""An edge through shared memory: a target copies a frame to where its drafter wants it.

A drafter's slots lie in one memory file without a name (``memfd``), which its targets map as well.
So nothing appears in /dev/shm, its size limits nothing, and the memory goes with the last process
that holds it, however that process ends. The two ends of an edge talk over a Unix socket:

1. The drafter offers a slot: where it begins, and its size.
2. The target copies the frame into it, and answers.

Invariants:

- A slot has one writer at a time: the target that holds its offer, from the offer to the answer.
  At any other time it is the drafter's. A target writes nothing that it was not offered.
- An edge has at most one offer under way, so neither end ever queues anything: memory is the
  drafter's W slots, all of them reserved before the first frame, and nothing for each target.
- What was written before the answer is seen behind it: both pass through the kernel's locks.
- Every wait ends: with the message, with the other end's socket, which the kernel closes when its
  process dies, or after ``timeout``. None of them spins.
"""

import mmap
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_mp.wire.edge import DRAFTER_END, TARGET_END, Edge
from dflash_mp.wire.frame import FrameError

OFFER = struct.Struct("<2q")
"""First byte and number of bytes."""
FILLED = b"!"
PEER = struct.Struct("3i")
"""What the kernel says of a socket's other end: process, user, group."""
ADDRESS = "address"
CLOSED = "the other end is closed"


class EdgeError(RuntimeError):
    """The other end of an edge is gone or does not answer."""

    consequence = True
    """Something else has failed before, probably."""


class SharedMemory:
    """``nbytes`` of memory that other processes can map, zeroed and reserved.

    Raises:
        OSError: there is not as much. Later it would be a SIGBUS.
    """

    def __init__(self, nbytes: int) -> None:
        self.file = os.fdopen(os.memfd_create("dflash_mp"), "r+b", buffering=0)
        try:
            os.posix_fallocate(self.file.fileno(), 0, nbytes)
        except OSError:
            self.file.close()
            raise
        self.bytes = mapped(self.file.fileno(), nbytes)


def mapped(file: int, nbytes: int) -> Tensor:
    """The memory behind a descriptor as ``[nbytes]`` uint8; the tensor keeps it mapped."""
    # Populated at once: no page fault falls into a transfer.
    memory = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class SharedEdge(Edge):
    """One end of an edge through shared memory, on the CPU.

    Args:
        name: of the edge, for errors.
        store: of this edge alone.
        memory: the drafter's slots; ``None`` makes this the target's end.
        timeout: of connecting and of each operation.
    """

    kind = "shm"

    def __init__(
        self, name: str, store: dist.Store, memory: SharedMemory | None, timeout: timedelta
    ) -> None:
        self.name, self.memory = name, memory
        self.end = TARGET_END if memory is None else DRAFTER_END
        self.timeout = timeout.total_seconds()
        # Messages keep their bounds.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(self.timeout)
        if memory is None:
            store.wait([ADDRESS], timeout)
            self._address = store.get(ADDRESS)
        else:
            # Without a name the kernel finds one outside of the file system.
            self._socket.bind("")
            self._socket.listen(1)
            store.set(ADDRESS, self._socket.getsockname())

    def warm(self) -> None:
        """See ``Edge``; the drafter passes its memory on."""
        with self._named_errors():
            if self.memory is None:
                self._bytes = self._take_memory()
                return
            listener, self._socket = self._socket, self._accept()
            listener.close()
            self._bytes = self.memory.bytes
            message = OFFER.pack(0, self._bytes.numel())
            socket.send_fds(self._socket, [message], [self.memory.file.fileno()])

    def _take_memory(self) -> Tensor:
        self._socket.connect(self._address)
        message, files, *_ = socket.recv_fds(self._socket, OFFER.size, 1)
        if not files:
            raise ConnectionError(CLOSED)
        try:
            return mapped(files[0], OFFER.unpack(message)[1])
        finally:
            os.close(files[0])

    def _accept(self) -> socket.socket:
        while True:
            connection = self._socket.accept()[0]
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
            if PEER.unpack(found)[1] == os.getuid():
                connection.settimeout(self.timeout)
                return connection
            # Anybody on the machine can find the address; what is in the memory is the user's.
            connection.close()

    def buffers(self, nbytes: int, count: int) -> list[Tensor]:
        """See ``Edge``; the drafter's are the first bytes of its memory, whatever is in them."""
        if self.memory is None:
            return super().buffers(nbytes, count)
        return list(self.memory.bytes[: count * nbytes].view(count, nbytes))

    def put(self, payload: Tensor) -> None:
        """See ``Edge``; one copy.

        Raises:
            FrameError: the drafter wants a frame of another size.
            EdgeError: it is gone.
        """
        start, nbytes = OFFER.unpack(self._hear())
        if nbytes != payload.numel():
            raise FrameError(
                f"{self.name}: a frame has {payload.numel()} bytes, but the drafter wants {nbytes}"
            )
        self._bytes[start : start + nbytes].copy_(payload)
        self._say(FILLED)

    def land(self, payload: Tensor) -> None:
        """See ``Edge``; raises ``EdgeError`` when the target is gone."""
        start = payload.data_ptr() - self._bytes.data_ptr()
        if not 0 <= start <= self._bytes.numel() - payload.numel():
            raise ValueError(f"{self.name}: not a buffer of this edge")
        self._say(OFFER.pack(start, payload.numel()))
        self._hear()

    def _say(self, message: bytes) -> None:
        with self._named_errors():
            self._socket.send(message)

    def _hear(self) -> bytes:
        with self._named_errors():
            if message := self._socket.recv(OFFER.size):
                return message
            raise ConnectionError(CLOSED)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise EdgeError(f"{self.name}: no answer within {self.timeout:g} s") from None
        except OSError as error:
            raise EdgeError(f"{self.name}: {error}") from None

    def close(self) -> None:
        """See ``Edge``; the memory stays for whoever still looks at a slot."""
        self._socket.close()
        if self.memory is not None:
            self.memory.file.close()
