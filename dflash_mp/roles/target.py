"""The target's loop: claim a frame, run the frozen model into a slot, hand it to the sender."""

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from dflash_mp.acceptance import evaluate_prompts
from dflash_mp.cast import Cast
from dflash_mp.data.packing import PackedBatch
from dflash_mp.drafter.checkpoint_format import load_drafter
from dflash_mp.features import FeatureBatch
from dflash_mp.job import Job
from dflash_mp.plan.machine import peak_rate
from dflash_mp.recompiles import Recompiles
from dflash_mp.roles.flops import target_flops
from dflash_mp.roles.means import Means
from dflash_mp.roles.requests import DECODED, Answering
from dflash_mp.roles.texts import SHOWN_PROMPTS, with_texts
from dflash_mp.sentinel import Sentinel
from dflash_mp.speculate import DecodeSettings
from dflash_mp.target.frame_cache import MEMORY, PREFIX, FrameCache, fingerprint, make_room
from dflash_mp.target.model import FeatureExtractor, load_target, load_tokenizer
from dflash_mp.target.weights_fingerprint import weights_fingerprint
from dflash_mp.warn_once import warn_once
from dflash_mp.wire.plan import Frame, Kind
from dflash_mp.wire.stream import Sender
from dflash_mp.wire.takeover import ElasticSender

log = logging.getLogger(__name__)

TARGET_FINGERPRINT = "target"
LAST_REQUEST = timedelta(days=7)
MEMORY_ADVICE = "half of them are tried, which is slower: lower data.tokens_per_batch"


def run_target(cast: Cast, job: Job, sentinel: Sentinel, means: Means) -> None:
    """Play the target's part from loading the model to the last request for decoding."""
    config, limits = job.config, job.config.failure
    timeout = timedelta(seconds=config.wire.timeout_s)
    sentinel.phase("load the target", limits.setup_s)
    model = load_target(config.target, cast.device)
    weights = weights_fingerprint(model)
    if cast.place.role_rank == 0:
        cast.store.set(TARGET_FINGERPRINT, weights)
    extractor = FeatureExtractor(
        model,
        job.layer_ids,
        final=config.loss.reads_target,
        compiled_slots=job.layout.tokens if config.target.compile else None,
    )
    log.info(
        "%s: %s, documents %s",
        cast.place.name,
        type(model).__name__,
        "packed in one row" if extractor.packs else "in padded rows of their own",
    )
    sentinel.wait("the edges")
    cache = open_frame_cache(cast, job, weights)
    edges = means.open_edges(cast, job)
    make_sender = ElasticSender if config.topology.elastic else Sender
    sender = make_sender(cast, job.plan, job.layout, config.wire.slots, edges, timeout)
    decode = decode_share(cast, job, model, sentinel)
    answering = Answering(cast.store, cast.place.role_rank, decode)
    decodes = cast.place.node == 0
    per_token, peak = target_flops(model, job), target_peak(model, job, cast.device)

    recompiles = Recompiles(alone=config.isolation == "processes")
    # The first forward may compile.
    start, limit = time.perf_counter(), limits.setup_s
    sentinel.wait("a free slot")
    for frame in sender.claims():
        sentinel.phase("forward", limit)
        slot = sender.slot()
        begun = time.perf_counter()
        problem = fill(slot, frame, job, extractor, cache)
        sender.clock.add("forward", time.perf_counter() - begun)
        limit = limits.step_s
        # A kept frame is none of the model's.
        if extractor.tokens:
            recompiles.check("a frame")
        sender.submit(slot, frame, finite(job.layout.view(slot, frame.number)), problem)
        told = {
            **sender.clock.seconds,
            "elapsed": time.perf_counter() - start,
            "flops": extractor.tokens * per_token,
            "peak": peak,
            "recompiles": recompiles.value(),
        }
        cast.store.set(f"clock/{cast.place.role_rank}", json.dumps(told))
        if decodes:
            # Before the next claim: a frame that is claimed is waited for.
            begun = time.perf_counter()
            answering.pending()
            sender.clock.add("decode", time.perf_counter() - begun)
        sentinel.wait("a free slot")
    sentinel.wait("the last frames to be taken")
    sender.finish()
    if decodes:
        sentinel.wait("requests to decode")
        answering.until_end(LAST_REQUEST)
    for edge in edges.values():
        edge.close()


def target_peak(model: PreTrainedModel, job: Job, device: torch.device) -> float | None:
    """``peak_rate`` for products of about the target's sizes."""
    hidden = model.config.get_text_config().hidden_size
    # The drafter's MLP: a target of experts may state none.
    return peak_rate(device, model.dtype, hidden, job.drafter_config.intermediate_size)


def fill(
    slot: Tensor, frame: Frame, job: Job, extractor: FeatureExtractor, cache: FrameCache | None
) -> str:
    """Write ``frame`` into ``slot``: from the kept frames, or by running the target.

    Returns what prevented it, empty if nothing did.
    """
    pack = None
    if cache is not None and frame.kind is Kind.TRAIN:
        pack = job.order.place(frame.number)[1]
        if cache.load(pack, slot):
            return ""
    features = job.layout.view(slot, frame.number)
    batch = job.batch(frame)
    copy_tokens(batch, features)
    # Counted here, where nobody has to wait for a device.
    tokens = int((batch.document_ids >= 0).sum())
    if not fill_in_parts(extractor, features, tokens):
        return "the target ran out of memory on a single document of it"
    if cache is not None and pack is not None:
        cache.store(pack, slot)
    return ""


