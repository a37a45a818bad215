"""Fault by fault: what a job says, and how long until nothing of it is left.

``python tests/faults/matrix.py [--light] [name ...]`` prints the table of all faults, roles and
launchers, on tiny trainings, or with ``--light`` on ranks that have a sentinel but no model.
"""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIMITS = {
    **{"beat_s": 0.5, "gil_s": 4, "silent_s": 6, "setup_s": 120, "step_s": 4},
    **{"save_s": 60, "wait_s": 5, "stop_s": 4},
}
CRASH_S = 5.0
MARK = "FAULT_MARK"
TARGET_RANK, DRAFTER_RANK = 1, 2
"""Of three ranks; rank 0, the other target, is the bystander."""

EXPECTED = {
    "raise": (CRASH_S, "ValueError: a fault of purpose"),
    "memory": (CRASH_S, "can't allocate memory"),
    "kill": (CRASH_S, "ended without a word|killed by SIGKILL"),
    "segfault": (CRASH_S, "ended without a word|ended by SIGSEGV"),
    "exit": (CRASH_S, "left with exit code 0 before its part was done"),
    "vanish": (CRASH_S, "ended without a word|left with exit code 0 and without a word"),
    "hang": (LIMITS["step_s"] + 3, "no progress for 4 s"),
    "stop": (LIMITS["silent_s"] + 3, "is stopped"),
    "gil": (LIMITS["gil_s"] + 3, "the interpreter's lock"),
    "lost": (LIMITS["wait_s"] + 3, "no rank makes progress"),
}
"""Seconds until all is over, and what the cause says."""

INTERRUPTS = {
    "ctrl-c": (signal.SIGINT, 1),
    "ctrl-c twice": (signal.SIGINT, 2),
    "sigterm": (signal.SIGTERM, 1),
    "launcher killed": (signal.SIGKILL, 1),
}


ROW = "{:<16} {:<9} {:<8} {:>6} {:>5}  {:<20} {}\n"


@dataclass(frozen=True)
class Case:
    """One run: ``rank`` commits ``fault``, or the launcher is interrupted; ``ranks`` a node."""

    fault: str
    launcher: str
    rank: int
    ranks: int = 3
    restarts: int = 0


@dataclass(frozen=True)
class Outcome:
    """What came of it; ``causes`` are all root causes that were printed, in order."""

    code: int
    seconds: float
    causes: list[str]
    last: str
    survivors: list[int]
    output: str

    @property
    def cause(self) -> str:
        """The last root cause printed."""
        return self.causes[-1] if self.causes else ""

    def matches(self, words: str) -> bool:
        """Whether the pattern occurs in what was printed."""
        return re.search(words, self.output) is not None


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def commands(case: Case, script: Path, overrides: list[str]) -> list[list[str]]:
    """The command of each launcher process."""
    launcher, ranks = case.launcher, str(case.ranks)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    if launcher == "spawn":
        start = [sys.executable, "-m", "launch.spawn", "--nproc", ranks, "--script", str(script)]
        return [[*start, *overrides]]
    if launcher == "torchrun":
        options = ["--standalone", "--max-restarts", str(case.restarts)]
        return [[*torchrun, *options, "--nproc_per_node", ranks, str(script), *overrides]]
    port = free_port()
    return [
        [
            *torchrun,
            *("--nnodes", "2", "--node_rank", str(node), "--nproc_per_node", ranks),
            *("--master_addr", "127.0.0.1", "--master_port", str(port), str(script), *overrides),
        ]
        for node in (0, 1)
    ]


def run(case: Case, script: Path, overrides: list[str], timeout: float = 120) -> list[Outcome]:
    """Run ``case`` and wait for its end; an outcome for each launcher process.

    Everything that is left of the job afterwards is killed.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            MARK: mark,
            "FAULT": case.fault,
            "FAULT_RANK": str(case.rank),
            "FAULT_TIME": f"{folder}/time",
            "FAULT_OUTPUT": f"{folder}/run",
            "LIMITS": json.dumps(LIMITS),
        }
        outputs = [Path(folder) / f"output-{i}" for i in range(2)]
        processes = []
        for output, command in zip(outputs, commands(case, script, overrides), strict=False):
            with output.open("w") as file:
                processes.append(
                    subprocess.Popen(
                        command,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,
                        cwd=ROOT,
                    )
                )
        try:
            if case.fault in INTERRUPTS:
                interrupt(case, processes[0], Path(folder) / "time", timeout)
            ends = [end_of(process, timeout) for process in processes]
            gone, survivors = wait_until_gone(mark)
        finally:
            kill_marked(mark)
        begun = Path(folder) / "time"
        since = float(begun.read_text()) if begun.exists() else float("nan")
        texts = [output.read_text() for output in outputs[: len(processes)]]
    return [
        outcome(process.returncode, max(end, gone) - since, text, survivors)
        for process, end, text in zip(processes, ends, texts, strict=True)
    ]


def interrupt(case: Case, process: subprocess.Popen, ready: Path, timeout: float) -> None:
    """Send the signals of ``case`` when the job says that it runs."""
    number, times = INTERRUPTS[case.fault]
    deadline = time.monotonic() + timeout
    while not ready.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    ready.write_text(str(time.time()))
    for _ in range(times):
        if number == signal.SIGINT:
            # As a terminal does: to everybody in the foreground.
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        time.sleep(0.5 if times > 1 else 0)


def end_of(process: subprocess.Popen, timeout: float) -> float:
    """When a launcher has ended."""
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return time.time()


def outcome(code: int, seconds: float, text: str, survivors: list[int]) -> Outcome:
    """Read what a launcher and its ranks have printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" \n=")]
    causes = [line for line in lines if line.startswith(("ROOT CAUSE: ", "dflash_mp: stopped"))]
    return Outcome(code, seconds, causes, lines[-1] if lines else "", survivors, text)


