"""The folder that is handed to users: weights, config, model card, and numbers to check it by.

``parity.json`` holds what was measured when the folder was written, together with a probe: hidden
states of fixed made-up inputs, which anybody can compute again from the weights.

Shapes: C context tokens, B block size, H hidden size, n tapped layers.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from dflash_mp import __version__
from dflash_mp.config import UserError, require
from dflash_mp.drafter.checkpoint_format import drafter_state, load_drafter, save_drafter
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.model import DFlashDraftModel, DraftCache
from dflash_mp.drafter.weight_files import SINGLE
from dflash_mp.progress import progress_bar

PARITY = "parity.json"
CARD = "README.md"
PROBE_CONTEXT = 24
PROBE_KEPT = 8
PROBE_TOLERANCE = 1e-3

Facts = Mapping[str, Any]


def write_export(
    folder: Path, model: DFlashDraftModel, facts: Facts, head: FrozenHead | None = None
) -> dict[str, Any]:
    """Write weights (bf16), ``config.json``, ``parity.json`` and ``README.md``; return the parity.

    Args:
        model: the trained drafter, not wrapped.
        facts: JSON values about its making; the card shows those it knows (``CARD_FACTS``).
        head: the target's; with it the logits of the written and the trained weights are compared.
    """
    trained = DFlashDraftModel(model.config)
    with progress_bar(desc="export", total=3, unit="part", delay=1, leave=False) as bar:
        save_drafter(model, folder)
        bar.update()
        trained.load_state_dict(drafter_state(model, torch.float32))
        before = probe(trained)
        bar.update()
        after = probe(load_drafter(folder))
        bar.update()
    special = model.config.dflash_config
    parity = {
        "versions": {
            "dflash_mp": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "block_size": model.config.block_size,
        "mask_token_id": special["mask_token_id"],
        "target_layer_ids": special["target_layer_ids"],
        "weights_sha256": _sha256(folder / SINGLE),
        "against_training_model": compare(before, after, head),
        "probe": after[:, :PROBE_KEPT].tolist(),
        "facts": dict(facts),
    }
    _write(folder, parity)
    return parity


def add_facts(folder: Path, facts: Facts) -> None:
    """Add what became known after the export, such as its measured acceptance; rewrite the card."""
    parity = read_parity(folder)
    parity["facts"] |= facts
    _write(folder, parity)


def read_parity(folder: Path) -> dict[str, Any]:
    """``parity.json`` of an export; raises ``UserError`` if it is missing or damaged."""
    path = folder / PARITY
    require(path.is_file(), f"{folder}: no {PARITY} in it, so there is nothing to check it by")
    try:
        parity = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    require(
        isinstance(parity, dict) and {"weights_sha256", "probe", "facts"} <= parity.keys(),
        f"{path}: not written by dflash_mp.export",
    )
    return dict(parity)


def check_export(folder: Path) -> dict[str, str]:
    """Compare an export with its ``parity.json``: one line for each thing that was checked.

    Raises ``UserError`` naming the first thing that does not agree.
    """
    parity = read_parity(folder)
    model = load_drafter(folder)
    found = _sha256(folder / SINGLE)
    require(
        found == parity["weights_sha256"],
        f"{folder}: the SHA-256 of {SINGLE} is {found[:12]}..., but {PARITY} says "
        f"{parity['weights_sha256'][:12]}...: the weights were changed after the export",
    )
    special = model.config.dflash_config
    for key, value in (
        ("block_size", model.config.block_size),
        ("mask_token_id", special["mask_token_id"]),
        ("target_layer_ids", special["target_layer_ids"]),
    ):
        require(
            value == parity[key], f"{folder}: config.json has {key}={value}, {PARITY} {parity[key]}"
        )
    expected = torch.tensor(parity["probe"])
    difference = float((probe(model)[:, :PROBE_KEPT] - expected).abs().max())
    require(
        difference <= PROBE_TOLERANCE,
        f"{folder}: hidden states of the probe differ by {difference:.2e} from those in {PARITY} "
        f"(at most {PROBE_TOLERANCE:.0e}): config.json or this version of the code computes "
        "something else",
    )
    return {
        "tensors": f"{len(model.state_dict())}, all expected and none left over",
        "weights": f"SHA-256 {found[:16]}...",
        "config": f"block size {model.config.block_size}, mask token {special['mask_token_id']}, "
        f"target layers {special['target_layer_ids']}",
        "probe": f"hidden states within {difference:.1e}",
    }


@torch.no_grad()
def probe(model: DFlashDraftModel) -> Tensor:
    """Hidden states ``[B, H]`` of a block behind made-up context, which comes in two parts."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    width = config.hidden_size * len(config.dflash_config["target_layer_ids"])
    features = torch.randn(PROBE_CONTEXT, width, generator=generator)  # [C, n*H]
    noise = torch.randn(2, config.block_size, config.hidden_size, generator=generator)
    cache = DraftCache()
    model.draft(noise[0], features[: PROBE_CONTEXT // 2], cache)
    return model.draft(noise[1], features[PROBE_CONTEXT // 2 :], cache)


def compare(trained: Tensor, exported: Tensor, head: FrozenHead | None) -> dict[str, float]:
    """How far the hidden states ``[B, H]`` of two versions of a drafter are apart.

    With ``head`` also their logits, and the share of slots with the same most likely token.
    """
    values = {"max_hidden_difference": float((trained - exported).abs().max())}
    if head is None:
        return values
    weight = head.weight
    first, second = (
        head.logits(hidden.to(device=weight.device, dtype=weight.dtype)).float()
        for hidden in (trained, exported)
    )
    return values | {
        "max_logit_difference": float((first - second).abs().max()),
        "max_logit": float(first.abs().max()),
        "same_top_token": float((first.argmax(-1) == second.argmax(-1)).float().mean()),
    }


CARD_FACTS = {
    "target": "target",
    "target_revision": "target revision",
    "data": "training data",
    "data_fingerprint": "data fingerprint",
    "conversations": "training conversations",
    "tokens": "training tokens",
    "steps": "optimizer steps",
    "objective": "objective",
    "acceptance_length": "acceptance length, really decoded, pooled over target forwards",
    "prompt_acceptance_length": "acceptance length, mean over prompts",
    "prompts": "held-out prompts decoded",
    "max_new_tokens": "new tokens a prompt, at most",
    "simulated_acceptance_length": "acceptance length, simulated by a walk over held-out text",
}
"""Facts that the model card shows, and how it calls them."""


def model_card(parity: Mapping[str, Any]) -> str:
    """``README.md`` of an export, from its parity."""
    facts = parity["facts"]
    target = facts.get("target", "its target")
    drafted = parity["block_size"] - 1
    lines = [f"- {name}: {_shown(facts[key])}" for key, name in CARD_FACTS.items() if key in facts]
    against = parity["against_training_model"]
    if "max_logit_difference" in against:
        lines.append(
            f"- largest logit difference to the training model: "
            f"{against['max_logit_difference']:.3g} (logits up to {against['max_logit']:.3g})"
        )
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "tags: [dflash, speculative-decoding]",
            "---",
            "",
            f"# DFlash drafter for {target}",
            "",
            f"Drafts {drafted} tokens at a time (block size {parity['block_size']}); the target "
            "verifies them in one forward, and its output does not change. Serve it with "
            f"{drafted} speculative tokens. Embedding and LM head are the target's and not in "
            "here.",
            "",
            f"- target layers tapped: {parity['target_layer_ids']} (counted from 0)",
            f"- mask token: {parity['mask_token_id']}",
            *lines,
            "",
            "An acceptance length is the number of tokens that one target forward commits, the "
            "target's own included, greedy, one prompt at a time.",
            "",
            "`parity.json` has these numbers, versions and a probe; check this folder with",
            "`python -m dflash_mp.export check=<this folder>`.",
            "",
        ]
    )


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _write(folder: Path, parity: dict[str, Any]) -> None:
    (folder / PARITY).write_text(json.dumps(parity, indent=1) + "\n")
    (folder / CARD).write_text(model_card(parity))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
