"""The sizes that cost time and memory, read from configurations.

Both models are built on torch's meta device, which holds no data: parameters are counted where
they are, so experts, gates and linear attention of any architecture are counted as they are run.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from dflash_mp.config import DrafterConfig, TargetConfig, UserError
from dflash_mp.drafter.hf_config import default_layer_ids, make_drafter_config
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.target.layers import decoder_layers
from dflash_mp.target.model import load_config

SLIDING = "sliding_attention"
ATTENTION = ("full_attention", SLIDING, "chunked_attention")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer of the target."""

    kind: str
    """Its entry in the config's ``layer_types``."""

    products: int
    """Matrix elements that one token is multiplied with; of experts only the chosen ones."""

    outputs: int
    """Elements that these products write for a token."""


@dataclass(frozen=True)
class TargetShape:
    """The frozen model."""

    layers: tuple[LayerShape, ...]
    parameters: int
    hidden: int
    vocabulary: int
    attention_width: int
    """Query heads times their size."""

    key_value_width: int
    """Heads of keys and values times their size, which is what a layer caches twice."""

    state: tuple[int, int, int]
    """Heads, key size and value size of linear attention; zeros without."""

    tied: bool
    """Whether the LM head is the embedding."""

    packs: bool
    """Whether documents share a row; linear attention needs a row for each."""


def read_target(target: TargetConfig) -> tuple[TargetShape, Any]:
    """The target's shape and its configuration.

    Raises:
        UserError: no config, or one that transformers cannot build a causal model from.
    """
    config = load_config(target)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, trust_remote_code=target.trust_remote_code
            )
    except (ValueError, ImportError) as error:
        raise UserError(
            f"target.name={target.name}: cannot build it: {str(error).splitlines()[0]}"
        ) from None
    return target_shape(model, config), config


def target_shape(model: nn.Module, config: Any) -> TargetShape:
    """The shape of a causal language model, on the meta device or not."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    share = expert_share(text)
    layers = decoder_layers(model)
    linear = "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"
    state_heads, key_size, value_size = (getattr(text, key, 0) or 0 for key in linear)
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return TargetShape(
        layers=tuple(
            layer_shape(layer, kind, share) for layer, kind in zip(layers, kinds, strict=True)
        ),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        attention_width=heads * size,
        key_value_width=(getattr(text, "num_key_value_heads", None) or heads) * size,
        state=(state_heads, key_size, value_size),
        tied=bool(config.tie_word_embeddings or text.tie_word_embeddings),
        packs=set(kinds) <= set(ATTENTION),
    )


def expert_share(text: Any) -> float:
    """Experts that a token passes over all experts; 1 for a dense model."""
    count = next((getattr(text, key) for key in EXPERT_COUNTS if getattr(text, key, None)), None)
    chosen = getattr(text, "num_experts_per_tok", None)
    return chosen / count if count and chosen else 1.0


def layer_shape(layer: nn.Module, kind: str, share: float) -> LayerShape:
    """Count the matrices of one layer; ``share`` of those of experts.

    A matrix is ``[out, in]``, that of all experts ``[experts, out, in]``, and a depthwise
    convolution ``[channels, 1, taps]``.
    """
    products, outputs = 0.0, 0.0
    for name, parameter in layer.named_parameters():
        if parameter.ndim < 2:
            continue
        if ".experts." in name:
            outputs += share * parameter.shape[:-1].numel()
            products += share * parameter.numel()
        else:
            outputs += parameter.shape[0]
            products += parameter.numel()
    return LayerShape(kind, round(products), round(outputs))


def layer_ids(target: TargetConfig, drafter: DrafterConfig, layers: int) -> list[int]:
    """Tapped layers: the configured ones, or spread over ``layers``."""
    return target.layer_ids or default_layer_ids(layers, drafter.tapped_layers)


def drafter_shape(
    config: Any, drafter: DrafterConfig, taps: list[int]
) -> tuple[Qwen3Config, list[torch.Size]]:
    """The draft model's configuration for a target's, and the shapes of its parameters."""
    # Which token stands for the mask changes no size.
    mine = make_drafter_config(config, drafter, taps, mask_token_id=drafter.mask_token_id or 0)
    with torch.device("meta"):
        model = DFlashDraftModel(mine)
    return mine, [parameter.shape for parameter in model.parameters()]
