"""Warnings that come again and again, or from many ranks: the first says what to do."""

import logging
from typing import Protocol


class Counter(Protocol):
    """The part of ``torch.distributed.Store`` that is needed here."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to the number under ``key``, at first 0, for all ranks; returns the sum."""


_said: set[str] = set()
_job: Counter | None = None


def share_warnings(store: Counter) -> None:
    """From here on, a warning comes once in the job of ``store``, not once in this process."""
    global _job
    _job = store


def warn_once(log: logging.Logger, message: str, advice: str) -> None:
    """Log ``message``; with the same ``advice`` for the first time, as a warning.

    ``message`` may differ from time to time (numbers, files); ``advice`` is what the user can do.
    """
    first = advice not in _said
    _said.add(advice)
    if first and (_job is None or _job.add(f"said/{advice}", 1) == 1):
        log.warning("%s; %s (said once; what follows is in the rank logs)", message, advice)
    else:
        log.info("%s", message)
