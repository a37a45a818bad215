"""Progress: a moving line at a terminal, one line per interval in a log."""

import sys
from typing import Any, TextIO

from tqdm import tqdm

LINE_EVERY_S = 15.0


class ProgressLines(tqdm):
    """A bar whose every state is a line of its own, for where nobody sees it move."""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Write a line; tqdm calls this when it is time."""
        if msg == "":
            # Asked to wipe the bar away.
            return False
        # The last one is ended by tqdm's close().
        self.fp.write(str(self) if self.disable else f"{self}\n")
        self.fp.flush()
        return True


def progress_bar(file: TextIO | None = None, **options: Any) -> tqdm:
    """A progress bar on ``file``, else the standard error stream; ``options`` are tqdm's."""
    file = file or sys.stderr
    if file.isatty():
        return tqdm(file=file, **{"dynamic_ncols": True, "mininterval": 0.5} | options)
    # Beyond the longest interval tqdm looks for itself whether a line is due.
    slow = {"mininterval": LINE_EVERY_S, "maxinterval": LINE_EVERY_S}
    return ProgressLines(file=file, **slow | options)
