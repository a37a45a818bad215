"""What ended a job: one verdict, its exit codes, and where launchers look for it."""

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

CAUSE = 1
"""Exit code of the rank that failed."""
USER_ERROR = 2
"""Exit code after a mistake of the user; one line says which."""
CONSEQUENCE = 13
"""Exit code of a rank that leaves because another one failed."""
STOPPED = 75
"""Exit code after a signal that asked to stop (EX_TEMPFAIL): start again with resume=auto."""

FAILURE, MISTAKE, STOP = "failure", "mistake", "stop"
SILENT_END = (
    "ended without a word: killed (perhaps by the system, for want of memory), crashed in native "
    "code, or left with os._exit"
)
STUCK = (
    "held the interpreter's lock: no other thread of it could run for failure.gil_s; the stacks of "
    "its threads are printed above"
)


@dataclass(frozen=True)
class Verdict:
    """Why a job ends. ``rank`` and the rest say who failed, ``by`` who noticed."""

    kind: str
    rank: int
    name: str
    host: str
    node: int
    pid: int
    phase: str
    reason: str
    traceback: str = ""
    by: str = ""

    @property
    def code(self) -> int:
        """Exit code of the rank that the verdict is about."""
        return {FAILURE: CAUSE, MISTAKE: USER_ERROR, STOP: STOPPED}[self.kind]

    @property
    def text(self) -> str:
        """For people: the traceback, if there is one, and the cause as the last line."""
        if self.kind == MISTAKE:
            return f"dflash_mp: {self.reason}\n"
        if self.kind == STOP:
            return f"dflash_mp: stopped: {self.reason}\n"
        return (
            f"{self.traceback.rstrip()}\n".lstrip("\n")
            + f"ROOT CAUSE: rank {self.rank} ({self.name}) on host {self.host} (node {self.node}, "
            f"pid {self.pid}), phase {self.phase}: {self.reason}\n"
        )

    def pack(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def unpack(data: bytes) -> "Verdict":
        """Undo ``pack``."""
        return Verdict(**json.loads(data))


def report_path() -> str | None:
    """Where torchrun looks for this rank's report."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE")


def write_report(path: str | None, text: str) -> None:
    """Leave ``text`` where torchrun prints it as a failed rank's traceback; atomic."""
    if not path:
        return
    last = text.strip().splitlines()[-1]
    # torchrun writes "traceback : " before it; the cause stands on a line of its own.
    extra = {"py_callstack": f"\n{text.strip()}", "timestamp": str(int(time.time()))}
    partial = Path(f"{path}.{os.getpid()}")
    partial.write_text(json.dumps({"message": {"message": last, "extraInfo": extra}}))
    partial.replace(path)


def remove_report(path: str | None) -> None:
    """Leave nothing for torchrun."""
    if path:
        Path(path).unlink(missing_ok=True)


def say(text: str) -> None:
    """Print to stderr without any lock that a stuck thread may hold."""
    # A progress line may be standing there.
    os.write(2, f"\n{text}".encode())


def end(code: int) -> None:
    """Leave the process now; nothing is torn down, other ranks may never answer."""

    def flush() -> None:
        sys.stdout.flush()
        sys.stderr.flush()

    # In a thread: whoever hangs may hold a stream's lock.
    flusher = threading.Thread(target=flush, daemon=True)
    flusher.start()
    flusher.join(0.5)
    os._exit(code)
