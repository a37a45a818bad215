"""What every rank of a run agrees on before it starts: data, plan, shapes.

Built from the configuration and the prepared data alone, so all ranks build the same.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import Qwen3Config

from dflash_mp.cast import Place
from dflash_mp.checkpoint import Start
from dflash_mp.config import TrainConfig, require
from dflash_mp.data.corpus import Prepared
from dflash_mp.data.order import Order
from dflash_mp.data.packing import PackedBatch, collate, pack
from dflash_mp.drafter.hf_config import default_layer_ids, make_drafter_config
from dflash_mp.published import published_config
from dflash_mp.wire.frame import DTYPES, Layout
from dflash_mp.wire.plan import Frame, Kind, Plan


@dataclass(frozen=True)
class Job:
    """One training run."""

    config: TrainConfig
    folder: Path
    place: Place
    target_config: Any
    drafter_config: Qwen3Config
    prepared: Prepared
    start: Start

    @property
    def layer_ids(self) -> list[int]:
        """Tapped target layers."""
        return list(self.drafter_config.dflash_config["target_layer_ids"])

    @property
    def mask_token_id(self) -> int:
        """Token of the slots to be drafted."""
        return int(self.drafter_config.dflash_config["mask_token_id"])

    @cached_property
    def heldout_packs(self) -> list[np.ndarray]:
        """Documents of each held-out micro-batch: the first ``evaluate.max_rows`` of the set."""
        lengths = self.prepared.heldout.lengths[: self.config.evaluate.max_rows]
        return pack(lengths, self.config.data.tokens_per_batch, 0, 0) if len(lengths) else []

    @cached_property
    def decoded_documents(self) -> list[int]:
        """Held-out documents whose prompts are decoded: the first ``evaluate.decode_prompts``.

        Only those that begin with a prompt: a later piece of a long conversation has none.
        """
        heldout = self.prepared.heldout
        begins = [i for i in range(len(heldout)) if not heldout.document(i)[1][0]]
        return begins[: self.config.evaluate.decode_prompts]

    @cached_property
    def order(self) -> Order:
        """Documents of each training micro-batch."""
        config = self.config
        repeat = config.features.cache != "off"
        require(
            not (repeat and self.prepared.train.weights is not None),
            f"features.cache={config.features.cache} repeats the packs of the first epoch, but "
            "weighted data is drawn anew in each: use features.cache=off",
        )
        return Order(self.prepared.train, config.data.tokens_per_batch, config.seed, repeat)

    @cached_property
    def plan(self) -> Plan:
        """The order of frames."""
        config, start = self.config, self.start
        per_step = config.micro_batches_per_step
        if config.steps is not None:
            training = start.batches + (config.steps - start.step) * per_step
        else:
            training = self.order.end(config.epochs - 1)
        require(
            per_step >= self.place.drafters,
            f"micro_batches_per_step={per_step} leaves some of the {self.place.drafters} drafters "
            "without work: raise it to a multiple of them, or set topology.drafters",
        )
        require(
            training >= start.batches,
            f"epochs={config.epochs} are {training} micro-batches, but {start.checkpoint} has done "
            f"{start.batches} already",
        )
        return Plan(
            heldout=len(self.heldout_packs),
            training=training,
            per_step=per_step,
            drafters=self.place.drafters,
            first_step=start.step,
            first_batch=start.batches,
        )

    @cached_property
    def layout(self) -> Layout:
        """The shape of a frame."""
        hidden = self.target_config.get_text_config().hidden_size
        return Layout(
            tokens=self.config.data.tokens_per_batch,
            taps=len(self.layer_ids),
            hidden_width=hidden * len(self.layer_ids),
            final_width=hidden if self.config.loss.reads_target else 0,
            dtype=DTYPES[self.config.wire.dtype],
        )

    def batch(self, frame: Frame) -> PackedBatch:
        """The tokens of a held-out or training frame."""
        budget = self.config.data.tokens_per_batch
        if frame.kind is Kind.HELDOUT:
            return collate(self.prepared.heldout, self.heldout_packs[frame.number], budget)
        return collate(self.prepared.train, self.order.documents(frame.number), budget)


def choose_layer_ids(config: TrainConfig, target_config: Any) -> list[int]:
    """``target.layer_ids``, or ``drafter.tapped_layers`` of them spread over the target."""
    if config.target.layer_ids is not None:
        return config.target.layer_ids
    layers = target_config.get_text_config().num_hidden_layers
    taps = config.drafter.tapped_layers
    ids = default_layer_ids(layers, taps)
    require(
        len(set(ids)) == taps and max(ids) < layers - 1,
        f"drafter.tapped_layers={taps} cannot be spread over a target of {layers} layers: name "
        "them in target.layer_ids, or tap fewer",
    )
    return ids


def drafter_config(config: TrainConfig, target_config: Any, mask_token_id: int) -> Qwen3Config:
    """The draft model of this run."""
    published = published_config(config, target_config)
    if published is not None:
        return published
    layer_ids = choose_layer_ids(config, target_config)
    return make_drafter_config(target_config, config.drafter, layer_ids, mask_token_id)
