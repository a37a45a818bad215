"""The files of ``conf/loss``, as the command line names them."""

import pytest
from hydra import compose, initialize_config_dir

from dflash_mp.config import LossConfig, TrainConfig, config_dir, to_config


@pytest.mark.parametrize("name", ["ce", "dpace", "kl", "tv", "ce+kl", "ce_kl"])
def test_every_objective_has_a_file_of_its_name(name: str) -> None:
    with initialize_config_dir(config_dir(), version_base="1.3"):
        raw = compose("train", overrides=[f"loss={name}", "loss.gamma=3"])
    loss = to_config(raw, TrainConfig).loss
    assert isinstance(loss, LossConfig)
    assert loss.kind == name.replace("_", "+")
    assert loss.gamma == 3
