"""What one GPU makes of a drafter's step and of a target's forward, and which edges work on it.

    python -m dflash_mp.bench.gpu

The drafter of Qwen3-8B at 256 and 512 anchors, with FlexAttention, without and with activation
checkpointing, and with sdpa; the forward of a target of that shape with random weights, cut to the
layers that fit. Where there is no GPU it says so and ends. After some minutes no new case begins.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from dflash_mp.bench.gpu_edges import try_edges
from dflash_mp.bench.machine import RESULTS, write_result
from dflash_mp.bench.plan import random_batch, settings
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.drafter.step import batch_loss
from dflash_mp.features import FeatureBatch
from dflash_mp.plan.machine import peak_rate
from dflash_mp.plan.plan import Sizes, measure_sizes, work_of_target
from dflash_mp.plan.settings import PlanRun
from dflash_mp.recompiles import compiled_graphs
from dflash_mp.roles.flops import Trained, drafter_flops
from dflash_mp.target.layers import decoder_layers
from dflash_mp.target.model import FeatureExtractor

LIMIT_S = 150.0
"""Cases that have not begun by then are left out; one takes up to a minute, mostly compiling."""

TARGET_SHARE = 0.5
"""Of the free memory, for the target's weights."""

LEAST_LAYERS = 12


@dataclass(frozen=True)
class Form:
    """What is measured."""

    target: dict[str, int]
    overrides: tuple[str, ...]
    """Of the planner's keys, which describe models and micro-batch."""

    anchors: tuple[int, ...]
    variants: tuple[tuple[str, bool], ...]
    """Attention, and whether activations are made again."""

    repeats: int


