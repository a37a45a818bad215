"""The planned bytes against those of real frames, caches and passes."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from torch.profiler import profile
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from dflash_mp.config import config_dir, to_config
from dflash_mp.data.packing import pack
from dflash_mp.drafter.anchors import make_blocks, sample_anchors
from dflash_mp.drafter.checkpoint_format import load_drafter, save_drafter
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.losses import HeadRows, head_loss
from dflash_mp.plan.memory import decoding_memory, logits_memory, walk_activations
from dflash_mp.plan.plan import kept_frames, learning_of, measure_sizes, memory_of
from dflash_mp.plan.settings import PlanRun
from dflash_mp.roles.step import kept
from dflash_mp.wire.frame import DTYPES, Layout
from dflash_mp.wire.plan import Plan

TARGET = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The configuration of a small target."""
    Qwen3Config(**TARGET).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def settings(target: Path, *words: str) -> PlanRun:
    given = ["target=hub", f"target.name={target}", "gpu=cpu", "drafter.precision=float32"]
    given += ["data.max_length=256", "data.tokens_per_batch=256", "data.heldout=my.jsonl"]
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return to_config(compose("plan", [*given, *words]), PlanRun)


def peak_bytes(work: Callable[[], object], mapped: int = -1) -> int:
    """The most bytes that tensors of ``work`` hold at a time, beside those that were there.

    Without what is ``mapped`` bytes large, which is a file.
    """
    work()
    gc.collect()
    with profile(profile_memory=True) as recorded:
        work()
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]" and abs(event.nbytes()) != mapped:
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize("words", [[], ["wire.dtype=fp8"], ["loss=kl"], ["nodes=2"]])
def test_held_out_frames_are_those_that_a_drafter_keeps(target: Path, words: list[str]) -> None:
    run = settings(target, "document_tokens=100", "evaluate.max_rows=31", *words)
    sizes = measure_sizes(run)
    width = TARGET["hidden_size"]
    final = width if run.loss.reads_target else 0
    layout = Layout(256, sizes.taps, sizes.taps * width, final, DTYPES[run.wire.dtype]).plain
    frame = kept(layout.view(layout.allocate(torch.device("cpu")), 0))
    real = sum(v.nbytes for v in vars(frame).values() if isinstance(v, torch.Tensor))
    packs = pack(np.full(31, 100), 256, 0, 0)
    plan = Plan(len(packs), 60, 6, drafters=3 * run.nodes)
    assert kept_frames(run) == plan.heldout_frames
    assert memory_of(sizes, run)["drafter"]["held-out"] == real * plan.heldout_frames > 0


def test_without_held_out_text_nothing_is_kept_or_decoded(target: Path) -> None:
    run = settings(target, "data.heldout=null")
    memory = memory_of(measure_sizes(run), run)
    assert memory["drafter"]["held-out"] == 0
    assert "decoding" not in memory["target"]


def test_a_target_decodes_with_keys_values_and_logits(target: Path) -> None:
    shape = measure_sizes(settings(target)).target
    model = Qwen3ForCausalLM(Qwen3Config(**TARGET)).eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        logits = model(torch.ones(1, 50, dtype=torch.long), cache=cache, use_cache=True).logits
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    more, less = (decoding_memory(shape, 0, prompt, 0, 4, cpu=True) for prompt in (150, 100))
    assert more - less == held
    with_new = decoding_memory(shape, 0, 100, 50, 4, cpu=True)
    assert with_new - more == logits.nbytes


def test_a_drafter_is_loaded_beside_what_was_read(target: Path, tmp_path: Path) -> None:
    sizes = measure_sizes(settings(target))
    model = DFlashDraftModel(sizes.drafter)
    model.init_weights(0)
    save_drafter(model, tmp_path)
    # Its pages are in memory once they are copied.
    file = (tmp_path / "model.safetensors").stat().st_size
    real = file + peak_bytes(lambda: load_drafter(tmp_path, torch.bfloat16), file)
    planned = decoding_memory(sizes.target, sizes.drafter_parameters, 1, 0, 2, cpu=True)
    assert planned == pytest.approx(real, rel=0.1)


def test_a_walk_holds_a_layer_of_all_blocks(target: Path) -> None:
    run = settings(target, "supervised=1", "drafter.anchors_per_batch=128")
    sizes = measure_sizes(run)
    model = DFlashDraftModel(sizes.drafter)
    model.init_weights(0)
    layout = Layout(256, sizes.taps, sizes.taps * TARGET["hidden_size"], 0, torch.float32)
    batch = layout.view(layout.allocate(torch.device("cpu")), 0)
    batch.position_ids.copy_(torch.arange(256))
    batch.loss_mask.fill_(1)
    blocks = make_blocks(batch, *sample_anchors(batch, 128, 0), 16, 0)
    noise = torch.randn(128, 16, TARGET["hidden_size"])

    @torch.no_grad()
    def walk() -> None:
        model(noise, batch.hidden_states, batch.position_ids, blocks, blocks.supervised)

    real = peak_bytes(walk)
    planned = walk_activations(sizes.drafter, learning_of(sizes, run))
    assert real < planned < 3 * real


def test_the_end_counts_where_it_takes_more_than_a_step(target: Path) -> None:
    """Few blocks of a small drafter: writing the export takes more than a backward."""
    few = settings(
        target, "drafter.anchors_per_batch=1", "data.heldout=null", "target.dtype=float32"
    )
    sizes = measure_sizes(few)
    assert "activations" in memory_of(sizes, few)["drafter"]
    # A large vocabulary: the head is there twice at the end.
    wide = replace(sizes, drafter=Qwen3Config(**{**sizes.drafter.to_dict(), "vocab_size": 200_000}))
    assert "export" in memory_of(wide, few)["drafter"]


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(1024, torch.float32), (16384, torch.bfloat16)],
    ids=["one piece", "several pieces"],
)
@pytest.mark.parametrize("words", [[], ["loss.labels=target"], ["loss=kl"], ["loss=tv"]])
def test_a_chunk_of_logits_is_what_its_objective_holds(
    words: list[str], vocabulary: int, dtype: torch.dtype, target: Path
) -> None:
    run = settings(target, *words, f"drafter.precision={str(dtype).removeprefix('torch.')}")
    theirs = torch.randn(512, 16) if run.loss.reads_target else None
    labels = torch.zeros(512, dtype=torch.long) if run.loss.labels == "data" else None
    weight = torch.randn(vocabulary, 16).to(dtype)
    rows = HeadRows(torch.randn(512, 16, requires_grad=True), weight, labels, theirs)
    real = peak_bytes(lambda: head_loss(rows, run.loss.kind, run.loss.rows_per_chunk))
    planned = logits_memory(vocabulary, 512, learning_of(measure_sizes(run), run))
    assert planned == pytest.approx(real, rel=0.1)