def marked(mark: str) -> list[int]:
    """Processes of the job."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes():
                state = (path.parent / "stat").read_text().rpartition(") ")[2][0]
                found += [int(path.parent.name)] if state != "Z" else []
        except OSError:
            continue
    return found


def wait_until_gone(mark: str, patience: float = 15.0) -> tuple[float, list[int]]:
    """When the last process was gone, and those that were not within ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return time.time(), left


def kill_marked(mark: str) -> None:
    """Clean up after a failed case."""
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)


def named(cause: str) -> str:
    """``rank 1 (target1)`` of a root cause."""
    found = re.search(r"rank \d+ \(\w+\)", cause)
    return found.group() if found else "-"


def problems(case: Case, result: Outcome, slack_s: float = 0.0) -> list[str]:
    """What is wrong with the outcome of a fault in a rank."""
    limit, words = EXPECTED[case.fault]
    wrong = []
    if result.code == 0:
        wrong.append("exit code 0")
    if result.survivors:
        wrong.append(f"{len(result.survivors)} processes left")
    if not re.search(words, result.cause):
        wrong.append("another cause")
    if f"rank {case.rank} (" not in result.cause:
        wrong.append("another rank")
    if len(set(result.causes)) > 1:
        wrong.append("several causes")
    if result.cause != result.last:
        wrong.append("not the last line")
    # Not a number when the fault was never committed.
    if not result.seconds <= limit + slack_s:
        wrong.append(f"slower than {limit:g} s")
    return wrong


def cases(names: list[str], launchers: list[str]) -> list[Case]:
    """All faults in both roles, then the interrupts."""
    roles = {"target": TARGET_RANK, "drafter": DRAFTER_RANK}
    found = [
        Case(fault, launcher, rank)
        for fault in EXPECTED
        for launcher in launchers
        for rank in roles.values()
        # Only a target sends.
        if fault != "lost" or rank == TARGET_RANK
    ]
    found += [Case(name, launcher, -1) for name in INTERRUPTS for launcher in launchers]
    return [case for case in found if not names or case.fault in names]


def main() -> None:
    """Print the table; exit code 1 when something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--light", action="store_true")
    parser.add_argument("--launcher", action="append", choices=["torchrun", "spawn"])
    parser.add_argument("faults", nargs="*")
    chosen = parser.parse_args()
    script = HERE / ("actor.py" if chosen.light else "training.py")
    wanted = cases(chosen.faults, chosen.launcher or ["torchrun", "spawn"])
    sys.stdout.write(ROW.format("fault", "launcher", "rank", "sec", "code", "named", "detected as"))
    with tempfile.TemporaryDirectory() as folder:
        if not chosen.light:
            tiny = [sys.executable, str(ROOT / "tests" / "tiny.py"), folder]
            subprocess.run(tiny, check=True, capture_output=True)
        os.environ["FAULT_FOLDER"] = folder
        failed = sum(show(case, script) for case in wanted)
    raise SystemExit(bool(failed))


def show(case: Case, script: Path) -> bool:
    """Run ``case`` and print its row; whether something is not as it should be."""
    (result,) = run(case, script, [])
    wrong = problems(case, result) if case.fault in EXPECTED else []
    if case.fault in INTERRUPTS and result.survivors:
        wrong.append(f"{len(result.survivors)} processes left")
    cause = result.cause.partition(", phase ")[2] or result.cause or result.last
    sys.stdout.write(
        ROW.format(
            case.fault,
            case.launcher,
            {TARGET_RANK: "target", DRAFTER_RANK: "drafter"}.get(case.rank, "-"),
            f"{result.seconds:.1f}",
            result.code,
            named(result.cause),
            f"{cause[:90]}{'  <- ' + ', '.join(wrong) if wrong else ''}",
        )
    )
    sys.stdout.flush()
    return bool(wrong)


if __name__ == "__main__":
    main()
