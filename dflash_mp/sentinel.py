"""Every rank's sentinel: notices what goes wrong anywhere, and ends the job with one cause.

- The first verdict in the store counts; every other rank leaves because of it.
- Each rank says in which phase it is and how long that may take. Over time it accuses itself; if
  it cannot (stopped, interpreter stuck), its ring neighbour or a timer in C does.
- A phase that ends only by what others do *waits*: if all ranks wait for too long, the job is
  stuck, and the rank that owes the oldest frame is named.
- A process of this node that is gone without a goodbye is the culprit.
- An error of communication is a consequence until nothing better has been said for a while.

Two threads, which call no model: one waits for the verdict, one looks around ten times a second.
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from json import dumps

import torch.distributed as dist

from dflash_mp.cast import Place, connection
from dflash_mp.config import FailureConfig, UserError
from dflash_mp.judge import Silence, dead_peer, is_communication, no_progress, silent_neighbour
from dflash_mp.peers import Beat, Hello, Peers, read_beat
from dflash_mp.stop_signals import StopSignals
from dflash_mp.verdict import (
    CAUSE,
    CONSEQUENCE,
    MISTAKE,
    SILENT_END,
    STOP,
    STOPPED,
    USER_ERROR,
    Verdict,
    end,
    remove_report,
    say,
    write_report,
)

log = logging.getLogger(__name__)

TICK_S = 0.1
FOREVER = timedelta(days=20)
"""More milliseconds would not fit into the store's counter."""
LAUNCHER_FIRST_S = 0.5
"""A launcher knows better why its child is gone: it may speak first."""
UNLIMITED = float("inf")
"""For work whose length is the user's choice."""
POLITE_S = 5.0
"""How long an error of communication waits for a better explanation."""
HOLD_S = 8.0
"""How long a rank that only follows stays, so that its launcher sees the culprit first."""
HOLD_OTHER_NODE_S = 1.0


@dataclass(frozen=True)
class Phase:
    """What the main thread does, since when, and for how long it may."""

    name: str
    limit: float
    waits: bool
    since: float
    count: int
    frame: str | None = None

    @property
    def over(self) -> bool:
        """Whether it has taken too long."""
        return time.monotonic() - self.since > self.limit


