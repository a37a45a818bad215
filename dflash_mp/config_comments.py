"""The comments of ``conf/`` in what ``--cfg job`` prints: Hydra itself leaves them out."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from omegaconf import OmegaConf

KEY = re.compile(r"( *)([\w.+-]+):(?: |$)")


def commented(printed: str, folder: Path, name: str, choices: Mapping[str, str | None]) -> str:
    """A printed configuration with the comment of each key above it.

    Args:
        printed: YAML, as Hydra prints it.
        folder: ``conf/``.
        name: the root configuration that was composed.
        choices: the option of each group that was composed; None where there is none.
    """
    known = comments(folder, name, choices)
    lines: list[str] = []
    for line, key in with_keys(printed.splitlines()):
        indent = " " * (len(line) - len(line.lstrip()))
        lines += [f"{indent}{comment}" for comment in known.get(key, [])]
        lines.append(line)
    return "".join(f"{line}\n" for line in lines)


def comments(folder: Path, name: str, choices: Mapping[str, str | None]) -> dict[str, list[str]]:
    """The comment lines right above each dotted key of ``<name>.yaml`` and of the chosen options.

    Of what they start from, too: a command with the keys of the training starts from its file.

    The options of a group comment the same key differently (what a GPU's rate is taken from). What
    belongs to no group (recipes) is left out.
    """
    chosen = [
        (f"{group}.", path)
        for group, option in choices.items()
        if option is not None
        for path in with_defaults(folder / group / f"{option}.yaml")
    ]
    found: dict[str, list[str]] = {}
    roots = [("", path) for path in with_defaults(folder / f"{name}.yaml")]
    for group, path in [*roots, *chosen]:
        text = path.read_text(encoding="utf-8")
        if "# @package" in text:
            continue
        above: list[str] = []
        for line, key in with_keys(text.splitlines()):
            if key and above:
                found.setdefault(f"{group}{key}", above)
            above = [*above, line.strip()] if line.lstrip().startswith("#") else []
    return found


def with_defaults(path: Path) -> list[Path]:
    """A file and those of its folder that it starts from, the ones that win first.

    Empty for an option that is no file here: one of Hydra's own, or of ``--config-dir``.
    """
    if not path.is_file():
        return []
    defaults = OmegaConf.to_container(OmegaConf.load(path)).get("defaults", [])  # type: ignore[union-attr]
    same_group = [entry for entry in reversed(defaults) if isinstance(entry, str)]
    found = [path]
    for entry in same_group:
        if entry != "_self_":
            found += with_defaults(path.with_name(f"{entry}.yaml"))
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
