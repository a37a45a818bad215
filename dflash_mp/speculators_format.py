"""The drafter in the layout of vllm-project/speculators: same tensors, a nested ``config.json``.

Read by its release 0.9.0 and by vLLM. As for z-lab's layout, embedding and head come from the
target (there: the verifier).
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from dflash_mp.drafter.checkpoint_format import save_drafter
from dflash_mp.drafter.hf_config import config_json
from dflash_mp.drafter.model import DFlashDraftModel

log = logging.getLogger(__name__)

NOT_OF_THE_LAYERS = (
    "architectures",
    "block_size",
    "dflash_config",
    "num_target_layers",
    "is_causal",
    "dtype",
)
SPECULATORS_VERSION = "0.9.0"


def write_speculators(
    folder: Path, model: DFlashDraftModel, target: PretrainedConfig, target_name: str
) -> None:
    """Write ``model.safetensors`` (bf16) and ``config.json`` for the target called so."""
    save_drafter(model, folder)
    config = speculators_config(config_json(model.config), target, target_name)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if "sliding_attention" in model.config.layer_types:
        log.warning(
            "speculators 0.9.0 gives all slots of a block the window of its anchor; this drafter, "
            "z-lab and SpecForge let the window slide with the slot: acceptance may differ: "
            "measure it there before serving"
        )


def speculators_config(
    drafter: dict[str, Any], target: PretrainedConfig, target_name: str
) -> dict[str, Any]:
    """The nested ``config.json`` for a drafter whose z-lab one is ``drafter``.

    That library counts the embedding's output as layer 0, so tapped layers are one higher there.
    """
    block_size = drafter["block_size"]
    special = drafter["dflash_config"]
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": block_size - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": target_name,
                "architectures": list(target.architectures or []),
            },
        },
        "transformer_layer_config": {
            key: value for key, value in drafter.items() if key not in NOT_OF_THE_LAYERS
        },
        "aux_hidden_state_layer_ids": [layer + 1 for layer in special["target_layer_ids"]],
        "mask_token_id": special["mask_token_id"],
        "block_size": block_size,
        "draft_vocab_size": drafter["vocab_size"],
        "target_hidden_size": None,
        "sample_from_anchor": False,
        "sliding_window_non_causal": drafter.get("is_causal") is False,
        "tie_word_embeddings": False,
        "dtype": str(torch.bfloat16).removeprefix("torch."),
    }
