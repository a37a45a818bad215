"""Read single tensors from the safetensors of a local folder or a hub repository."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from dflash_mp.config import UserError, require

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def find_file(source: str, name: str, revision: str | None = None) -> Path | None:
    """Local path of ``name`` in a folder or hub repository; None if it holds no such file.

    Raises:
        UserError: ``source`` is neither a folder nor a reachable repository.
    """
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    try:
        found = cached_file(
            source,
            name,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{source}: not a folder or reachable hub repository ({reason})") from None
    return Path(found) if found else None


def tensor_files(source: str, revision: str | None = None) -> dict[str, Path | str]:
    """Where each tensor of a checkpoint lies: ``{key: path}``, or a file name still to fetch.

    Raises:
        UserError: the checkpoint has no safetensors, or they cannot be read.
    """
    index = find_file(source, INDEX, revision)
    if index is not None:
        return dict(json.loads(index.read_text())["weight_map"])
    single = find_file(source, SINGLE, revision)
    require(single is not None, f"{source}: no {SINGLE} and no {INDEX} in it")
    assert single is not None
    try:
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single)
    except SafetensorError as error:
        raise UserError(f"{single}: not a readable safetensors file ({error})") from None


def read_tensor(
    source: str, files: dict[str, Path | str], key: str, revision: str | None = None
) -> Tensor:
    """One tensor, in its stored dtype, on the CPU; only its own bytes are read."""
    path = _file_of(source, files, key, revision)
    try:
        with safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(key)
            return tensor
    except SafetensorError as error:
        raise UserError(f"{path}: cannot read {key} ({error})") from None


def tensor_shape(
    source: str, files: dict[str, Path | str], key: str, revision: str | None = None
) -> list[int]:
    """The shape of one tensor, from the header of its file; the tensor is not read."""
    path = _file_of(source, files, key, revision)
    try:
        with safe_open(path, "pt") as file:
            return list(file.get_slice(key).get_shape())
    except SafetensorError as error:
        raise UserError(f"{path}: cannot read {key} ({error})") from None


def _file_of(source: str, files: dict[str, Path | str], key: str, revision: str | None) -> Path:
    path = files[key]
    if isinstance(path, str):
        found = find_file(source, path, revision)
        require(found is not None, f"{source}: its index names {path}, which is missing")
        assert found is not None
        path = found
    return path