class Sentinel:
    """One rank's watch over itself and the others, from ``guard`` to ``bye``.

    ``store`` is the main thread's; the sentinel's threads have connections of their own.
    """

    def __init__(self, place: Place, store: dist.Store, limits: FailureConfig) -> None:
        self.place, self.limits = place, limits
        self.hello = Hello.mine(place, limits.gil_s / 2)
        self.stop_reason: str | None = None
        """Set when the job was asked to stop: save, then call ``stopped``."""
        self.on_phase: Callable[[str], None] | None = None
        """Also told each phase, in the main thread."""
        self._phase = Phase("start", limits.setup_s, False, time.monotonic(), 0)
        self._store = store
        self._verdicts = connection(store)
        self._peers = Peers(connection(store), place, self.hello)
        self._main = threading.main_thread().ident or 0
        self._launcher = os.getppid()
        self._closed = threading.Event()
        self._hurry = threading.Event()
        self._leaving = threading.Lock()
        self._said = threading.Event()
        self._silence = Silence()
        self._stop_deadline = 0.0
        self._signals = StopSignals()
        self._foretell()
        listener, self._watcher = (
            threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
            for name, work in (("verdict", self._await_verdict), ("watch", self._watch))
        )
        listener.start()
        self._watcher.start()

    # What the main thread says.

    @property
    def done(self) -> bool:
        """Whether this rank has said goodbye."""
        return self._closed.is_set()

    def phase(self, name: str, limit: float | None = None) -> None:
        """The main thread now does ``name``; over ``limit`` seconds are a failure of this rank."""
        self._enter(name, self.limits.step_s if limit is None else limit, False, None)

    def wait(self, name: str, limit: float | None = None, frame: str | None = None) -> None:
        """The main thread now waits for others; ``frame`` is the ``drafter/k`` it waits for."""
        self._enter(f"wait for {name}", limit or self.limits.wait_s, True, frame)

    def _enter(self, name: str, limit: float, waits: bool, frame: str | None) -> None:
        count = self._phase.count + 1
        self._phase = Phase(name, limit, waits, time.monotonic(), count, frame)
        if self.on_phase is not None:
            self.on_phase(name)

    def training(self, runs: bool) -> None:
        """Whether there is something to save when the job is asked to stop; one rank says it."""
        self._store.set("training", "yes" if runs else "no")

    def stopped(self, what: str) -> None:
        """End the job as it was asked to; does not return."""
        reason = f"{self.stop_reason}: {what}"
        self._speak(self._about_me(STOP, reason))

    def rest(self) -> None:
        """Wait for a verdict that is to come; does not return."""
        self._hurry.wait()
        end(STOPPED)

    def bye(self) -> None:
        """This rank has done its part; waits for all others, then stops watching."""
        self.wait("the other ranks")
        self._store.set(f"bye/{self.place.rank}", "")
        ranks = range(self.place.world_size)
        self._store.wait([f"bye/{rank}" for rank in ranks], FOREVER)
        self._closed.set()
        # From here on only this: an end that does not come shows where it hangs.
        faulthandler.dump_traceback_later(self.limits.gil_s, exit=True)
        # Were it inside a call of the store when the interpreter ends, coming back would abort the
        # process. The listener's call does not come back.
        self._watcher.join()
        self._signals.restore()
        remove_report(self.hello.report)

    def failed(self, error: BaseException) -> None:
        """The main thread has raised; does not return."""
        if isinstance(error, UserError):
            if str(error):
                self._speak(self._about_me(MISTAKE, str(error)))
            # Rank 0 has spoken for all: its verdict takes this rank away.
            self._hold(HOLD_S)
            end(USER_ERROR)
        stack = "".join(traceback.format_exception(error))
        if is_communication(error):
            # The listener ends the process when somebody knows better.
            self._hurry.wait(POLITE_S)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if isinstance(error, SystemExit):
            reason = f"left with exit code {error.code} before its part was done"
        self._speak(self.hello.accused(self._phase.name, reason, stack))

    def _about_me(self, kind: str, reason: str) -> Verdict:
        mine = asdict(self.hello.accused(self._phase.name, reason))
        return Verdict(**mine | {"kind": kind})

    # The verdict, and leaving because of it.

    def _speak(self, verdict: Verdict, kill: bool = False) -> None:
        """Put ``verdict`` first, or follow the one that is; does not return.

        With ``kill`` the process that it is about, on this node, ends at once: a stopped one does
        not hear its launcher's SIGTERM, which would then wait for half a minute.
        """
        mine = replace(verdict, by=self.place.name)
        try:
            first = Verdict.unpack(self._peers.store.compare_set("verdict", "", mine.pack()))
        except Exception:
            # The store is gone, and with it the launcher. This rank still says what it knows.
            first = mine
        if first == mine:
            say(mine.text)
        if kill:
            os.kill(verdict.pid, signal.SIGKILL)
        self._said.set()
        self._leave(first, spoke=first == mine)

    def _leave(self, verdict: Verdict, spoke: bool) -> None:
        """End this process because of ``verdict``; only the first caller does, others wait."""
        if not spoke and verdict.by == self.place.name:
            # Seen in the store before the thread that put it there has printed it.
            self._said.wait(LAUNCHER_FIRST_S)
        with self._leaving:
            faulthandler.cancel_dump_traceback_later()
            about_me = verdict.rank == self.place.rank
            if verdict.kind == STOP:
                write_report(self.hello.report, verdict.text)
                end(STOPPED)
            if about_me:
                write_report(self.hello.report, verdict.text)
                end(verdict.code)
            remove_report(self.hello.report)
            if verdict.kind != MISTAKE and not spoke:
                log.info("leaving because of rank %d (%s)", verdict.rank, verdict.name)
            same_node = verdict.node == self.place.node
            hold = HOLD_S if same_node and not spoke else HOLD_OTHER_NODE_S
            if not self._hold(hold):
                # Nobody on this node has shown its launcher what happened.
                write_report(self.hello.report, verdict.text)
            code = USER_ERROR if verdict.kind == MISTAKE else CAUSE if spoke else CONSEQUENCE
            end(code)

    def _hold(self, seconds: float) -> bool:
        """Stay for ``seconds``, or until the launcher wants this process to end (True)."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            # The thread that reads the signals may be the one that is here.
            if self._signals.received():
                self._hurry.set()
            if self._hurry.wait(TICK_S):
                return True
        return False

    def _await_verdict(self) -> None:
        while not self._closed.is_set():
            try:
                self._verdicts.wait(["verdict"], FOREVER)
            except dist.DistStoreError:
                # A run of weeks.
                continue
            break
        self._leave(Verdict.unpack(self._verdicts.get("verdict")), spoke=False)

    # The threads.

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            if self._closed.is_set():
                return
            if isinstance(error, dist.DistNetworkError) or os.getppid() != self._launcher:
                self._launcher_gone(f"its store does not answer ({error})".splitlines()[0])
            self.failed(error)

    def _launcher_gone(self, how: str) -> None:
        """Nobody is there to report to; one rank of the node says so."""
        with self._leaving:
            if self._closed.is_set():
                return
            if os.environ.get("LOCAL_RANK", "0") == "0":
                reason = f"the launcher (pid {self._launcher}) is gone: {how}"
                say(self.hello.accused(self._phase.name, reason).text)
            end(CONSEQUENCE)

    def _watch(self) -> None:
        """Look around; whatever is wrong ends the process inside."""
        next_beat, number, last, signalled = 0.0, 0, time.monotonic(), 0
        while not self._closed.wait(TICK_S):
            now = time.monotonic()
            if now - last > self.limits.silent_s / 4:
                # This process was stopped itself, perhaps the whole job: nobody is to blame.
                self._silence = Silence()
            last = now
            if os.getppid() != self._launcher:
                self._launcher_gone("this process has another parent now")
            for number_of_signal in self._signals.received():
                # SIGUSR1 may come from a launcher that passes on what this rank has had itself.
                signalled += number_of_signal != signal.SIGUSR1
                self._asked_to_stop(signal.Signals(number_of_signal).name, signalled)
            if self._leaving.locked():
                continue
            self._check_self()
            self._check_processes()
            if now >= next_beat:
                next_beat = now + self.limits.beat_s
                number += 1
                self._beat(number)
                self._peers.refresh()
                self._check_neighbour()
                if self.place.rank == 0:
                    self._check_progress()
                self._check_stop()

    def _check_stop(self) -> None:
        if self.stop_reason is None and self._peers.store.check(["stop"]):
            self._stop_deadline = time.monotonic() + self.limits.stop_s
            self.stop_reason = self._peers.store.get("stop").decode()
        if self.stop_reason is not None and time.monotonic() > self._stop_deadline:
            self.stopped(
                f"no step ended and was saved within {self.limits.stop_s:g} s (failure.stop_s); "
                "the checkpoint before is valid"
            )

    def _beat(self, number: int) -> None:
        phase = self._phase
        beat = Beat(
            number, time.time(), phase.name, phase.count, phase.waits, phase.over, phase.frame
        )
        self._peers.store.set(f"beat/{self.place.rank}", dumps(asdict(beat)))
        # A timer in C: it runs out when no Python thread of this process gets to run.
        faulthandler.dump_traceback_later(self.limits.gil_s, exit=True)
        # Another thread that leaves now has taken the report away, and it must not come back.
        if self._leaving.acquire(blocking=False):
            try:
                self._foretell()
            finally:
                self._leaving.release()

    def _foretell(self) -> None:
        """Leave what torchrun prints should this process end without a word."""
        write_report(self.hello.report, self.hello.accused(self._phase.name, SILENT_END).text)

    def _check_self(self) -> None:
        phase = self._phase
        if phase.over and not phase.waits:
            stack = "".join(traceback.format_stack(sys._current_frames()[self._main]))
            reason = f"no progress for {phase.limit:g} s; the main thread stands where shown above"
            self._speak(self.hello.accused(phase.name, reason, stack))

    def _check_processes(self) -> None:
        if not self._peers.dead():
            return
        # The launcher knows more: how it ended, and whether the job can do without it.
        self._hold(LAUNCHER_FIRST_S)
        dead = self._peers.dead()
        # Whoever left because of a verdict is no culprit; the listener follows it.
        if dead and not self._peers.store.check(["verdict"]):
            self._speak(dead_peer(self._peers.store, dead[0]))

    def _check_neighbour(self) -> None:
        beat = read_beat(self._peers.store, self._peers.next)
        silent = self._silence.of(beat.number) if beat is not None else 0.0
        if beat is not None and silent > self.limits.gil_s / 2:
            verdict = silent_neighbour(self._peers, beat, silent, self.limits)
            if verdict is not None:
                self._speak(verdict, kill=verdict.node == self.place.node)

    def _check_progress(self) -> None:
        verdict = no_progress(self._peers, self.place.world_size)
        if verdict is not None:
            self._speak(verdict)

    def _asked_to_stop(self, name: str, times: int) -> None:
        if self._leaving.locked():
            self._hurry.set()
            return
        if self._peers.store.check(["verdict"]):
            # A launcher that clears up after the verdict.
            self._hurry.set()
            self._leave(Verdict.unpack(self._peers.store.get("verdict")), spoke=False)
        self._peers.refresh()
        for peer in self._peers.dead():
            # A launcher that clears up after that.
            self._hurry.set()
            self._speak(dead_peer(self._peers.store, peer))
        store = self._peers.store
        trains = store.check(["training"]) and store.get("training") == b"yes"
        name = store.compare_set("stop", "", name).decode()
        if times > 1 or not trains:
            self.stop_reason = name
            self.stopped("at once" if times > 1 else "nothing to save")


@contextmanager
def guard(place: Place, store: dist.Store, limits: FailureConfig) -> Iterator[Sentinel]:
    """Watch over the job while the body runs; only a body that calls ``bye`` ends well.

    An exception in the body does not come out of here: the process ends with the job's verdict.
    """
    faulthandler.enable()
    sentinel = Sentinel(place, store, limits)
    try:
        yield sentinel
    except BaseException as error:
        if sentinel.done:
            raise
        sentinel.failed(error)
