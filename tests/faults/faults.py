"""The ways in which a rank can fail."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path


def crash() -> None:
    """An exception."""
    raise ValueError("a fault of purpose")


def kill() -> None:
    """As the kernel's out-of-memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    """Native code reads a null pointer."""
    ctypes.string_at(0)


def leave() -> None:
    """Exit code 0 in the middle, through the interpreter."""
    sys.exit(0)


def vanish() -> None:
    """Exit code 0 in the middle, behind the interpreter's back."""
    os._exit(0)


def hang() -> None:
    """The main thread waits for nothing, inside a system call."""
    while True:
        time.sleep(3600)


def stop() -> None:
    """As a debugger or a batch system does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_gil() -> None:
    """Native code that never lets go of the interpreter's lock."""
    ctypes.PyDLL(None).sleep(3600)


def memory() -> None:
    """Ask for more memory than there is."""
    import torch

    torch.empty(1 << 50, dtype=torch.uint8).fill_(1)


def lost() -> None:
    """Nothing here: whoever sends forgets to."""


FAULTS = {
    "raise": crash,
    "kill": kill,
    "segfault": segfault,
    "exit": leave,
    "vanish": vanish,
    "hang": hang,
    "stop": stop,
    "gil": hold_gil,
    "memory": memory,
    "lost": lost,
}


def commit(fault: str) -> None:
    """Fail now, having left the time in the file ``$FAULT_TIME``."""
    Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
    FAULTS[fault]()