def finite(features: FeatureBatch) -> Tensor:
    """Whether all hidden states are finite, as a scalar bool on their device."""
    # The scale of a row that is not finite is not finite either.
    scales = features.hidden_scales
    total = (features.hidden_states if scales is None else scales).sum(dtype=torch.float32)
    if features.final_hidden is not None:
        total = total + features.final_hidden.sum(dtype=torch.float32)
    return torch.isfinite(total)


def fill_in_parts(
    extractor: FeatureExtractor, features: FeatureBatch, tokens: int | None = None
) -> bool:
    """Fill ``features``, half the documents at a time where all do not fit into memory.

    Returns False when a single document does not. ``tokens`` is as for ``FeatureExtractor.fill``.
    """
    try:
        extractor.fill(features, tokens)
        return True
    except torch.OutOfMemoryError:
        documents = int(features.document_ids.max()) - int(features.document_ids[0]) + 1
        warn_once(log, f"out of memory on {documents} documents at once", MEMORY_ADVICE)
    if documents == 1:
        return False
    torch.cuda.empty_cache()
    middle = int(features.document_ids[0]) + documents // 2
    cut = int((features.document_ids >= middle).nonzero()[0])
    first, second = rows(features, 0, cut), rows(features, cut, len(features.document_ids))
    return fill_in_parts(extractor, first) and fill_in_parts(extractor, second)


def rows(features: FeatureBatch, start: int, end: int) -> FeatureBatch:
    """Views of some token slots of a micro-batch."""
    views = {k: v[start:end] for k, v in vars(features).items() if isinstance(v, Tensor)}
    return FeatureBatch(number=features.number, **views)


def open_frame_cache(cast: Cast, job: Job, weights: str) -> FrameCache | None:
    """The node's kept frames, if ``features.cache`` asks for them; all targets take part.

    Args:
        weights: fingerprint of the target.
    """
    config, place = job.config, cast.place
    if config.features.cache == "off":
        return None
    nbytes, limit = job.layout.nbytes, int(config.features.cache_gb * 1e9)
    capacity = min(job.order.end(0), limit // nbytes)
    facts = {
        "weights": weights,
        "target": job.target_config.to_json_string(),
        "attention": config.target.attention,
        "compile": config.target.compile,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "layers": job.layer_ids,
        "data": job.prepared.folder.name,
        "layout": str(job.layout),
        "seed": config.seed,
        "capacity": capacity,
    }
    in_memory = config.features.cache == "ram"
    folder = MEMORY if in_memory else job.prepared.folder.parent / "frames"
    path = folder / f"{PREFIX}{fingerprint(facts)}{f'-{os.getppid()}' if in_memory else ''}"
    cache = FrameCache(path, capacity, nbytes)
    first = place.node * place.targets_per_node
    if in_memory:
        keys = [f"frames/{first + i}" for i in range(place.targets_per_node)]
        cast.store.set(f"frames/{place.role_rank}", "")
        cast.store.wait(keys)
        # Everyone holds it open now; without a name it goes when the last of them goes.
        path.unlink(missing_ok=True)
    elif place.role_rank == first:
        make_room(path, limit)
    return cache


def copy_tokens(batch: PackedBatch, features: FeatureBatch) -> None:
    """Write everything of ``batch`` into the frame; hidden states follow."""
    for field in fields(batch):
        place, values = getattr(features, field.name), getattr(batch, field.name)
        if place.is_cuda:
            # From other memory the host would wait for the GPU, which is at the frame before.
            # Torch gives pinned memory to nobody else until the copy is done.
            values = values.pin_memory()
        place.copy_(values, non_blocking=True)


def decode_share(
    cast: Cast, job: Job, model: PreTrainedModel, sentinel: Sentinel
) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    """The function that decodes this target's share of the held-out prompts for a request.

    The first few prompts come back with texts, for people to look at.
    """
    targets = cast.place.targets_per_node
    shown = set(job.decoded_documents[:SHOWN_PROMPTS])

    def tell() -> None:
        cast.store.add(DECODED, 1)

    def answer(request: dict[str, Any]) -> list[dict[str, Any]]:
        sentinel.phase("decode", job.config.failure.save_s)
        drafter = load_drafter(Path(request["folder"]), model.dtype, cast.device)
        settings = DecodeSettings(
            max_new_tokens=request["max_new_tokens"], stop_ids=stop_ids(model)
        )
        prompts = [
            (number, first_prompt(*job.prepared.heldout.document(number)))
            for number in job.decoded_documents[cast.place.role_rank : request["prompts"] : targets]
        ]
        results = evaluate_prompts(model, drafter, prompts, settings, plain=False, done=tell)
        if any(number in shown for number, _ in prompts):
            tokenizer = load_tokenizer(job.config.target)
            results = [
                with_texts(row, prompt, tokenizer) if number in shown else row
                for row, (number, prompt) in zip(results, prompts, strict=True)
            ]
        sentinel.wait("requests to decode")
        return results

    return answer


def stop_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Tokens that end a response, from the model's generation config."""
    ids = model.generation_config.eos_token_id
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def first_prompt(input_ids: np.ndarray, loss_mask: np.ndarray) -> list[int]:
    """The tokens before the first supervised one: what a server would be asked."""
    return input_ids[: int(np.argmax(loss_mask))].tolist()
