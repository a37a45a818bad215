"""Checkpoints of the drafter and its optimizer: plain tensors and JSON, no pickle.

A checkpoint is a folder ``step-<n>`` that appears by one rename, once everything in it is on the
disk. What it does not hold is a function of the configuration and the step: the order of the data,
the anchors, the learning rate. Nothing in training draws from a global random generator.
"""

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dflash_mp.config import CheckpointConfig, UserError, require

log = logging.getLogger(__name__)

STATE = "state.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
DRAFTER = "config.json"


@dataclass(frozen=True)
class Start:
    """Where a run begins: behind ``step`` optimizer steps and ``batches`` micro-batches."""

    checkpoint: Path | None = None
    step: int = 0
    batches: int = 0


class CheckpointError(Exception):
    """The checkpoint that a run ends with could not be written."""


class CheckpointWriter:
    """Writes checkpoints in a thread, from a copy of the tensors in host memory; one rank's.

    A write that fails (full disk, folder gone) is reported and the training goes on; ``close``
    raises if that was the last one.

    Args:
        folder: the run's checkpoint folder.
        policy: which checkpoints stay.
        drafter: ``config.json`` of the drafter, so that a checkpoint can be evaluated as it is.
        constant: facts that are the same in every checkpoint of the run.
    """

    def __init__(
        self,
        folder: Path,
        policy: CheckpointConfig,
        drafter: dict[str, Any],
        constant: dict[str, Any],
    ) -> None:
        self.folder, self.policy, self.drafter, self.constant = folder, policy, drafter, constant
        self.error: Exception | None = None
        self._staged: dict[str, dict[str, Tensor]] = {MODEL: {}, OPTIMIZER: {}}
        self._thread: threading.Thread | None = None
        for partial in folder.glob(".partial-*"):
            # Left by a process that was killed.
            shutil.rmtree(partial, ignore_errors=True)

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any]
    ) -> None:
        """Copy the tensors and return; ``step-<step>`` appears later.

        Waits for the write before, if that is still going on: there is one copy.

        Args:
            step: optimizer steps done.
            model: the drafter, not wrapped.
            optimizer: its optimizer.
            facts: JSON values that belong to this step.
        """
        self.wait()
        begun = time.perf_counter()
        stage(model.state_dict(), self._staged[MODEL])
        stage(optimizer_tensors(optimizer), self._staged[OPTIMIZER])
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        log.debug("step %d copied in %.3f s", step, time.perf_counter() - begun)
        state = {"step": step, **self.constant, **facts}
        self._thread = threading.Thread(
            target=self._write, args=(step, state), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            CheckpointError: it could not be written.
        """
        self.wait()
        if self.error is not None:
            raise CheckpointError(f"the last checkpoint is missing: {self.error}") from self.error

    def _write(self, step: int, state: dict[str, Any]) -> None:
        begun = time.perf_counter()
        partial = self.folder / f".partial-{step:06d}"
        try:
            write(partial, self._staged, self.drafter, state)
            commit(partial, self.folder / f"step-{step:06d}")
        except (OSError, SafetensorError) as error:
            self.error = error
            shutil.rmtree(partial, ignore_errors=True)
            log.warning(
                "checkpoint of step %d was not written, training goes on: %s; make room in %s",
                step,
                error,
                self.folder,
            )
        else:
            self.error = None
            log.info("checkpoint of step %d: %.2f s", step, time.perf_counter() - begun)
            prune(self.folder, self.policy)


def stage(tensors: Mapping[str, Tensor], into: dict[str, Tensor]) -> None:
    """Copy ``tensors`` to host memory, reusing the buffers of an earlier call."""
    for name, tensor in tensors.items():
        if name not in into:
            pinned = tensor.is_cuda
            into[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        into[name].copy_(tensor.detach(), non_blocking=True)


def write(
    partial: Path,
    staged: Mapping[str, dict[str, Tensor]],
    drafter: dict[str, Any],
    state: dict[str, Any],
) -> None:
    """Fill the folder ``partial``; everything is on the disk when this returns."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, tensors in staged.items():
        # The step stands in every file: files of two checkpoints are never taken for one.
        save_file(tensors, partial / name, metadata={"step": str(state["step"])})
    (partial / DRAFTER).write_text(json.dumps(drafter, indent=2, sort_keys=True) + "\n")
    (partial / STATE).write_text(json.dumps(state, indent=2) + "\n")
    for path in (*partial.iterdir(), partial):
        sync(path)


def commit(partial: Path, final: Path) -> None:
    """Let a complete checkpoint appear."""
    if final.exists():
        # Only when a run was continued from an earlier step.
        shutil.rmtree(final)
    partial.rename(final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Bring a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, oldest first."""
    found = [path for path in folder.glob("step-*") if (path / STATE).is_file()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """Optimizer steps done in a checkpoint, from its name."""
    return int(path.name.removeprefix("step-"))


def prune(folder: Path, policy: CheckpointConfig) -> None:
    """Delete the checkpoints that ``policy`` does not keep."""
    found = checkpoints(folder)
    kept = set(found[-policy.keep :])
    if policy.keep_every:
        kept |= {path for path in found if step_of(path) % policy.keep_every == 0}
    if policy.keep_best:
        kept.add(max(found, key=lambda path: (acceptance_of(path), step_of(path))))
    for path in found:
        if path not in kept:
            # Its name goes first: a half-deleted folder must not look complete.
            doomed = path.rename(path.with_name(f".partial-{path.name}"))
            shutil.rmtree(doomed, ignore_errors=True)


def acceptance_of(path: Path) -> float:
    """Acceptance length measured at a checkpoint's step; 0 when none was."""
    try:
        return float(read_state(path).get("acceptance") or 0.0)
    except UserError:
        return 0.0


def read_state(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint.

    Raises:
        UserError: it is incomplete or not readable.
    """
    try:
        state = json.loads((path / STATE).read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is not a complete checkpoint: it has no {STATE}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path / STATE} cannot be read: {error}") from None
    require(
        isinstance(state, dict) and isinstance(state.get("step"), int),
        f"{path / STATE} is not the state of a checkpoint",
    )
    return dict(state)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore model and optimizer.

    Raises:
        UserError: files that cannot be read, do not belong together or do not fit the model.
    """
    step = read_state(path)["step"]
    weights = read_tensors(path / MODEL, step)
    compare_shapes(path / MODEL, dict(model.state_dict()), weights)
    moments = read_tensors(path / OPTIMIZER, step)
    compare_shapes(path / OPTIMIZER, expected_moments(optimizer, moments), moments)
    model.load_state_dict(weights)
    restore_optimizer(optimizer, moments)


def read_tensors(path: Path, step: int) -> dict[str, Tensor]:
    """All tensors of a safetensors file that was written at ``step``."""
    try:
        with safe_open(path, "pt") as file:
            found = (file.metadata() or {}).get("step")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    require(found == str(step), f"{path} is of step {found}, but its {STATE} of step {step}")
    return tensors


def compare_shapes(path: Path, expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Refuse tensors that are missing, left over or of another shape."""
    differ = sorted(
        name
        for name in expected.keys() | found.keys()
        if name not in expected or name not in found or expected[name].shape != found[name].shape
    )
    require(not differ, f"{path} does not fit this drafter: {', '.join(differ[:5])} differ")


def expected_moments(
    optimizer: torch.optim.Optimizer, found: dict[str, Tensor]
) -> dict[str, Tensor]:
    """What ``optimizer_tensors`` would hold: the same names for every parameter of a group."""
    expected, number = {}, 0
    for group in optimizer.param_groups:
        last = number + len(group["params"])
        own = {
            key.partition(".")[2]: value
            for key, value in found.items()
            if number <= int(key.partition(".")[0]) < last
        }
        for parameter in group["params"]:
            for name, value in (own or {"exp_avg": parameter}).items():
                expected[f"{number}.{name}"] = value if value.ndim == 0 else parameter
            number += 1
    return expected


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as ``<parameter number>.<name>`` tensors."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": value
        for number, values in state.items()
        for name, value in values.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Undo ``optimizer_tensors``; learning rates come from the schedule."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )
