"""Starting from a published drafter: every dialect, and everything that does not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PretrainedConfig

from dflash_mp.config import TrainConfig, UserError, config_dir, to_config
from dflash_mp.drafter.checkpoint_format import save_drafter
from dflash_mp.drafter.hf_config import read_config
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.published import adopt_shape, published_config, set_initial_weights

WINDOW, BLOCK, MASK = 9, 5, 1


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> PretrainedConfig:
    return AutoConfig.from_pretrained(tiny_target)


@pytest.fixture
def published(tmp_path: Path, target: PretrainedConfig) -> Path:
    """A drafter for the tiny target: narrow MLP, one sliding layer, a rotary base of its own."""
    config = read_config(
        {
            "hidden_size": target.hidden_size,
            "intermediate_size": 24,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "vocab_size": target.vocab_size,
            "num_target_layers": target.num_hidden_layers,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": WINDOW,
            "use_sliding_window": True,
            "rope_theta": 5000.0,
            "block_size": BLOCK,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
        }
    )
    model = DFlashDraftModel(config)
    model.init_weights(seed=7)
    save_drafter(model, tmp_path / "published")
    return tmp_path / "published"


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def train_config(source: Path, *overrides: str) -> TrainConfig:
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return to_config(compose("train", [f"init.from={source}", *overrides]), TrainConfig)


def keep(raw: dict[str, Any]) -> None:
    pass


def classic(raw: dict[str, Any]) -> None:
    """Block size at the top, the rotary base as transformers 4 wrote it."""
    del raw["rope_parameters"], raw["dflash_config"]["block_size"]


def recent(raw: dict[str, Any]) -> None:
    """Block size inside, rotary settings as transformers 5 writes them."""
    del raw["block_size"], raw["rope_theta"], raw["rope_scaling"], raw["num_target_layers"]


@pytest.mark.parametrize("dialect", [keep, classic, recent])
def test_shape_and_weights_are_those_of_the_published_drafter(
    dialect: Callable[[dict[str, Any]], None], published: Path, target: PretrainedConfig
) -> None:
    rewrite(published, dialect)
    config = adopt_shape(train_config(published, "drafter.anchors_per_batch=11"))
    drafter = config.drafter
    assert (drafter.layers, drafter.block_size, drafter.tapped_layers) == (3, BLOCK, 2)
    assert (drafter.sliding_layers, drafter.sliding_window) == (1, WINDOW)
    assert (drafter.mask_token_id, drafter.anchors_per_batch) == (MASK, 11)
    assert config.target.layer_ids == [0, 2]

    found = published_config(config, target)
    assert found.layer_types == ["full_attention", "sliding_attention", "full_attention"]
    assert found.rope_parameters["rope_theta"] == 5000.0
    assert (found.block_size, found.num_target_layers) == (BLOCK, 4)
    model = DFlashDraftModel(found)
    assert set_initial_weights(model, config)
    for key, tensor in load_file(published / "model.safetensors").items():
        assert torch.equal(model.state_dict()[key], tensor.float())


def test_without_it_nothing_changes(target: PretrainedConfig) -> None:
    with initialize_config_dir(config_dir(), version_base="1.3"):
        config = to_config(compose("train"), TrainConfig)
    assert adopt_shape(config) is config
    assert published_config(config, target) is None


def taps(ids: list[int]) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw["dflash_config"].update(target_layer_ids=ids)


OTHER_TARGET = {
    "hidden size": (lambda raw: raw.update(hidden_size=40), "its hidden_size is 40, the target's"),
    "vocabulary": (lambda raw: raw.update(vocab_size=77), "its vocab_size is 77, the target's is"),
    "depth": (lambda raw: raw.update(num_target_layers=6), "its num_target_layers is 6"),
    "layer beyond": (taps([1, 7]), r"taps the layers \[1, 7\], the target has layers 0 to 3"),
    "last layer": (taps([0, 3]), "the last layer cannot be tapped"),
}


@pytest.mark.parametrize("case", list(OTHER_TARGET))
def test_a_drafter_of_another_target(case: str, published: Path, target: PretrainedConfig) -> None:
    change, message = OTHER_TARGET[case]
    config = train_config(published)
    rewrite(published, change)
    with pytest.raises(UserError, match=message) as error:
        published_config(config, target)
    assert str(error.value).startswith(f"init.from={published}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            ["target.layer_ids=[1,2]", "drafter.tapped_layers=2"],
            r"target.layer_ids=\[1, 2\], but that drafter was made with \[0, 2\]",
        ),
        (["drafter.mask_token_id=3"], "drafter.mask_token_id=3, but that drafter was made with 1"),
    ],
)
def test_settings_that_contradict_it(override: list[str], message: str, published: Path) -> None:
    with pytest.raises(UserError, match=message):
        adopt_shape(train_config(published, *override))


def test_damaged_and_missing_ones(published: Path) -> None:
    config = train_config(published)
    weights = published / "model.safetensors"
    state = load_file(weights)
    save_file({k: v for k, v in state.items() if k != "fc.weight"}, weights)
    with pytest.raises(UserError, match=r"1 tensors are missing, first \['fc.weight'\]"):
        adopt_shape(config)
    save_file(state | {"fc.weight": state["fc.weight"][:, 1:].clone()}, weights)
    with pytest.raises(UserError, match=r"fc.weight has shape \[32, 63\]"):
        adopt_shape(config)
    save_file(state, weights)
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        adopt_shape(config)
    rewrite(published, lambda raw: raw.pop("dflash_config"))
    with pytest.raises(UserError, match=r"no dflash_config\.mask_token_id: not a DFlash drafter"):
        adopt_shape(config)
    with pytest.raises(UserError, match=r"init\.from=\S*nowhere: .*: not a folder or reachable"):
        adopt_shape(train_config(published.parent / "nowhere"))


def test_keys_beside_from_and_revision() -> None:
    with pytest.raises(UserError, match="init=path"):
        train_config(Path("x"), "+init.path=y")


@pytest.mark.distributed
def test_a_job_starts_from_it(launch: Callable[..., Any], published: Path, tmp_path: Path) -> None:
    # A rate at which bf16 weights do not move: the export is what was started from.
    result = launch(2, f"init.from={published}", "steps=1", "optim.lr=1e-9", "schedule=constant")
    assert result.returncode == 0, result.stderr[-3000:]
    export = tmp_path / "run" / "export"
    before, after = (load_file(f / "model.safetensors") for f in (published, export))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    shape = json.loads((export / "config.json").read_text())
    assert shape == json.loads((published / "config.json").read_text())


@pytest.mark.distributed
def test_a_job_refuses_a_mask_token_in_use(launch: Callable[..., Any], published: Path) -> None:
    rewrite(published, lambda raw: raw["dflash_config"].update(mask_token_id=0))
    result = launch(2, f"init.from={published}")
    assert result.returncode != 0
    said = [line for line in result.stderr.splitlines() if line.startswith("dflash_mp: ")]
    assert len(said) == 1, result.stderr[-2000:]
    assert said[0].startswith(f"dflash_mp: init.from={published}: drafter.mask_token_id=0 is")
