"""Warnings that come again and again: the first says what to do, the others are just told."""

import logging

_said: set[str] = set()


def warn_once(log: logging.Logger, message: str, advice: str) -> None:
    """Log ``message``; with the same ``advice`` for the first time in this process, as a warning.

    ``message`` may differ from time to time (numbers, files); ``advice`` is what the user can do.
    """
    if advice in _said:
        log.info("%s", message)
        return
    _said.add(advice)
    log.warning("%s; %s (the next ones come without a warning)", message, advice)
