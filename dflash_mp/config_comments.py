"""The comments of ``conf/`` in what ``--cfg job`` prints: Hydra itself leaves them out."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

KEY = re.compile(r"( *)([\w.+-]+):(?: |$)")


def commented(printed: str, folder: Path, name: str) -> str:
    """A printed configuration with the comment of each key above it.

    Args:
        printed: YAML, as Hydra prints it.
        folder: ``conf/``.
        name: the root configuration that was composed.
    """
    known = comments(folder, name)
    lines: list[str] = []
    for line, key in with_keys(printed.splitlines()):
        indent = " " * (len(line) - len(line.lstrip()))
        lines += [f"{indent}{comment}" for comment in known.get(key, [])]
        lines.append(line)
    return "".join(f"{line}\n" for line in lines)


def comments(folder: Path, name: str) -> dict[str, list[str]]:
    """The comment lines right above each dotted key of ``<name>.yaml`` and of the groups' files.

    The files of a group comment their keys alike; what belongs to no group (recipes) is left out.
    """
    found: dict[str, list[str]] = {}
    for path in [folder / f"{name}.yaml", *sorted(folder.glob("*/*.yaml"))]:
        text = path.read_text(encoding="utf-8")
        if "# @package" in text:
            continue
        group = "" if path.parent == folder else f"{path.parent.name}."
        above: list[str] = []
        for line, key in with_keys(text.splitlines()):
            if key and above:
                found.setdefault(f"{group}{key}", above)
            above = [*above, line.strip()] if line.lstrip().startswith("#") else []
    return found


def with_keys(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each line with the dotted key that it begins; empty for any other line."""
    path: list[tuple[int, str]] = []
    for line in lines:
        match = KEY.match(line)
        if match is None:
            yield line, ""
            continue
        depth = len(match[1])
        path = [*(part for part in path if part[0] < depth), (depth, match[2])]
        yield line, ".".join(name for _, name in path)
