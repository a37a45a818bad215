"""Checkpoints: whole or not there, whatever happens while they are written; never code."""

import json
import os
import pickle
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dflash_mp import checkpoint
from dflash_mp.checkpoint import CheckpointError, CheckpointWriter, checkpoints, step_of
from dflash_mp.config import CheckpointConfig, UserError

LAST_TWO = CheckpointConfig(interval=1, keep=2, keep_best=False, keep_every=0)


def make(seed: int = 0, width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model, trained for one step so that its optimizer has a state."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    advance(model, optimizer)
    return model, optimizer


def advance(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def writer(folder: Path, policy: CheckpointConfig = LAST_TWO) -> CheckpointWriter:
    return CheckpointWriter(folder, policy, {"model_type": "test"}, {"data": "abc"})


def save(folder: Path, step: int, seed: int = 0) -> Path:
    model, optimizer = make(seed)
    one = writer(folder)
    one.save(step, model, optimizer, {"batches": 2 * step})
    one.close()
    return folder / f"step-{step:06d}"


def steps(folder: Path) -> list[int]:
    return [step_of(path) for path in checkpoints(folder)]


def test_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    model, optimizer = make()
    for _ in range(256):
        advance(model, optimizer)
    one = writer(tmp_path)
    one.save(257, model, optimizer, {})
    # What happens to the model while the thread writes must not reach the file.
    advance(model, optimizer)
    one.close()
    other, again = make(seed=1)
    checkpoint.load(tmp_path / "step-000257", other, again)
    assert {float(state["step"]) for state in again.state.values()} == {257.0}
    advance(other, again)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(optimizer.state.values(), again.state.values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert mine[name].dtype == torch.float32
            assert torch.equal(mine[name], theirs[name])


def test_policy_keeps_the_last_the_best_and_every_nth(tmp_path: Path) -> None:
    one = writer(tmp_path, CheckpointConfig(interval=1, keep=2, keep_best=True, keep_every=4))
    model, optimizer = make()
    lengths = {1: 1.0, 2: None, 3: 2.5, 4: None, 5: 2.0, 6: 1.5, 7: None, 8: 1.0, 9: None}
    for step, length in lengths.items():
        one.save(step, model, optimizer, {"acceptance": length})
    one.close()
    assert steps(tmp_path) == [3, 4, 8, 9]
    assert not list(tmp_path.glob(".partial-*"))


EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.listdir")


def dies_at(event: int, folder: Path) -> bool:
    """Write step 3 into ``folder`` in a child that kills itself before its n-th file operation."""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(name: str, arguments: tuple) -> None:
            nonlocal seen
            if name in EVENTS:
                seen += 1
                if seen == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        model, optimizer = make(seed=3)
        tensors = {"model.safetensors": {}, "optimizer.safetensors": {}}
        checkpoint.stage(model.state_dict(), tensors["model.safetensors"])
        checkpoint.stage(checkpoint.optimizer_tensors(optimizer), tensors["optimizer.safetensors"])
        sys.addaudithook(count)
        partial = folder / ".partial-000003"
        checkpoint.write(partial, tensors, {}, {"step": 3})
        checkpoint.commit(partial, folder / "step-000003")
        checkpoint.prune(folder, LAST_TWO)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_kill_at_any_file_operation_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    template = tmp_path / "template"
    for step in (1, 2):
        save(template, step, seed=step)
    seen = set()
    for event in range(1, 200):
        folder = tmp_path / f"kill-{event}"
        shutil.copytree(template, folder)
        died = dies_at(event, folder)
        found = steps(folder)
        seen.add(tuple(found))
        for step in found:
            model, optimizer = make(seed=9)
            checkpoint.load(folder / f"step-{step:06d}", model, optimizer)
            expected, _ = make(seed=step)
            assert torch.equal(model[0].weight, expected[0].weight)
        # The next process cleans up and goes on.
        save(folder, 4)
        assert steps(folder)[-1] == 4
        assert not list(folder.glob(".partial-*"))
        if not died:
            break
    assert not died
    assert event > 12
    # Killed before and after the new one appeared, and before and after the oldest went.
    assert seen == {(1, 2), (1, 2, 3), (2, 3)}


def test_a_full_disk_is_reported_and_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = make()
    one = writer(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        one.save(1, model, optimizer, {})
        one.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert "checkpoint of step 1 was not written" in caplog.text
    assert list(tmp_path.iterdir()) == []
    one.save(2, model, optimizer, {})
    one.close()
    assert steps(tmp_path) == [2]


def test_the_last_checkpoint_must_be_written(tmp_path: Path) -> None:
    model, optimizer = make()
    (tmp_path / "file").write_text("")
    one = writer(tmp_path / "file" / "checkpoints")
    one.save(1, model, optimizer, {})
    with pytest.raises(CheckpointError, match=r"last checkpoint is missing.*Not a directory"):
        one.close()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


class Attack:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def bad_model(path: Path) -> None:
    truncate(path / "model.safetensors")


def bad_moments(path: Path) -> None:
    truncate(path / "optimizer.safetensors")


def no_model(path: Path) -> None:
    (path / "model.safetensors").unlink()


def bad_state(path: Path) -> None:
    truncate(path / "state.json")


def no_state(path: Path) -> None:
    (path / "state.json").unlink()


def other_step(path: Path) -> None:
    tensors = load_file(path / "optimizer.safetensors")
    save_file(tensors, path / "optimizer.safetensors", metadata={"step": "1"})


def no_moments(path: Path) -> None:
    save_file({}, path / "optimizer.safetensors", metadata={"step": "2"})


def some_moments(path: Path) -> None:
    tensors = load_file(path / "optimizer.safetensors")
    del tensors["1.exp_avg"]
    save_file(tensors, path / "optimizer.safetensors", metadata={"step": "2"})


def pickled(path: Path) -> None:
    (path / "model.safetensors").write_bytes(pickle.dumps(Attack(path.parent / "attacked")))
    torch.save({"a": Attack(path.parent / "attacked")}, path / "optimizer.safetensors")


DAMAGE = {
    bad_model: "model.safetensors cannot be read",
    bad_moments: "optimizer.safetensors cannot be read",
    no_model: "model.safetensors cannot be read",
    bad_state: "state.json cannot be read",
    no_state: "not a complete checkpoint",
    other_step: "is of step 1, but its state.json of step 2",
    no_moments: "does not fit this drafter: 0.exp_avg",
    some_moments: "does not fit this drafter: 1.exp_avg differ",
    pickled: "model.safetensors cannot be read",
}


@pytest.mark.parametrize("damage", list(DAMAGE), ids=lambda damage: damage.__name__)
def test_what_cannot_be_read_is_refused(damage: object, tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    damage(path)
    model, optimizer = make()
    with pytest.raises(UserError, match=DAMAGE[damage]) as caught:
        checkpoint.load(path, model, optimizer)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "attacked").exists()


def test_another_shape_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    model, optimizer = make(width=5)
    with pytest.raises(UserError, match=r"does not fit this drafter: 0\.bias, 0\.weight"):
        checkpoint.load(path, model, optimizer)


def test_everything_in_a_checkpoint_is_plain(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert json.loads((path / "state.json").read_text()) == {"step": 2, "data": "abc", "batches": 4}
