"""The target's embedding and LM head, which the drafter uses frozen and never exports.

Only these tensors are read from the target's checkpoint; the target itself is not loaded.

Legend: V vocabulary rows, H hidden size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from dflash_mp.config import UserError, require
from dflash_mp.drafter.hf_config import embedding_scale, logit_softcap
from dflash_mp.drafter.weight_files import read_tensor, tensor_files

EMBEDDING_KEYS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
HEAD_KEYS = ("lm_head.weight", "embed_out.weight")


class FrozenHead(nn.Module):
    """Embedding and head of the target; buffers, so they follow ``.to`` and never train.

    Args:
        embedding: ``[V, H]``.
        head: ``[V, H]``, or None where the head is tied to the embedding.
        scale: what embeddings are multiplied with (Gemma).
        softcap: ``c`` of logits ``c * tanh(logits / c)`` (Gemma), or None.
    """

    embedding: Tensor
    head: Tensor | None

    def __init__(
        self,
        embedding: Tensor,
        head: Tensor | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.scale = scale
        self.softcap = softcap

    @property
    def weight(self) -> Tensor:
        """``[V, H]`` LM head; the embedding itself when tied."""
        return self.embedding if self.head is None else self.head

    def embed(self, ids: Tensor) -> Tensor:
        """``ids [...]`` -> ``[..., H]`` as the target's own first layer receives them."""
        embedded = F.embedding(ids.long(), self.embedding)
        return embedded if self.scale == 1.0 else embedded * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [..., H]`` -> ``[..., V]``, softcap included; for decoding."""
        logits = F.linear(hidden, self.weight)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def load_frozen_head(
    source: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> FrozenHead:
    """Read embedding and head of the target in a local folder or hub repository.

    Raises:
        UserError: no such checkpoint, no safetensors in it, no embedding or head, or quantised
            ones.
    """
    try:
        config = AutoConfig.from_pretrained(
            source, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise UserError(f"target {source}: {str(error).splitlines()[0]}") from None
    text = config.get_text_config()
    files = tensor_files(source, revision)

    def read(key: str) -> Tensor:
        tensor = read_tensor(source, files, key, revision)
        require(
            tensor.is_floating_point() and tensor.element_size() >= 2,
            f"target {source}: {key} is stored as {tensor.dtype}; a frozen head needs 16 bits "
            "or more, use an unquantised checkpoint",
        )
        require(
            tensor.shape[1] == text.hidden_size,
            f"target {source}: {key} has shape {list(tensor.shape)}, but hidden_size is "
            f"{text.hidden_size}",
        )
        return tensor.to(device=device, dtype=dtype)

    embedding_key = _find(list(files), EMBEDDING_KEYS)
    if embedding_key is None:
        raise UserError(f"target {source}: no tensor ends in any of {', '.join(EMBEDDING_KEYS)}")
    head_key = None if _is_tied(config, text) else _find(list(files), HEAD_KEYS)
    require(
        head_key is not None or _is_tied(config, text),
        f"target {source}: its config unties the LM head, but no tensor ends in any of "
        f"{', '.join(HEAD_KEYS)}",
    )
    return FrozenHead(
        embedding=read(embedding_key),
        head=None if head_key is None else read(head_key),
        scale=embedding_scale(text),
        softcap=logit_softcap(text),
    )


def _is_tied(config: PretrainedConfig, text: PretrainedConfig) -> bool:
    """Whether the head is the embedding; a multimodal config may say so in either part."""
    return bool(config.tie_word_embeddings or text.tie_word_embeddings)


def _find(keys: list[str], endings: tuple[str, ...]) -> str | None:
    """The tensor of the text model: the shortest key with one of ``endings``, vision left out."""
    for ending in endings:
        found = [
            key
            for key in keys
            if (key == ending or key.endswith("." + ending)) and "visi" not in key
        ]
        if found:
            return min(found, key=len)
    return None
