"""Choose the mask token: an embedding row of the frozen target that no conversation uses."""

from typing import Any

from transformers import PretrainedConfig

from dflash_mp.config import UserError, require
from dflash_mp.drafter.hf_config import check_mask_token_id


def pick_mask_token(
    tokenizer: Any, target_config: PretrainedConfig, explicit: int | None = None
) -> int:
    """An embedding row of the target that no conversation uses.

    In this order: ``explicit``; the tokenizer's mask token; the first embedding row beyond the
    tokenizer's vocabulary; the last special token that is neither bos, eos, pad nor unk and does
    not occur in the chat template.

    Raises:
        UserError: ``explicit`` has no row or is in use, or nothing is free.
    """
    text = target_config.get_text_config()
    used = _used_ids(tokenizer, target_config)
    if explicit is not None:
        check_mask_token_id(explicit, text.vocab_size)
        require(
            explicit not in used,
            f"drafter.mask_token_id={explicit} is {tokenizer.convert_ids_to_tokens(explicit)!r}, "
            "which conversations of this target use: choose an unused id, or null",
        )
        return explicit
    mask = tokenizer.mask_token_id
    if mask is not None and mask < text.vocab_size and mask not in used:
        return int(mask)
    beyond = max(tokenizer.get_vocab().values()) + 1
    if beyond < text.vocab_size:
        return beyond
    free = [
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token_id not in used and token_id < text.vocab_size
    ]
    if free:
        return max(free)
    raise UserError(
        "drafter.mask_token_id=null: the target has no spare embedding row and no unused special "
        "token; name a token id that never occurs in your conversations"
    )


def _used_ids(tokenizer: Any, target_config: PretrainedConfig) -> set[int]:
    """Ids with a role, and added tokens that the chat template writes."""
    used: set[int | None] = set()
    text = target_config.get_text_config()
    for owner in (tokenizer, target_config, text):
        for role in ("bos", "eos", "pad", "unk"):
            ids = getattr(owner, f"{role}_token_id", None)
            used |= set(ids if isinstance(ids, list) else [ids])
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):
        template = "".join(template.values())
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.content in template:
            used.add(token_id)
    return {token_id for token_id in used if token_id is not None}
