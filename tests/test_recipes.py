"""What ``target=<name>`` brings along fits that target and has the shape of the released drafter.

``targets/`` holds what matters of the targets' own ``config.json``.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from dflash_mp.cast import place
from dflash_mp.config import TrainConfig, config_dir, to_config
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.drafter.step import describe_objective
from dflash_mp.job import drafter_config
from dflash_mp.target.model import load_config

TARGETS = Path(__file__).parent / "targets"
RESERVED = 128255
"""An unused token of Llama 3.1: its released drafter's mask token is not known here."""


@dataclass(frozen=True)
class Released:
    """The sizes of a released drafter."""

    hidden: int
    mlp: int
    taps: list[int]
    mask: int
    theta: float
    layers: int = 5
    sliding: int = 0
    key_value_heads: int = 8
    block: int = 16

    def parameters(self) -> int:
        """Added up by hand: heads are 32 of width 128 in all of them; no biases."""
        queries, shared = 32 * 128, self.key_value_heads * 128
        attention = 2 * self.hidden * queries + 2 * self.hidden * shared + 2 * 128
        layer = attention + 3 * self.hidden * self.mlp + 2 * self.hidden
        return self.layers * layer + len(self.taps) * self.hidden**2 + 2 * self.hidden


QWEN3 = {"taps": [1, 9, 17, 25, 33], "mask": 151669, "theta": 1e6}
RELEASED = {
    "qwen3_4b": Released(2560, 9728, **QWEN3),
    "qwen3_8b": Released(4096, 12288, **QWEN3),
    "llama3_1_8b": Released(4096, 12288, [1, 8, 15, 22, 29], RESERVED, 5e5, block=10),
    "qwen3_coder_30b_a3b": Released(
        2048, 6144, [1, 12, 23, 34, 45], 151669, 1e7, layers=8, key_value_heads=4
    ),
    "qwen3_5_4b": Released(2560, 9728, [1, 8, 15, 22, 29], 248070, 1e7),
    "qwen3_6_27b": Released(5120, 17408, [1, 16, 31, 46, 61], 248070, 1e7, sliding=4),
}


def recipe(name: str, *overrides: str) -> TrainConfig:
    with initialize_config_dir(config_dir(), version_base="1.3"):
        raw = compose("train", [f"target={name}", "data.train=my.jsonl", *overrides])
    return to_config(raw, TrainConfig)


@pytest.mark.parametrize("name", list(RELEASED))
def test_the_drafter_has_the_released_shape(name: str) -> None:
    released = RELEASED[name]
    config = recipe(name, f"target.name={TARGETS / name}")
    mask = config.drafter.mask_token_id
    shape = drafter_config(config, load_config(config.target), RESERVED if mask is None else mask)
    assert shape.dflash_config["target_layer_ids"] == released.taps
    assert shape.dflash_config["mask_token_id"] == released.mask
    assert shape.block_size == released.block
    assert shape.layer_types == ["sliding_attention"] * released.sliding + ["full_attention"] * (
        released.layers - released.sliding
    )
    assert shape.sliding_window == (2048 if released.sliding else None)
    assert shape.rope_parameters == {"rope_type": "default", "rope_theta": released.theta}
    with torch.device("meta"):
        model = DFlashDraftModel(shape)
    assert sum(p.numel() for p in model.parameters()) == released.parameters()
    assert len(model.state_dict()) == 11 * released.layers + 3


# Billions of parameters as the hub rounds them for z-lab's collection (listed on 2026-04-20); of
# Qwen3.6-27B's drafter, the label and the 58 tensors that llama.cpp read (its pull request 22105).
PUBLISHED = {
    "qwen3_4b": "0.5",
    "qwen3_8b": "1",
    "llama3_1_8b": "1",
    "qwen3_coder_30b_a3b": "0.5",
    "qwen3_5_4b": "0.5",
    "qwen3_6_27b": "1.7",
}


@pytest.mark.parametrize(("name", "billions"), list(PUBLISHED.items()))
def test_the_sizes_above_give_the_published_number_of_parameters(name: str, billions: str) -> None:
    assert f"{RELEASED[name].parameters() / 1e9:.1f}".removesuffix(".0") == billions


def test_they_give_what_is_known_exactly() -> None:
    # z-lab's own model, built with the released configuration.
    assert RELEASED["qwen3_8b"].parameters() == 1_048_626_432
    # Ardenzard/Qwen3.6-27B-DFlash-GGUF on the hub, F16: 3310.7 MiB, a tokenizer among them.
    assert 0.995 < RELEASED["qwen3_6_27b"].parameters() * 2 / (3310.7 * 2**20) < 1


@pytest.mark.parametrize("name", list(RELEASED))
def test_the_schedule_is_the_papers(name: str) -> None:
    config = recipe(name)
    assert (config.optim.lr, config.optim.weight_decay) == (6e-4, 0.0)
    assert config.optim.max_grad_norm == 1.0
    assert (config.schedule.kind, config.schedule.warmup) == ("cosine", 0.04)
    assert (config.epochs, config.steps) == (6, None)
    assert config.drafter.anchors_per_batch == 512
    assert config.data.max_length == (4096 if name == "qwen3_coder_30b_a3b" else 3072)
    assert (config.loss.kind, config.loss.labels) == ("ce", "data")
    gamma = {16: 7, 10: 5}[RELEASED[name].block]
    assert f"(slot - 1) / {gamma})" in describe_objective(config.loss, config.drafter.block_size)
    # Runs of two targets never share a folder.
    assert config.run_name == name


@pytest.mark.parametrize("name", list(RELEASED))
@pytest.mark.parametrize("nodes", [1, 2])
def test_every_drafter_of_eight_gpus_a_node_has_the_same_work(name: str, nodes: int) -> None:
    config = recipe(name, *(["experiment=two_nodes"] if nodes == 2 else []))
    drafters = place(0, 8 * nodes, 8, config.topology).drafters
    assert drafters == 3 * nodes
    assert config.micro_batches_per_step == 2 * drafters
    assert (config.data.cache_dir is None) == (nodes == 1)


@pytest.mark.parametrize("name", ["qwen3_4b", "qwen3_8b"])
def test_released_drafters_of_qwen3_are_for_answers_without_thinking(name: str) -> None:
    assert recipe(name).data.template_kwargs == {"enable_thinking": False}
