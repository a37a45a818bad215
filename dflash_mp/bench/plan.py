"""How near the planner is: predicted against measured on a CPU.

    python -m dflash_mp.bench.plan

Three shapes of random targets and drafters. Measured are CPU seconds of one thread, so a busy
machine disturbs little: the target's forward into a frame, the drafter's loss and backward, and
its optimizer step. The planner gets the configurations and measures products and memory itself.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from hydra import compose, initialize_config_dir
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_mp.bench.machine import RESULTS, write_result
from dflash_mp.config import OptimConfig, config_dir, to_config
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.drafter.step import batch_loss
from dflash_mp.features import FeatureBatch
from dflash_mp.heap import keep_freed_memory
from dflash_mp.optim import build_optimizer
from dflash_mp.plan.plan import Sizes, costs_of, machine_for, measure_sizes
from dflash_mp.plan.settings import PlanRun
from dflash_mp.target.model import FeatureExtractor
from dflash_mp.wire.frame import DTYPES, Layout

ROUNDS = 3
PROMPT = 0.25
"""Share of a document's tokens without a label, at its start."""


@dataclass(frozen=True)
class Shape:
    """One target, one drafter, one batch."""

    name: str
    target: dict[str, int]
    overrides: list[str]


SHAPES = [
    Shape(
        "narrow",
        {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 8192,
        },
        [
            "drafter=dflash_2l",
            "drafter.anchors_per_batch=64",
            "data.max_length=2048",
            "data.tokens_per_batch=2048",
            "document_tokens=256",
        ],
    ),
    Shape(
        "smollm2",
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 12,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "vocab_size": 49152,
        },
        [
            "drafter=dflash_2l",
            "drafter.anchors_per_batch=48",
            "data.max_length=1024",
            "data.tokens_per_batch=1024",
            "document_tokens=512",
        ],
    ),
    Shape(
        "wide",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 32768,
        },
        [
            "drafter=dflash_5l",
            "drafter.anchors_per_batch=64",
            "data.max_length=1024",
            "data.tokens_per_batch=1024",
            "document_tokens=1024",
        ],
    ),
]


def main(arguments: list[str]) -> None:
    """Print a line for each shape and side, and write what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash_mp.bench.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("result", type=Path, nargs="?", default=RESULTS / "plan.json")
    path = parser.parse_args(arguments).result
    torch.set_num_threads(1)
    keep_freed_memory()  # as a rank does
    rows = []
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            rows += compare(shape, Path(folder))
    write_result(path, {"rows": rows})


def compare(shape: Shape, folder: Path) -> list[dict[str, object]]:
    """Predicted and measured seconds of one shape; measured in rounds with the rates beside."""
    torch.manual_seed(0)
    Qwen3Config(**shape.target).save_pretrained(folder)
    run = settings(folder, shape.overrides)
    sizes = measure_sizes(run)
    work = real_work(run, sizes, Qwen3Config(**shape.target))
    predicted: dict[str, list[float]] = {name: [] for name in work}
    measured: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(ROUNDS):
        costs = costs_of(sizes, run, machine_for(sizes, run))
        for name, seconds in zip(
            work, (costs.target_s, costs.drafter_s, costs.per_step_s), strict=True
        ):
            predicted[name].append(seconds)
            measured[name].append(cpu_seconds(work[name]))
    return [
        line(shape.name, name, median(predicted[name]), median(measured[name])) for name in work
    ]


def line(shape: str, name: str, predicted: float, measured: float) -> dict[str, object]:
    """Show one comparison."""
    off = predicted / measured - 1
    sys.stdout.write(
        f"{shape:8} {name:10} predicted {predicted * 1e3:9.1f} ms, measured {measured * 1e3:9.1f} "
        f"ms: {off:+.0%}\n"
    )
    sys.stdout.flush()
    return {"shape": shape, "side": name, "predicted_s": predicted, "measured_s": measured}


def settings(folder: Path, overrides: list[str]) -> PlanRun:
    """The planner's configuration for a target in ``folder``."""
    chosen = ["target=hub", f"target.name={folder}", "gpu=cpu", "supervised=0.98"]
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return to_config(compose("plan", [*chosen, *overrides]), PlanRun)


def real_work(run: PlanRun, sizes: Sizes, config: Qwen3Config) -> dict[str, Callable[[], object]]:
    """What the trainer does for a micro-batch and a step, as functions."""
    target = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    taps = sizes.drafter.dflash_config["target_layer_ids"]
    extractor = FeatureExtractor(target, taps)
    batch = random_batch(run, sizes)
    drafter = DFlashDraftModel(sizes.drafter)
    drafter.init_weights(0)
    optimizer = build_optimizer(drafter, OptimConfig("adamw", 1e-4, 0.0, 0.9, 0.95, 0.95, 1.0))
    head = FrozenHead(target.get_input_embeddings().weight.to(sizes.drafter_dtype))
    low = sizes.drafter_dtype == torch.bfloat16

    def learn() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            out = batch_loss(drafter, head, batch, 0, run.drafter, run.loss, seed=0)
        out.loss.backward()

    def step() -> None:
        for parameter in drafter.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()

    return {
        "target": lambda: extractor.fill(batch),
        "drafter": learn,
        "step": step,
    }


def random_batch(run: PlanRun, sizes: Sizes) -> FeatureBatch:
    """A full micro-batch of documents of one length, each with a prompt."""
    tokens, length = run.data.tokens_per_batch, run.document
    width = sizes.taps * sizes.target.hidden
    layout = Layout(tokens, sizes.taps, width, 0, DTYPES[run.wire.dtype]).plain
    batch = layout.view(layout.allocate(torch.device("cpu")), 0)
    slot = torch.arange(tokens)
    batch.input_ids.copy_(torch.randint(1, sizes.target.vocabulary, (tokens,)))
    batch.position_ids.copy_(slot % length)
    batch.document_ids.copy_(slot // length)
    batch.loss_mask.copy_(slot % length >= PROMPT * length)
    return batch


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process for the second run of ``work``."""
    work()
    begun = time.process_time()
    work()
    return time.process_time() - begun


if __name__ == "__main__":
    main(sys.argv[1:])
