"""Every choice composes and validates; every key is documented; recipes follow the target."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dflash_mp.cast import role_timeout
from dflash_mp.config import TrainConfig, UserError, config_dir, config_keys, to_config

CONF = Path(config_dir())
# Only the shipped sets need no file.
SHIPPED = ("data=mixed", "data=narrow", "data=smollm2", "target=smollm2")
GROUPS = ("target", "drafter", "data", "loss", "schedule", "experiment")
CHOICES = [f"{group}={file.stem}" for group in GROUPS for file in sorted((CONF / group).iterdir())]


def composed(*overrides: str) -> TrainConfig:
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return to_config(compose("train", list(overrides)), TrainConfig)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes_and_validates(choice: str) -> None:
    needs_data = choice.startswith(("target=", "data=")) and choice not in SHIPPED
    name = ["target.name=some/model"] if choice == "target=hub" else []
    overrides = [*name, *(["data.train=x.jsonl"] if needs_data else [])]
    config = composed(choice, *overrides)
    for key, value in stated(choice):
        if key not in [word.split("=")[0] for word in overrides]:
            assert OmegaConf.select(OmegaConf.structured(config), key) == value, key


def stated(choice: str) -> Iterator[tuple[str, object]]:
    """The dotted keys that the file of a choice gives a plain value, with it."""
    group, option = choice.split("=")
    file = CONF / group / f"{option}.yaml"
    whole = "@package _global_" in file.read_text()
    parts = [((), OmegaConf.to_container(OmegaConf.load(file)))]
    while parts:
        path, part = parts.pop()
        for key, value in part.items():
            if isinstance(value, dict):
                parts.append(((*path, key), value))
            elif key not in ("defaults", "hydra") and "${" not in str(value):
                yield ".".join([*([] if whole else [group]), *path, key]), value


def test_an_eight_gpu_target_brings_its_drafter_and_takes_overrides() -> None:
    config = composed("target=qwen3_8b", "data.train=my.jsonl", "optim.lr=3e-4")
    assert (config.drafter.layers, config.drafter.block_size) == (5, 16)
    assert config.target.name == "Qwen/Qwen3-8B"
    assert config.optim.lr == 3e-4
    assert config.data.heldout is None
    assert config.data.max_length > 1000
    other = composed("target=qwen3_8b", "data.train=my.jsonl", "drafter=dflash_2l")
    assert (other.drafter.layers, other.drafter.block_size) == (2, 8)


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_key_has_a_comment_above_it_and_none_beside_it(file: Path) -> None:
    """Defaults are documented where they are; a recipe that only repeats keys says why on top."""
    lines = file.read_text().splitlines()
    relative = file.relative_to(CONF)
    explained = relative.parts[0] in ("recipe", "experiment", "hydra")
    assert any(line.startswith("#") for line in lines[:3])
    for number, line in enumerate(lines):
        if line.startswith(("#", " ", "-")) or not line or explained:
            continue
        assert (
            line.startswith("defaults:")
            or lines[number - 1].lstrip().startswith("#")
            or (line.endswith(":") and lines[number + 1].lstrip().startswith("#"))
        ), f"{relative}:{number + 1}: {line}"
    assert not [line for line in lines if " #" in line and not line.lstrip().startswith("#")]


def test_every_key_of_the_schema_has_a_default_or_is_asked_for() -> None:
    with initialize_config_dir(config_dir(), version_base="1.3"):
        raw = compose("train", [])
    for key in config_keys(TrainConfig):
        section: object = raw
        for part in key.split("."):
            assert part in section, f"{key} is in the schema but in no file of conf/"
            section = section._get_node(part)


def test_taps_and_named_layers_must_agree() -> None:
    with pytest.raises(UserError, match=r"target\.layer_ids=\[1, 2\] names 2 layers"):
        composed("target.layer_ids=[1,2]")


@pytest.mark.parametrize("key", ["failure.setup_s", "failure.step_s", "failure.save_s"])
def test_a_collective_outlasts_whatever_another_rank_may_do_before_it(key: str) -> None:
    others = {"failure.setup_s": 10, "failure.step_s": 10, "failure.save_s": 10} | {key: 3000}
    config = composed(*(f"{name}={seconds}" for name, seconds in others.items()))
    assert role_timeout(config).total_seconds() > 3000 + config.wire.timeout_s
