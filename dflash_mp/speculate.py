"""Draft, verify, accept: real decoding of one sequence with a target and a drafter.

Every token is the target's own choice: the drafter only proposes what the target then confirms, so
the text is that of plain decoding, at any temperature. Follows section 3 of the DFlash paper
(arXiv 2602.06036).

Shapes: P prompt tokens, B block size, T tokens read at once, V vocabulary, H hidden size, n tapped
layers.
"""

import copy
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from dflash_mp.config import UserError, require
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.model import DFlashDraftModel, DraftCache
from dflash_mp.target.layers import capturing


@dataclass(frozen=True)
class DecodeSettings:
    """How to decode, the same for plain and speculative decoding.

    ``max_new_tokens`` counts the token of the prefill. ``temperature=0`` is greedy. Sampling adds
    noise that depends on ``seed`` and the position alone, so the two ways of decoding give the
    same text for the same seed. ``block_size=None`` is the drafter's own.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    seed: int = 0
    block_size: int | None = None

    def __post_init__(self) -> None:
        require(self.max_new_tokens >= 1, f"max_new_tokens={self.max_new_tokens}: at least 1")
        require(self.temperature >= 0, f"temperature={self.temperature}: must not be negative")
        require(
            self.block_size is None or self.block_size >= 2,
            f"block_size={self.block_size}: must be at least 2 (the anchor and one drafted token)",
        )


@dataclass(frozen=True)
class Decoded:
    """The new tokens of one sequence and how they came about.

    ``tokens`` starts with the token of the prefill and ends with the stop token, if one came. The
    lists have one entry per cycle (target forward after the prefill): tokens committed, drafted
    tokens among them, drafted tokens that were put to the test, and the tokens that were drafted
    for the target to verify. ``1 + sum(committed)`` is ``len(tokens)``. ``decode_seconds`` leaves
    the prefill out.
    """

    tokens: list[int]
    committed: list[int]
    accepted: list[int]
    proposed: list[int]
    drafted: list[list[int]]
    prefill_seconds: float
    decode_seconds: float


class CachedTarget:
    """A target together with the cache of one sequence; takes back what it should not have read.

    Most layers drop the newest entries of their cache. A recurrent state cannot be cut: layers that
    have one are copied before every read, put back afterwards, and read the kept tokens again.

    Raises ``UserError`` if the target's cache is of a kind that transformers does not know.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        self._model = model
        self._layer_ids = list(layer_ids)
        try:
            self._cache = DynamicCache(config=model.config)
        except KeyError as error:
            raise UserError(
                f"{type(model).__name__} has layers of type {error}, whose state transformers "
                "cannot take back: acceptance cannot be measured by decoding with this target"
            ) from None
        self._saved: dict[int, object] = {}
        self._read = torch.empty(0)
        self.recurrent = False
        """Whether some layers have a state that cannot be cut; known after ``prefill``."""

    def prefill(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Read the prompt ``[P]``: logits of its last token ``[1, V]``, features ``[P, n*H]``."""
        result = self._forward(ids, logits_to_keep=1)
        layers = self._cache.layers
        self.recurrent = not all(layer.is_croppable for layer in layers)
        for layer in layers:
            # Layers that forget (sliding windows, convolutions) must keep what may be needed again.
            # Not before the prefill: they would keep all of it.
            if layer.is_croppable and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        return result

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Read ``[T]`` tokens: logits ``[T, V]`` and tapped hidden states ``[T, n*H]``."""
        layers = self._cache.layers
        self._saved = {
            index: copy.deepcopy(layer)
            for index, layer in enumerate(layers)
            if not layer.is_croppable
        }
        self._read = ids
        return self._forward(ids)

    def keep(self, count: int) -> None:
        """Take back all but the first ``count`` tokens of the last ``read``."""
        size = len(self._read)
        again = self.recurrent and count < size
        for index, layer in enumerate(self._cache.layers):
            if layer.is_croppable:
                layer.crop(-size if again else count - size)
            elif again:
                self._cache.layers[index] = self._saved[index]
        if again:
            self._forward(self._read[:count], logits_to_keep=1)

    def _forward(self, ids: Tensor, logits_to_keep: int = 0) -> tuple[Tensor, Tensor]:
        with capturing(self._model, self._layer_ids, stop=False) as hidden:
            output = self._model(
                input_ids=ids[None],
                cache=self._cache,
                use_cache=True,
                logits_to_keep=logits_to_keep,
            )
        features = torch.cat([state[0] for state in hidden], dim=-1) if hidden else torch.empty(0)
        return output.logits[0], features


@torch.no_grad()
def speculative_decode(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    head: FrozenHead,
    prompt_ids: Sequence[int],
    settings: DecodeSettings,
) -> Decoded:
    """Decode one prompt with blocks of the drafter, each verified by one target forward.

    A block is always drafted whole, since a drafter was trained on whole blocks; only as many of
    its tokens are verified as the budget allows. Raises ``UserError`` for an empty prompt or one
    that fills the target's context.
    """
    config = drafter.config
    block_size = settings.block_size or config.block_size
    device = next(target.parameters()).device
    dtype = next(drafter.parameters()).dtype
    settings = _within_context(target, prompt_ids, settings)
    run = CachedTarget(target, config.dflash_config["target_layer_ids"])
    drafts = DraftCache()

    started = _now(device)
    logits, features = run.prefill(torch.tensor(list(prompt_ids), device=device))
    tokens = choose(logits, len(prompt_ids), settings).tolist()
    prefilled = _now(device)
    committed: list[int] = []
    accepted: list[int] = []
    proposed: list[int] = []
    drafted: list[list[int]] = []
    while (left := settings.max_new_tokens - len(tokens)) and tokens[-1] not in settings.stop_ids:
        mask_token_id = config.dflash_config["mask_token_id"]
        block = torch.full((block_size,), mask_token_id, device=device)  # [B]
        block[0] = tokens[-1]
        width = min(block_size, left)
        if width > 1:
            hidden = drafter.draft(
                head.embed(block).to(dtype), features.to(dtype), drafts
            )  # [B, H]
            block[1:width] = head.logits(hidden[1:width].to(head.weight.dtype)).argmax(-1)
        logits, features = run.read(block[:width])
        choices = choose(logits, len(prompt_ids) + len(tokens), settings)  # [width]
        matches = int((block[1:width] == choices[:-1]).long().cumprod(0).sum())
        new = _until_stop(choices[: matches + 1].tolist(), settings.stop_ids)
        run.keep(len(new))
        features = features[: len(new)]
        tokens += new
        committed.append(len(new))
        drafted.append(block[1:width].tolist())
        accepted.append(min(matches, len(new)))
        # Behind a stop token that was drafted and accepted nothing counts as put to the test.
        proposed.append(width - 1 if len(new) > matches else len(new))
    return Decoded(
        tokens,
        committed,
        accepted,
        proposed,
        drafted,
        prefilled - started,
        _now(device) - prefilled,
    )


@torch.no_grad()
def plain_decode(
    target: PreTrainedModel, prompt_ids: Sequence[int], settings: DecodeSettings
) -> Decoded:
    """Decode one prompt token by token with the target alone; ``block_size`` does not matter."""
    device = next(target.parameters()).device
    settings = _within_context(target, prompt_ids, settings)
    run = CachedTarget(target, [])
    started = _now(device)
    logits, _ = run.prefill(torch.tensor(list(prompt_ids), device=device))
    tokens = choose(logits, len(prompt_ids), settings).tolist()
    prefilled = _now(device)
    while len(tokens) < settings.max_new_tokens and tokens[-1] not in settings.stop_ids:
        logits, _ = run.read(torch.tensor(tokens[-1:], device=device))
        run.keep(1)
        tokens += choose(logits, len(prompt_ids) + len(tokens), settings).tolist()
    cycles = len(tokens) - 1
    return Decoded(
        tokens,
        [1] * cycles,
        [0] * cycles,
        [0] * cycles,
        [[] for _ in range(cycles)],
        prefilled - started,
        _now(device) - prefilled,
    )


def choose(logits: Tensor, position: int, settings: DecodeSettings) -> Tensor:
    """The target's tokens ``[T]`` for the consecutive positions ``position..position+T-1``.

    ``logits`` is ``[T, V]``. Sampling is the Gumbel-max trick (the largest of logit / temperature
    plus Gumbel noise is a sample of the softmax) with noise fixed by seed and position. A drafted
    token never looks at the noise, so a text made of accepted drafts follows exactly the target's
    distribution.
    """
    return scores(logits, position, settings).argmax(dim=-1)


def scores(logits: Tensor, position: int, settings: DecodeSettings) -> Tensor:
    """``[T, V]``, in units of logits; the largest of a row is the token that is taken there."""
    if settings.temperature == 0:
        return logits
    noised = logits.float().clone()  # [T, V]
    generator = torch.Generator(logits.device)
    for row in range(len(noised)):
        generator.manual_seed(_noise_seed(settings.seed, position + row))
        noise = torch.empty_like(noised[row]).exponential_(generator=generator)
        noised[row] -= settings.temperature * noise.clamp_min_(torch.finfo(noise.dtype).tiny).log_()
    return noised


def _noise_seed(seed: int, position: int) -> int:
    # A hash, because torch's CPU generator looks at the low 32 bits only.
    digest = hashlib.sha256(f"token {seed} {position}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def context_length(target: PreTrainedModel) -> int | None:
    """Positions the target was built for; ``None`` if its config does not say."""
    return getattr(target.config.get_text_config(), "max_position_embeddings", None)


def _within_context(
    target: PreTrainedModel, prompt_ids: Sequence[int], settings: DecodeSettings
) -> DecodeSettings:
    limit = context_length(target)
    size = len(prompt_ids)
    require(size > 0, "the prompt has no tokens")
    if limit is None:
        return settings
    require(
        size < limit,
        f"a prompt of {size} tokens does not fit into the target's context of {limit} tokens: "
        "shorten or drop it",
    )
    return replace(settings, max_new_tokens=min(settings.max_new_tokens, limit - size))


def _until_stop(tokens: list[int], stop_ids: tuple[int, ...]) -> list[int]:
    """``tokens`` up to and with the first stop token."""
    ends = [index for index, token in enumerate(tokens) if token in stop_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def _now(device: torch.device) -> float:
    """Wall clock in seconds, after the work queued on ``device``."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
