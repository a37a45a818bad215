"""The target's loop: claim a frame, run the frozen model into a slot, hand it to the sender."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dflash_mp.cast import Cast
from dflash_mp.data.packing import PackedBatch
from dflash_mp.drafter.checkpoint_format import load_drafter
from dflash_mp.drafter.frozen_head import FrozenHead, load_frozen_head
from dflash_mp.features import FeatureBatch
from dflash_mp.job import Job
from dflash_mp.roles.requests import Answering
from dflash_mp.speculate import DecodeSettings, speculative_decode
from dflash_mp.target.model import FeatureExtractor, load_target, resolve
from dflash_mp.wire.stream import Sender, open_edges

log = logging.getLogger(__name__)

LAST_REQUEST = timedelta(days=7)


def run_target(cast: Cast, job: Job) -> None:
    """Play the target's part from loading the model to the last request for decoding."""
    config = job.config
    timeout = timedelta(seconds=config.wire.timeout_s)
    model = load_target(config.target, cast.device)
    extractor = FeatureExtractor(model, job.layer_ids)
    log.info(
        "%s: %s, documents %s",
        cast.place.name,
        type(model).__name__,
        "packed in one row" if extractor.packs else "in padded rows of their own",
    )
    edges = open_edges(cast, timeout)
    sender = Sender(cast, job.plan, job.layout, config.wire.slots, edges, timeout)
    answering = Answering(cast.client(), cast.place.role_rank, decode_share(cast, job, model))
    clock = cast.client()
    decodes = cast.place.node == 0

    start = time.perf_counter()
    for frame in sender.claims():
        if decodes:
            answering.pending()
        slot = sender.slot()
        features = job.layout.view(slot, frame.number)
        begun = time.perf_counter()
        copy_tokens(job.batch(frame), features)
        extractor.fill(features)
        sender.clock.add("forward", time.perf_counter() - begun)
        sender.submit(slot, frame)
        seconds = {**sender.clock.seconds, "elapsed": time.perf_counter() - start}
        clock.set(f"clock/{cast.place.role_rank}", json.dumps(seconds))
    sender.finish()
    if decodes:
        answering.until_end(LAST_REQUEST)
    for edge in edges.values():
        edge.close()


def copy_tokens(batch: PackedBatch, features: FeatureBatch) -> None:
    """Write everything of ``batch`` into the frame; hidden states follow."""
    for field in fields(batch):
        getattr(features, field.name).copy_(getattr(batch, field.name))


def decode_share(
    cast: Cast, job: Job, model: nn.Module
) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    """The function that decodes this target's share of the held-out prompts for a request."""
    targets = cast.place.targets_per_node
    source = resolve(job.config.target)
    head: FrozenHead | None = None

    def answer(request: dict[str, Any]) -> list[dict[str, Any]]:
        nonlocal head
        dtype = next(model.parameters()).dtype
        if head is None:
            head = load_frozen_head(
                source,
                dtype,
                cast.device,
                job.config.target.revision,
                job.config.target.trust_remote_code,
            )
        drafter = load_drafter(Path(request["folder"]), dtype, cast.device)
        settings = DecodeSettings(
            max_new_tokens=request["max_new_tokens"], stop_ids=stop_ids(model)
        )
        results = []
        for document in range(cast.place.role_rank, request["prompts"], targets):
            prompt = first_prompt(*job.prepared.heldout.document(document))
            decoded = speculative_decode(model, drafter, head, prompt, settings)
            results.append(
                {
                    "document": document,
                    "committed": decoded.committed,
                    "tokens": decoded.tokens,
                    "greedy": is_greedy(model, prompt, decoded.tokens),
                    "seconds": decoded.decode_seconds,
                }
            )
        return results

    return answer


def stop_ids(model: nn.Module) -> tuple[int, ...]:
    """Tokens that end a response, from the model's generation config."""
    ids = model.generation_config.eos_token_id
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def first_prompt(input_ids: np.ndarray, loss_mask: np.ndarray) -> list[int]:
    """The tokens before the first supervised one: what a server would be asked."""
    return input_ids[: int(np.argmax(loss_mask))].tolist()


@torch.no_grad()
def is_greedy(model: nn.Module, prompt: list[int], tokens: list[int]) -> bool:
    """Whether every one of ``tokens`` is the target's first choice after those before it.

    One forward over the whole text; by induction the text is then the target's greedy output.
    """
    device = next(model.parameters()).device
    text = torch.tensor([prompt + tokens], device=device)
    logits = model(text[:, :-1], use_cache=False, logits_to_keep=len(tokens)).logits[0]
    return bool((logits.argmax(-1) == text[0, len(prompt) :]).all())
