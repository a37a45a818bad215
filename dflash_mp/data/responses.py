"""Responses to conversations: decoded by the target here, or asked from a server.

Both ways are a ``Respond``: messages and seeds of a batch in, one response (or the reason why there
is none) per conversation out.

Legend: B conversations of a batch, P tokens of the longest prompt, N new tokens, V vocabulary.
"""

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, TopPLogitsWarper

from dflash_mp.config import UserError

SERVER_TIMEOUT_S = 600

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: ``temperature`` 0 is greedy and ignores the two after it."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True)
class Response:
    """One reply of the target."""

    text: str
    finish_reason: str
    """``stop`` when the target ended it, ``length`` when ``max_new_tokens`` cut it."""

    token_ids: list[int] | None
    """Exactly what was decoded, without the stop token; None when a server only sent text."""


@dataclass(frozen=True)
class Skipped:
    """No reply, and why."""

    reason: str


Respond = Callable[[list[Messages], list[int]], list[Response | Skipped]]


def row_seed(seed: int, index: int, turn: int) -> int:
    """A 63-bit seed for one turn of one conversation, whatever batch or rank decodes it."""
    digest = hashlib.sha256(f"{seed}:{index}:{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def local_respond(model: Any, tokenizer: Any, sampling: Sampling) -> Respond:
    """Decode with a transformers ``model``, a batch at a time, prompts padded on the left.

    The checkpoint's own generation settings (sampling, repetition penalty) are replaced: nothing
    but ``sampling`` and the stop tokens shapes the text.
    """
    stop_ids = stop_token_ids(model, tokenizer)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=stop_ids, pad_token_id=stop_ids[0]
    )
    limit = model.config.get_text_config().max_position_embeddings - sampling.max_new_tokens

    def respond(conversations: list[Messages], seeds: list[int]) -> list[Response | Skipped]:
        prompts = [_prompt_ids(tokenizer, messages, limit) for messages in conversations]
        pairs = [(p, s) for p, s in zip(prompts, seeds, strict=True) if not isinstance(p, Skipped)]
        decoded = iter(decode(model, [p for p, _ in pairs], [s for _, s in pairs], sampling))
        return [
            prompt if isinstance(prompt, Skipped) else _response(tokenizer, next(decoded), stop_ids)
            for prompt in prompts
        ]

    return respond


def decode(
    model: Any, prompts: list[list[int]], seeds: list[int], sampling: Sampling
) -> list[list[int]]:
    """Continue each of B prompts: up to N new token ids each, anything after a stop token is void.

    Every prompt's tokens are those it would get alone, up to rounding of the forward pass.
    """
    if not prompts:
        return []
    longest = max(len(prompt) for prompt in prompts)
    pad = model.generation_config.pad_token_id
    device = model.device
    input_ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=device)
    # [B, P] both. The pad token may be a real token too (often it is the stop token), so the mask
    # comes from the lengths.
    attention_mask = torch.tensor(
        [[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device
    )
    processors = LogitsProcessorList()
    if sampling.temperature > 0:
        processors.append(RowSampler(seeds, sampling, device))
    with torch.inference_mode():
        output = model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            logits_processor=processors,
            max_new_tokens=sampling.max_new_tokens,
        )  # [B, P + N]
    new_ids: list[list[int]] = output[:, longest:].tolist()
    return new_ids


class RowSampler(LogitsProcessor):
    """Makes the arg max of its output a sample, with a random stream of its own for each row.

    Adding Gumbel noise to log-probabilities and taking the arg max samples from them (Gumbel-max);
    the logarithm of an exponential variable is such noise, negated.
    """

    def __init__(self, seeds: list[int], sampling: Sampling, device: torch.device) -> None:
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.temperature = sampling.temperature
        self.nucleus = TopPLogitsWarper(sampling.top_p)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores ``[B, V]`` to perturbed float32 scores ``[B, V]``."""
        kept: Tensor = self.nucleus(input_ids, scores.float() / self.temperature)  # [B, V]
        for row, generator in zip(kept, self.generators, strict=True):
            row -= torch.empty_like(row).exponential_(generator=generator).log()
        return kept


def stop_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """The ids that end a reply: the checkpoint's (one or several), and the tokenizer's."""
    named = model.generation_config.eos_token_id
    ids = list(named) if isinstance(named, list) else [named]
    ids = list(dict.fromkeys([*ids, tokenizer.eos_token_id]))
    ids = [i for i in ids if i is not None]
    if not ids:
        raise UserError("neither the target nor its tokenizer names an end-of-sequence token")
    return ids


def _prompt_ids(tokenizer: Any, messages: Messages, limit: int) -> list[int] | Skipped:
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )["input_ids"]
    except TemplateError as error:
        return Skipped(f"the chat template refuses it: {error}")
    if len(ids) > limit:
        return Skipped(f"a prompt of {len(ids)} tokens leaves no room in the target's context")
    return ids


def _response(tokenizer: Any, new_ids: list[int], stop_ids: list[int]) -> Response:
    end = next((i for i, token in enumerate(new_ids) if token in stop_ids), None)
    ids = new_ids[:end]
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Response(text, "length" if end is None else "stop", ids)


def server_respond(server: str, model: str, sampling: Sampling) -> Respond:
    """Ask an OpenAI-compatible chat endpoint, a batch of requests at a time.

    ``server`` is its address, with or without the closing ``/v1``.

    Raises (when called): ``UserError`` for a server that cannot be reached or refuses to serve. A
    request that it calls bad is skipped.
    """
    address = server.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"

    def ask(messages: Messages, seed: int) -> Response | Skipped:
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
        }
        if sampling.temperature > 0:
            body |= {"top_p": sampling.top_p, "seed": seed}
        return _post(address, body)

    def respond(conversations: list[Messages], seeds: list[int]) -> list[Response | Skipped]:
        with ThreadPoolExecutor(max_workers=len(conversations)) as pool:
            return list(pool.map(ask, conversations, seeds))

    return respond


def _post(address: str, body: dict[str, Any]) -> Response | Skipped:
    request = urllib.request.Request(
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=SERVER_TIMEOUT_S) as reply:
            choice = json.load(reply)["choices"][0]
            text, reason = choice["message"]["content"], choice["finish_reason"]
    except urllib.error.HTTPError as error:
        answer = error.read().decode(errors="replace")[:200]
        if error.code in (400, 413, 422):
            return Skipped(f"the server answered {error.code}: {answer}")
        raise UserError(f"server={address} answered {error.code}: {answer}") from None
    except OSError as error:
        raise UserError(
            f"server={address} cannot be reached: {error}; the same command resumes"
        ) from None
    except (ValueError, LookupError, TypeError):
        raise UserError(f"server={address} did not answer like a chat endpoint") from None
    if reason not in ("stop", "length") or not isinstance(text, str):
        return Skipped(f"the server ended its reply with finish_reason={reason}")
    return Response(text, reason, None)
