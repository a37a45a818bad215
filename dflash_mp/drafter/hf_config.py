"""The draft model's ``config.json``: derived from the target, read and written in z-lab's keys.

Keys and their readers: z-lab/dflash, SpecForge, vLLM and SGLang. Rotary settings are written in
both spellings (``rope_theta`` and ``rope_parameters``), the block size in both places, because
each of those readers knows only one.
"""

from typing import Any

from transformers import PretrainedConfig, Qwen3Config

from dflash_mp.config import DrafterConfig, require

DEFAULT_ROPE_THETA = 10000.0
NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
"""Without these of the target there is no drafter that fits it (Bloom, Mamba)."""


def default_layer_ids(num_target_layers: int, count: int) -> list[int]:
    """Which target layers to tap: evenly spaced from 1 to ``N - 3``.

    ``round(1 + i * (N - 4) / (count - 1))`` with banker's rounding, and the middle layer for
    ``count == 1``, as z-lab/dflash ``build_target_layer_ids``.

    Raises:
        UserError: the target is too shallow for that many distinct layers.
    """
    if count == 1:
        ids = [num_target_layers // 2]
    else:
        span = num_target_layers - 4
        ids = [round(1 + i * span / (count - 1)) for i in range(count)]
    check_layer_ids(ids, num_target_layers)
    return ids


def check_layer_ids(layer_ids: list[int], num_target_layers: int) -> None:
    """Refuse tapped layers that the target or a serving engine cannot provide."""
    where = f"target.layer_ids={layer_ids} for a target of {num_target_layers} layers"
    require(bool(layer_ids), f"{where}: name at least one layer")
    require(len(set(layer_ids)) == len(layer_ids), f"{where}: a layer is repeated")
    require(sorted(layer_ids) == list(layer_ids), f"{where}: must increase")
    require(
        layer_ids[0] >= 0 and layer_ids[-1] < num_target_layers,
        f"{where}: layers count from 0 to {num_target_layers - 1}",
    )
    require(
        layer_ids[-1] != num_target_layers - 1,
        f"{where}: the last layer cannot be tapped, because libraries disagree on whether its "
        f"output is taken before or after the final norm; use {num_target_layers - 2} at most",
    )


def make_drafter_config(
    target_config: PretrainedConfig,
    drafter: DrafterConfig,
    layer_ids: list[int],
    mask_token_id: int,
) -> Qwen3Config:
    """The draft model that fits ``target_config``.

    Widths, heads and vocabulary are the target's (its text part for a multimodal one) unless
    ``drafter`` names other ones. Rotary embedding is the plain one over whole heads with the
    target's base: the target's partial, multimodal, scaled or per-layer settings do not apply to
    the drafter's own attention.

    Raises:
        UserError: layer ids or mask token do not fit the target.
    """
    text = target_config.get_text_config()
    missing = [name for name in NEEDED if getattr(text, name, None) is None]
    require(
        not missing,
        f"a target of type {text.model_type} cannot have a DFlash drafter here: its config.json "
        f"says nothing of {', '.join(missing)}",
    )
    check_layer_ids(layer_ids, text.num_hidden_layers)
    check_mask_token_id(mask_token_id, text.vocab_size)
    heads, shared = attention_heads(text, drafter)
    sliding = drafter.sliding_layers
    special = {"mask_token_id": mask_token_id, "target_layer_ids": list(layer_ids)}
    special |= head_settings(text)
    fields = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": drafter.intermediate_size or _mlp_width(text),
        "num_hidden_layers": drafter.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": drafter.head_dim
        or getattr(text, "head_dim", None)
        or text.hidden_size // text.num_attention_heads,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "max_position_embeddings": text.max_position_embeddings,
        "initializer_range": getattr(text, "initializer_range", 0.02),
        "rope_theta": rope_theta(text),
        "layer_types": ["sliding_attention"] * sliding
        + ["full_attention"] * (drafter.layers - sliding),
        "use_sliding_window": sliding > 0,
        "sliding_window": drafter.sliding_window if sliding else None,
        "block_size": drafter.block_size,
        "num_target_layers": text.num_hidden_layers,
        "dflash_config": special,
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
    }
    return read_config(fields)


