"""What the optimizers do to weights, judged from outside: singular values, signs, the same bits."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import nn

from dflash_mp import checkpoint
from dflash_mp.checkpoint import CheckpointWriter
from dflash_mp.config import CheckpointConfig, OptimConfig, TrainConfig, config_dir, to_config
from dflash_mp.learning_config import ScheduleConfig
from dflash_mp.optim import build_optimizer, build_schedule

KINDS = ("adamw", "muon")
SCHEDULE = ScheduleConfig("cosine", warmup=0.25, decay=0.0, min_ratio=0.0)


def settings(kind: str, *overrides: str) -> OptimConfig:
    with initialize_config_dir(config_dir(), version_base="1.3"):
        raw = compose("train", [f"optim={kind}", "optim.lr=0.01", *overrides])
    return to_config(raw, TrainConfig).optim


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.Linear(40, 16, bias=False))


def advance(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(5)
    model(torch.randn(64, 24, generator=generator)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_in_one_group_and_only_matrices_decay(kind: str) -> None:
    model = make(0)
    groups = build_optimizer(model, settings(kind, "optim.weight_decay=0.1")).param_groups
    listed = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(listed) == sorted(id(parameter) for parameter in model.parameters())
    for group in groups:
        (decays,) = {parameter.ndim == 2 for parameter in group["params"]}
        assert group["weight_decay"] == (0.1 if decays else 0.0)


def test_muon_moves_matrices_by_nearly_orthogonal_ones_and_vectors_as_adamw() -> None:
    model = make(0)
    before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    advance(model, build_optimizer(model, settings("muon")))
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.double()
        moved = before[name] - parameter.detach().double()
        if parameter.ndim == 2:
            # In the gradient's singular bases the move is diagonal; torch's five Newton-Schulz
            # iterations in bfloat16 leave its entries around 1.
            left, _, right = torch.linalg.svd(gradient, full_matrices=False)
            inside = left.T @ (moved / (0.01 * 0.2 * max(parameter.shape) ** 0.5)) @ right.T
            diagonal = inside.diagonal()
            assert float(diagonal.min()) > 0.6
            assert float(diagonal.max()) < 1.3
            assert float((inside - diagonal.diag()).abs().max()) < 0.06
            # Nothing outside of these bases.
            rest = moved - left @ left.T @ moved @ right.T @ right
            assert float(rest.norm() / moved.norm()) < 0.05
        else:
            # AdamW's first step goes by the signs alone.
            torch.testing.assert_close(moved, 0.01 * gradient.sign(), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    """Through a checkpoint, with the schedule, and with a state loaded before the first step."""
    model = make(0)
    optimizer = build_optimizer(model, settings(kind))
    # As Accelerate does it when it takes over an optimizer.
    optimizer.load_state_dict(optimizer.state_dict())
    schedule = build_schedule(optimizer, 8, SCHEDULE)
    for step in range(1, 9):
        advance(model, optimizer)
        schedule.step()
        optimizer.zero_grad()
        if step == 4:
            policy = CheckpointConfig(interval=1, keep=2, keep_best=False, keep_every=0)
            writer = CheckpointWriter(tmp_path, policy, {}, {})
            writer.save(4, model, optimizer, {})
            writer.close()
    other = make(1)
    again = build_optimizer(other, settings(kind))
    checkpoint.load(tmp_path / "step-000004", other, again)
    schedule = build_schedule(again, 8, SCHEDULE, done=4)
    for _ in range(4):
        advance(other, again)
        schedule.step()
        again.zero_grad()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs)
        for name, value in optimizer.state[mine].items():
            assert torch.equal(value, again.state[theirs][name])
    # The schedule reached both parts: its last step is of no size.
    assert {group["lr"] for group in optimizer.param_groups} == {schedule.get_last_lr()[0]}
