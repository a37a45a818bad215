"""How the commands that read a finished drafter are told where it is."""

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass
class DrafterSource:
    """A drafter to read: a folder (an export or a checkpoint) or a hub name."""

    path: str | None = MISSING
    revision: str | None = MISSING


def spell_path(arguments: list[str], key: str) -> list[str]:
    """Command line arguments with ``key=<folder>`` written as ``key.path=<folder>``.

    For a ``DrafterSource`` whose key is also a group of the trainer's configuration files: Hydra
    would look for the folder among those.
    """
    short = f"{key}="
    return [
        f"{key}.path={argument.removeprefix(short)}" if argument.startswith(short) else argument
        for argument in arguments
    ]
