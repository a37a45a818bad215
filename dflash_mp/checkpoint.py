"""Checkpoints of the drafter and its optimizer: plain tensors and JSON, no pickle.

A checkpoint is a folder ``step-<n>`` that appears by a rename once everything is in it. What is
not stored is a function of the configuration and the step: data order, anchors, learning rate.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash_mp.config import UserError

STATE = "state.json"


def save(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, facts: dict
) -> Path:
    """Write ``folder/step-<n>`` and return it; called by one rank.

    Args:
        folder: the run's checkpoint folder.
        step: optimizer steps done.
        model: the drafter, not wrapped.
        optimizer: its optimizer.
        facts: JSON values stored beside the tensors (config, versions, fingerprints).
    """
    final = folder / f"step-{step:06d}"
    partial = folder / f".partial-{step:06d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(contiguous(model.state_dict()), partial / "model.safetensors")
    save_file(optimizer_tensors(optimizer), partial / "optimizer.safetensors")
    (partial / STATE).write_text(json.dumps({"step": step, **facts}, indent=2))
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    return final


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints."""
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / STATE).is_file())


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore model and optimizer from a checkpoint and return its facts.

    Raises:
        UserError: no checkpoint there, or tensors that do not fit the model.
    """
    if not (path / STATE).is_file():
        raise UserError(f"{path} is not a complete checkpoint: it has no {STATE}")
    facts = json.loads((path / STATE).read_text())
    weights = load_file(path / "model.safetensors")
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    found = {name: tensor.shape for name, tensor in weights.items()}
    if expected != found:
        differ = sorted(
            name for name in expected | found if expected.get(name) != found.get(name)
        )
        raise UserError(f"{path} does not fit this drafter: {', '.join(differ[:5])} differ")
    model.load_state_dict(weights)
    restore_optimizer(optimizer, load_file(path / "optimizer.safetensors"))
    return facts


def contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Detached CPU copies that safetensors accepts."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as ``<parameter number>.<name>`` tensors."""
    state = optimizer.state_dict()["state"]
    named = {
        f"{number}.{name}": value
        for number, values in state.items()
        for name, value in values.items()
    }
    return contiguous(named)


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Undo ``optimizer_tensors``; learning rates come from the schedule."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )
