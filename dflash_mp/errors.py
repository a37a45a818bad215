"""A user's mistake, and the two checks that raise it."""


class UserError(Exception):
    """A mistake of the user: shown as one line without a traceback, exit code 2."""


def require(condition: bool, message: str) -> None:
    """Raise ``UserError(message)`` unless ``condition`` holds."""
    if not condition:
        raise UserError(message)


def one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse ``value`` for ``key`` unless it is one of ``choices``."""
    require(value in choices, f"{key}={value}: must be one of {', '.join(choices)}")
