"""The drafter on disk: ``config.json`` and ``model.safetensors`` in z-lab/dflash's layout.

No key prefix, no embedding, no head: serving engines take those from the target.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config

from dflash_mp.config import UserError, require
from dflash_mp.drafter.hf_config import config_json, read_config
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.drafter.weight_files import (
    SINGLE,
    find_file,
    read_tensor,
    tensor_files,
    tensor_shape,
)

CONFIG = "config.json"


def drafter_state(model: DFlashDraftModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """The exact tensors of the export, on the CPU."""
    return {
        key: tensor.detach().to(device="cpu", dtype=dtype).contiguous()
        for key, tensor in model.state_dict().items()
    }


def save_drafter(
    model: DFlashDraftModel, folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write ``config.json`` and ``model.safetensors``; each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    written = config_json(model.config, dtype=str(dtype).removeprefix("torch."))
    config = folder / f".{CONFIG}.partial"
    config.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    weights = folder / f".{SINGLE}.partial"
    save_file(drafter_state(model, dtype), weights, metadata={"format": "pt"})
    # safetensors writes for the owner alone; whoever may read the config may read the weights.
    weights.chmod(config.stat().st_mode)
    weights.replace(folder / SINGLE)
    config.replace(folder / CONFIG)


def read_drafter_config(source: str, revision: str | None = None) -> dict[str, Any]:
    """``config.json`` of a drafter in a folder or hub repository, as it is."""
    path = find_file(source, CONFIG, revision)
    require(path is not None, f"{source}: no {CONFIG} in it")
    assert path is not None
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    require(isinstance(raw, dict), f"{path}: must hold a JSON object")
    return dict(raw)


def check_tensors(
    source: str, config: Qwen3Config, revision: str | None = None
) -> dict[str, Path | str]:
    """Where each tensor of a drafter lies, once names and shapes are those its config asks for.

    Raises:
        UserError: tensors missing, left over or of another shape, or a truncated file; one line
            that names them.
    """
    with torch.device("meta"):
        expected = {k: v.shape for k, v in DFlashDraftModel(config).state_dict().items()}
    files = tensor_files(source, revision)
    missing, extra = sorted(expected.keys() - files.keys()), sorted(files.keys() - expected.keys())
    require(not missing, f"{source}: {len(missing)} tensors are missing, first {missing[:3]}")
    require(not extra, f"{source}: {len(extra)} tensors do not belong to it, first {extra[:3]}")
    for key, shape in expected.items():
        found = tensor_shape(source, files, key, revision)
        require(
            found == list(shape),
            f"{source}: {key} has shape {found}, but its config asks for {list(shape)}",
        )
    return files


def load_drafter(
    source: Path | str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attention: str = "sdpa",
    revision: str | None = None,
) -> DFlashDraftModel:
    """Load a drafter from a folder or hub repository, every tensor accounted for.

    Raises:
        UserError: not a DFlash drafter, tensors missing, left over or of another shape, or a
            truncated file; one line that names them.
    """
    source = str(source)
    config = read_config(read_drafter_config(source, revision))
    files = check_tensors(source, config, revision)
    state = {key: read_tensor(source, files, key, revision) for key in files}
    model = DFlashDraftModel(config, attention)
    model.load_state_dict(state)
    return model.to(device=device, dtype=dtype)