def attention_heads(text: PretrainedConfig, drafter: DrafterConfig) -> tuple[int, int]:
    """Query heads and key-value heads: those of ``drafter``, else those of the target.

    Raises:
        UserError: the first is no multiple of the second.
    """
    heads = drafter.attention_heads or text.num_attention_heads
    shared = drafter.key_value_heads or getattr(text, "num_key_value_heads", None) or heads
    require(
        heads % shared == 0,
        f"drafter.attention_heads={heads}: must be a multiple of drafter.key_value_heads={shared}",
    )
    return heads, shared


def _mlp_width(text: PretrainedConfig) -> int:
    """The target's MLP width; three hidden sizes where it has none (experts) or one per layer."""
    width = getattr(text, "intermediate_size", None)
    return width if isinstance(width, int) and width > 0 else 3 * text.hidden_size


def embedding_scale(text: PretrainedConfig) -> float:
    """What the target multiplies its embeddings with: ``sqrt(H)`` in Gemma models, else 1."""
    return text.hidden_size**0.5 if text.model_type.startswith("gemma") else 1.0


def logit_softcap(text: PretrainedConfig) -> float | None:
    """``c`` where the target's logits are ``c * tanh(logits / c)`` (Gemma), else None."""
    return getattr(text, "final_logit_softcapping", None)


def head_settings(text: PretrainedConfig) -> dict[str, float]:
    """What of embedding and head the drafter's reader must know; empty for most targets."""
    settings = {}
    if (scale := embedding_scale(text)) != 1.0:
        settings["input_embedding_scale"] = scale
    if (softcap := logit_softcap(text)) is not None:
        settings["final_logit_softcapping"] = softcap
    return settings


