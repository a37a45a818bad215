"""Acceptance measured by real decoding: one plain dict per prompt.

What they add up to is in ``acceptance_summary``.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PretrainedConfig, PreTrainedModel, Qwen3Config

from dflash_mp.acceptance_summary import Row
from dflash_mp.config import require
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.hf_config import embedding_scale, logit_softcap
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.speculate import DecodeSettings, plain_decode, scores, speculative_decode

TIE = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.bfloat16: 0.5,
    torch.float16: 0.1,
}
"""Logit gaps below which two tokens count as tied: a block of tokens and single tokens go through
different matrix products, which round differently."""

SIMULATION_TOLERANCE = 0.15


def check_pair(drafter: Qwen3Config, target: PretrainedConfig) -> None:
    """Raise ``UserError`` naming the first mismatch if ``drafter`` was not made for ``target``."""
    text = target.get_text_config()
    special = drafter.dflash_config
    layers = text.num_hidden_layers
    where = "the drafter does not belong to this target"
    for key, mine, yours in (
        ("hidden_size", drafter.hidden_size, text.hidden_size),
        ("vocab_size", drafter.vocab_size, text.vocab_size),
        ("num_target_layers", drafter.num_target_layers or layers, layers),
    ):
        require(mine == yours, f"{where}: its {key} is {mine}, the target's is {yours}")
    ids = special["target_layer_ids"]
    require(
        max(ids) < layers,
        f"{where}: it taps the layers {ids}, the target has layers 0 to {layers - 1}",
    )


def head_of(target: PreTrainedModel) -> FrozenHead:
    """Embedding and head of a loaded target; shares its memory."""
    embedding = target.get_input_embeddings().weight.detach()
    head = target.get_output_embeddings().weight.detach()
    text = target.config.get_text_config()
    return FrozenHead(
        embedding,
        None if head.data_ptr() == embedding.data_ptr() else head,
        embedding_scale(text),
        logit_softcap(text),
    )


def evaluate_prompts(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    prompts: Sequence[tuple[int, Sequence[int]]],
    settings: DecodeSettings,
    block_sizes: Sequence[int] | None = None,
    plain: bool = True,
    done: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Decode ``(number, token ids)`` prompts with every block size; one JSON-ready row for each.

    Args:
        block_sizes: ``None`` is the drafter's own.
        plain: also decode with the target alone, for its text and its time. Without, each text is
            checked by one target forward, which is cheaper and gives no time.
        done: called after each row.

    Raises ``UserError`` for a drafter that does not belong to the target, and for an empty prompt
    or one that fills the target's context.
    """
    check_pair(drafter.config, target.config)
    head = head_of(target)
    rows = []
    for number, prompt in prompts:
        # Every prompt has noise of its own.
        here = replace(settings, seed=(settings.seed << 32) + number)
        alone = plain_decode(target, prompt, here) if plain else None
        for block_size in block_sizes or [drafter.config.block_size]:
            sized = replace(here, block_size=block_size)
            decoded = speculative_decode(target, drafter, head, prompt, sized)
            same = alone is not None and decoded.tokens == alone.tokens
            gap = 0.0 if same else largest_gap(target, prompt, decoded.tokens, here)
            rows.append(
                {
                    "prompt": number,
                    "prompt_tokens": len(prompt),
                    "block_size": block_size,
                    **vars(decoded),
                    "plain_tokens": None if alone is None else len(alone.tokens),
                    "plain_seconds": None if alone is None else alone.decode_seconds,
                    "verdict": verdict(same, alone is None, gap, target.dtype),
                    "largest_gap": gap,
                }
            )
            done()
    return rows


@torch.no_grad()
def largest_gap(
    target: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], settings: DecodeSettings
) -> float:
    """How far ``tokens`` is from the target's own choices after ``prompt``, in units of logits.

    One forward over the whole text: for each token the score of the target's choice at that place
    minus the token's. 0 means that plain decoding gives exactly this text.
    """
    device = next(target.parameters()).device
    text = torch.tensor([[*prompt, *tokens]], device=device)
    output = target(input_ids=text[:, :-1], use_cache=False, logits_to_keep=len(tokens))
    scored = scores(output.logits[0], len(prompt), settings).float()  # [T, V]
    chosen = scored.gather(1, text[0, len(prompt) :, None])[:, 0]  # [T]
    return float((scored.max(dim=1).values - chosen).max())


def simulation_warning(simulated: float, measured: float) -> str | None:
    """One line on the likely causes when the walk and real decoding are far apart, else ``None``.

    Both are acceptance lengths of one drafter, the first by the walk over held-out text.
    """
    apart = abs(simulated - measured) / measured
    if apart <= SIMULATION_TOLERANCE:
        return None
    return (
        f"simulated acceptance length {simulated:.2f} and measured {measured:.2f} are "
        f"{apart:.0%} apart: the held-out responses are not this target's own greedy text (another "
        "model, sampling, another template or system prompt), they end elsewhere (length limit, "
        "stop token), or the drafter was changed in between (weights cast, other layers tapped, "
        "another mask token)"
    )


def verdict(same: bool, unchecked: bool, gap: float, dtype: torch.dtype) -> str:
    """``same``, ``tie`` or ``different`` from plain decoding.

    ``same``: the texts were found equal. ``unchecked``: there was no plain text to compare with.
    ``gap``: see ``largest_gap``; ``dtype``: the target's.
    """
    if same or (unchecked and gap == 0):
        return "same"
    return "tie" if gap <= TIE[dtype] else "different"
