"""Start from a published drafter: whether it belongs to the target, and what it decides.

Its shape, tapped layers and mask token take the place of the configured ones; its rotary settings
and widths are kept, too. Everything is checked before the ranks meet, without reading the weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, Qwen3Config

from dflash_mp.acceptance import check_pair
from dflash_mp.config import TrainConfig, UserError, require
from dflash_mp.drafter.checkpoint_format import check_tensors, load_drafter, read_drafter_config
from dflash_mp.drafter.hf_config import check_layer_ids, head_settings, read_config


def source_of(config: TrainConfig) -> str | None:
    """``init.from``: a folder or hub name; None starts from random weights."""
    source = config.init["from"]
    return source and (str(Path(source).expanduser()) if source.startswith("~") else source)


@contextmanager
def naming_source(config: TrainConfig) -> Iterator[None]:
    """Say of a user's mistake that it is about ``init.from``, where that is set."""
    source = source_of(config)
    try:
        yield
    except UserError as error:
        if source is None:
            raise
        raise UserError(f"init.from={source}: {error}") from None


def adopt_shape(config: TrainConfig) -> TrainConfig:
    """``config`` with the shape, tapped layers and mask token of the drafter in ``init.from``.

    Raises:
        UserError: no drafter there, one with tensors missing, left over or of another shape, or
            one that contradicts ``target.layer_ids`` or ``drafter.mask_token_id``.
    """
    source = source_of(config)
    if source is None:
        return config
    with naming_source(config):
        published = _read(config, source)
        check_tensors(source, published, config.init["revision"])
        ids = list(published.dflash_config["target_layer_ids"])
        mask_token_id = published.dflash_config["mask_token_id"]
        for key, asked, found in (
            ("target.layer_ids", config.target.layer_ids, ids),
            ("drafter.mask_token_id", config.drafter.mask_token_id, mask_token_id),
        ):
            require(
                asked is None or asked == found,
                f"{key}={asked}, but that drafter was made with {found}: leave the key out",
            )
        drafter = replace(
            config.drafter,
            layers=published.num_hidden_layers,
            block_size=published.block_size,
            tapped_layers=len(ids),
            sliding_layers=published.layer_types.count("sliding_attention"),
            sliding_window=published.sliding_window or config.drafter.sliding_window,
            mask_token_id=mask_token_id,
        )
        return replace(config, drafter=drafter, target=replace(config.target, layer_ids=ids))


def published_config(config: TrainConfig, target_config: PretrainedConfig) -> Qwen3Config | None:
    """The draft model's config as it was published; None without ``init.from``.

    Raises:
        UserError: it was not made for this target; names the mismatch.
    """
    source = source_of(config)
    if source is None:
        return None
    text = target_config.get_text_config()
    with naming_source(config):
        published = _read(config, source)
        check_pair(published, target_config)
        check_layer_ids(published.dflash_config["target_layer_ids"], text.num_hidden_layers)
    # Older configs leave these out.
    published.num_target_layers = text.num_hidden_layers
    published.dflash_config |= head_settings(text)
    return published


def set_initial_weights(model: nn.Module, config: TrainConfig) -> bool:
    """Copy the published weights into ``model``; False without ``init.from``."""
    source = source_of(config)
    if source is None:
        return False
    with naming_source(config):
        published = load_drafter(source, torch.float32, revision=config.init["revision"])
    model.load_state_dict(published.state_dict())
    return True


def _read(config: TrainConfig, source: str) -> Qwen3Config:
    return read_config(read_drafter_config(source, config.init["revision"]))
