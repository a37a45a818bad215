"""Signals that ask a rank to stop, readable while its main thread is inside native code."""

import os
import signal

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """Has the signals ``ASKING`` arrive in a pipe, from its making to ``restore``.

    Python runs handlers in the main thread, and only between two of its instructions; the pipe is
    written at once and any thread may read it. Must be made in the main thread.
    """

    def __init__(self) -> None:
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in ASKING}

    def received(self) -> bytes:
        """Numbers of the signals that have come since the last call, one byte each."""
        try:
            return os.read(self._reading, 64)
        except BlockingIOError:
            return b""

    def restore(self) -> None:
        """Give the signals back to the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