def rope_theta(text: PretrainedConfig) -> float:
    """The rotary base of a text config, whichever way it spells it; of full layers if nested."""
    parameters = getattr(text, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention") or parameters
    theta = parameters.get("rope_theta") or getattr(text, "rope_theta", None)
    return float(theta or DEFAULT_ROPE_THETA)


def check_mask_token_id(mask_token_id: int, vocab_size: int) -> None:
    """Refuse a mask token without a row in the target's embedding table."""
    require(
        0 <= mask_token_id < vocab_size,
        f"drafter.mask_token_id={mask_token_id}: the target's embedding has rows 0 to "
        f"{vocab_size - 1}",
    )


def read_config(raw: dict[str, Any]) -> Qwen3Config:
    """A published drafter's ``config.json`` in any of its dialects.

    Accepts ``block_size`` at the top or in ``dflash_config``, ``rope_theta`` (+ ``rope_scaling``)
    or ``rope_parameters``, and missing ``layer_types`` or ``target_layer_ids``.

    Returns:
        A ``Qwen3Config`` with ``block_size``, ``num_target_layers``, ``is_causal`` and
        ``dflash_config`` (``mask_token_id``, ``target_layer_ids``, ``block_size``) set.

    Raises:
        UserError: not a DFlash drafter, or one whose settings contradict each other.
    """
    for key in _REQUIRED:
        _need(raw.get(key), key)
    special = dict(raw.get("dflash_config") or {})
    block_size = raw.get("block_size", special.get("block_size"))
    _need(block_size, "block_size")
    _need(special.get("mask_token_id"), "dflash_config.mask_token_id")
    require(
        special.get("block_size", block_size) == block_size,
        f"drafter config: block_size={block_size}, but dflash_config.block_size="
        f"{special.get('block_size')}",
    )
    num_target_layers: Any = raw.get("num_target_layers")
    layer_ids = special.get("target_layer_ids")
    if layer_ids is None:
        _need(num_target_layers, "num_target_layers (nor dflash_config.target_layer_ids)")
        layer_ids = default_layer_ids(int(num_target_layers), raw["num_hidden_layers"])
    special |= {"block_size": block_size, "target_layer_ids": list(layer_ids)}
    fields = {key: value for key, value in raw.items() if key not in _REWRITTEN}
    fields |= _sliding_fields(raw)
    config = Qwen3Config(**fields, rope_parameters=_rope_parameters(raw))
    config.block_size = block_size
    config.num_target_layers = num_target_layers
    config.dflash_config = special
    config.is_causal = raw.get("is_causal", special.get("causal"))
    config.tie_word_embeddings = False
    check_mask_token_id(special["mask_token_id"], config.vocab_size)
    return config


_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
"""Keys for which ``Qwen3Config`` would silently take the sizes of some 7B model."""

_REWRITTEN = frozenset(
    [
        "architectures",
        "auto_map",
        "model_type",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "tie_word_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "is_causal",
        "layer_types",
        "sliding_window",
        "use_sliding_window",
        "block_size",
        "dflash_config",
        "num_target_layers",
    ]
)
"""Keys that ``read_config`` interprets itself, or that say nothing about the model."""


def _need(value: Any, key: str) -> None:
    require(value is not None, f"drafter config: no {key}: not a DFlash drafter")


def _rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """One flat rotary setting; Qwen3 rotates whole heads, so partial and multimodal keys go."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    parameters = dict(parameters.get("full_attention") or parameters)
    for key in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        parameters.pop(key, None)
    kind = parameters.pop("type", None)
    parameters.setdefault("rope_type", kind or "default")
    if parameters["rope_type"] == "mrope":
        parameters["rope_type"] = "default"
    theta = parameters.get("rope_theta") or raw.get("rope_theta") or DEFAULT_ROPE_THETA
    parameters["rope_theta"] = float(theta)
    return parameters


def _sliding_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """``layer_types`` and its window, also where an older config leaves the types out."""
    layers = raw["num_hidden_layers"]
    window = raw.get("sliding_window")
    types = raw.get("layer_types")
    if types is None:
        first = raw.get("max_window_layers", layers) if raw.get("use_sliding_window") else layers
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    require(
        len(types) == layers,
        f"drafter config: {len(types)} layer_types for num_hidden_layers={layers}",
    )
    unknown = set(types) - {"sliding_attention", "full_attention"}
    require(not unknown, f"drafter config: unknown layer_types {sorted(unknown)}")
    slides = "sliding_attention" in types
    require(
        not slides or (isinstance(window, int) and window > 0),
        f"drafter config: sliding layers need a sliding_window, found {window}",
    )
    return {
        "layer_types": list(types),
        "max_window_layers": raw.get("max_window_layers", layers),
        "use_sliding_window": slides,
        "sliding_window": window if slides else None,
    }


def config_json(config: Qwen3Config, dtype: str = "bfloat16") -> dict[str, Any]:
    """Everything that z-lab, SpecForge, vLLM and SGLang read, as JSON-ready values.

    Raises:
        UserError: ``num_target_layers`` is unknown, without which z-lab's package fails.

    Args:
        config: from ``make_drafter_config`` or ``read_config``.
        dtype: of the stored weights.
    """
    _need(config.num_target_layers, "num_target_layers")
    rope = dict(config.rope_parameters)
    scaled = rope["rope_type"] != "default"
    written = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": dict(config.dflash_config),
        "num_target_layers": config.num_target_layers,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    for key in _COPIED:
        written[key] = getattr(config, key)
    if config.is_causal is not None:
        written["is_causal"] = config.is_causal
    return written


_COPIED = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
    "layer_types",
    "max_window_layers",
    "sliding_window",
    "use_sliding_window",
    "attention_bias",
    "attention_dropout",
    "initializer_range",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
]
"""Keys of ``Qwen3Config`` that are written as they are."""