FULL = Form(
    target={
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    overrides=(
        *("drafter=qwen3_8b", "gpu=h200", "data.tokens_per_batch=4096"),
        "document_tokens=1024",
    ),
    anchors=(256, 512),
    variants=(("flex", False), ("sdpa", False), ("flex", True)),
    repeats=10,
)
TINY = Form(
    target={
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 500,
    },
    overrides=(
        *("drafter=dflash_2l", "data.max_length=128", "data.tokens_per_batch=128"),
        "document_tokens=64",
    ),
    anchors=(4, 8),
    variants=(("sdpa", False), ("sdpa", True)),
    repeats=2,
)


def main(arguments: list[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash_mp.bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("result", type=Path, nargs="?", default=RESULTS / "gpu.json")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU, as a trial")
    parsed = parser.parse_args(arguments)
    if parsed.tiny:
        write_result(parsed.result, measure(TINY, torch.device("cpu")))
    elif torch.cuda.is_available():
        write_result(parsed.result, measure(FULL, torch.device("cuda", 0)))
    else:
        say("there is no GPU here: nothing was measured")


def say(line: str) -> None:
    """One line on the terminal."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def measure(form: Form, device: torch.device) -> dict[str, Any]:
    """All of ``form`` on ``device``, as JSON values."""
    begun = time.perf_counter()
    torch.manual_seed(0)
    config = Qwen3Config(**form.target)
    config = Qwen3Config(**form.target | {"num_hidden_layers": fitting_layers(config, device)})
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        run = settings(Path(folder), list(form.overrides))
        sizes = measure_sizes(run)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    found: dict[str, Any] = {"gpu": gpu, "cuda": torch.version.cuda}
    found["target"] = target_forward(run, sizes, config, device, form.repeats)
    say(f"target: {found['target']['tokens_per_s']:,.0f} tokens/s")
    # The target is gone; what was its memory is for other processes, too.
    gc.collect()
    torch.cuda.empty_cache()
    found["edges"] = try_edges(device)
    for edge in found["edges"]:
        say(f"edge {edge['name']}: {edge['said']}")
    drafter = Drafter(run, sizes, device)
    rows, left_out = [], []
    for attention, recompute in form.variants:
        for anchors in form.anchors:
            case = {"attention": attention, "checkpointing": recompute, "anchors": anchors}
            problem = "no time left"
            if time.perf_counter() - begun < LIMIT_S:
                problem = "out of memory"
                with suppress(torch.OutOfMemoryError):
                    rows.append(case | drafter.measure(attention, recompute, anchors, form.repeats))
                    again = rows[-1]["recompiles"]
                    warning = f"; COMPILED AGAIN {again} times: shapes vary" if again else ""
                    say(f"{case}: {rows[-1]['tokens_per_s']:,.0f} tokens/s{warning}")
                    continue
            left_out.append(case | {"problem": problem})
            say(f"{case}: {problem}")
    return {**found, "drafter": rows, "left_out": left_out}


def fitting_layers(config: Qwen3Config, device: torch.device) -> int:
    """As many of ``config``'s layers as fit into ``TARGET_SHARE`` of the free memory."""
    if device.type == "cpu":
        return config.num_hidden_layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layer = sum(parameter.numel() for parameter in decoder_layers(model)[0].parameters())
    rest = sum(parameter.numel() for parameter in model.parameters())
    rest -= layer * config.num_hidden_layers
    free = TARGET_SHARE * torch.cuda.mem_get_info(device)[0] / torch.bfloat16.itemsize
    return max(LEAST_LAYERS, min(config.num_hidden_layers, int((free - rest) / layer)))


def target_forward(
    run: PlanRun, sizes: Sizes, config: Qwen3Config, device: torch.device, repeats: int
) -> dict[str, Any]:
    """A micro-batch through the layers of a random target up to the deepest tapped one."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=sizes.target_dtype, attn_implementation="sdpa"
        )
    model.eval().requires_grad_(False)
    extractor = FeatureExtractor(model, sizes.drafter.dflash_config["target_layer_ids"])
    batch = moved(random_batch(run, sizes), device)
    extractor.fill(batch)
    seconds, peak = timed(lambda: extractor.fill(batch), device, repeats)
    work = work_of_target(sizes)
    rate = (work.flops + work.attention) / median(seconds)
    return {
        "layers": config.num_hidden_layers,
        "layers_run": sizes.depth,
        "parameters": sizes.target.parameters,
        "dtype": str(sizes.target_dtype).removeprefix("torch."),
        **speed(run, seconds, rate, sizes.target_dtype, sizes, device),
        "peak_bytes": peak,
    }


class Drafter:
    """A random drafter with its frozen head and a micro-batch."""

    def __init__(self, run: PlanRun, sizes: Sizes, device: torch.device) -> None:
        self.run, self.sizes, self.device = run, sizes, device
        with torch.device(device):
            self.model = DFlashDraftModel(sizes.drafter)
            vocabulary = (sizes.target.vocabulary, sizes.target.hidden)
            self.head = FrozenHead(0.02 * torch.randn(vocabulary, dtype=sizes.drafter_dtype))
        self.batch = moved(random_batch(run, sizes), device)
        self.batch.hidden_states.normal_()

    def measure(
        self, attention: str, recompute: bool, anchors: int, repeats: int
    ) -> dict[str, Any]:
        """Forward and backward of micro-batches with other anchors each, without the optimizer."""
        self.model.attention, self.model.recompute = attention, recompute
        drafter = replace(self.run.drafter, anchors_per_batch=anchors)
        low = self.sizes.drafter_dtype == torch.bfloat16
        numbers = count()
        counts: list[Tensor] = []

        def step() -> None:
            batch = replace(self.batch, number=next(numbers))
            with torch.autocast(self.device.type, torch.bfloat16, enabled=low):
                out = batch_loss(self.model, self.head, batch, 0, drafter, self.run.loss, seed=0)
            out.loss.backward()
            counts.append(out.counts)
            # Gradients count as memory of the step.
            self.model.zero_grad(set_to_none=True)

        # What a case before, which ran out of memory, may have left.
        self.model.zero_grad(set_to_none=True)
        (first,), _ = timed(step, self.device, 1)
        graphs = compiled_graphs()
        counts.clear()
        seconds, peak = timed(step, self.device, repeats)
        recompiles = compiled_graphs() - graphs
        loss, weight, _, supervised, tokens, blocks = torch.stack(counts).sum(dim=0).tolist()
        trained = Trained(repeats, tokens, blocks, supervised)
        flops = drafter_flops(
            self.sizes.drafter, trained, self.run.document, self.run.loss.reads_target
        )
        rate = flops / repeats / median(seconds)
        dtype = self.sizes.drafter_dtype
        return {
            "dtype": str(dtype).removeprefix("torch."),
            **speed(self.run, seconds, rate, dtype, self.sizes, self.device),
            "first_s": first,
            "peak_bytes": peak,
            "recompiles": recompiles,
            "loss": loss / weight,
        }


def moved(batch: FeatureBatch, device: torch.device) -> FeatureBatch:
    """``batch`` on ``device``."""
    tensors: dict[str, Any] = {
        name: value.to(device) for name, value in vars(batch).items() if isinstance(value, Tensor)
    }
    return replace(batch, **tensors)


def timed(
    work: Callable[[], object], device: torch.device, repeats: int
) -> tuple[list[float], int | None]:
    """Seconds of each run of ``work``, and the most bytes allocated above those at the start.

    None on a CPU, where nobody counts them.
    """
    on_gpu = device.type == "cuda"
    before = 0
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return seconds, torch.cuda.max_memory_allocated(device) - before if on_gpu else None


def speed(
    run: PlanRun,
    seconds: list[float],
    rate: float,
    dtype: torch.dtype,
    sizes: Sizes,
    device: torch.device,
) -> dict[str, Any]:
    """Seconds, tokens/s, and ``rate`` in FLOP/s as a share of what the device makes at most."""
    peak = peak_rate(device, dtype, sizes.target.hidden, sizes.drafter.intermediate_size)
    return {
        "seconds": seconds,
        "tokens_per_s": run.data.tokens_per_batch / median(seconds),
        "flop_per_s": rate,
        "mfu": None if peak is None else rate / peak,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
