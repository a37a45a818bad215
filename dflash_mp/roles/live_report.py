"""What people can look at while a run goes on: report.html, and the last walk for it."""

import json
import logging
import time
from pathlib import Path

from dflash_mp.metrics import BlockCounts
from dflash_mp.report.run_files import WALK

log = logging.getLogger(__name__)

PAUSE = 50
"""Times as long as a report took passes before the next: reports take 2 % of the time at most."""


class LiveReport:
    """Keeps report.html up to date on the main drafter; does nothing on the others.

    Args:
        folder: the run folder.
        active: this is the main drafter.
    """

    def __init__(self, folder: Path, active: bool) -> None:
        self.folder, self.active = folder, active
        self._next = 0.0
        self._news = False

    def walked(self, step: int, counts: BlockCounts) -> None:
        """A walk over the held-out text has come to ``counts``."""
        if self.active:
            write_walk(self.folder, step, counts)
            self._news = True

    def update(self, stopping: bool, last: bool) -> None:
        """Write the report if there was a walk, unless that was done lately or has time (``last``).

        ``stopping``: in any case.
        """
        lately = time.monotonic() < self._next
        if stopping or (self._news and not lately and not last):
            self.write()

    def write(self) -> None:
        """Write the report."""
        if not self.active:
            return
        start = time.monotonic()
        try:
            # Slow to import: it draws, and all ranks but one never do.
            from dflash_mp.report.page import write_report

            write_report(self.folder)
        except Exception:
            # Training is worth more than a picture of it.
            log.exception("report.html could not be written; the training goes on")
        end = time.monotonic()
        self._next, self._news = end + PAUSE * (end - start), False


def write_walk(folder: Path, step: int, counts: BlockCounts) -> None:
    """Write what the walk at ``step`` came to as ``heldout.json``.

    The keys are those of ``merge_results``; a rate over nothing is null.
    """
    rates = counts.slot_acceptance_rate()
    found = {
        "step": step,
        "block_size": len(counts.walk_histogram),
        "cycles": int(counts.walk_committed_total),
        "histogram": [int(count) for count in counts.walk_histogram],
        "slot_acceptance_rate": [None if rate != rate else rate for rate in rates],
    }
    partial = folder / f".{WALK}.partial"
    partial.write_text(json.dumps(found) + "\n")
    partial.replace(folder / WALK)
