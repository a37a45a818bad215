"""The planner's FLOP counts against torch's own counter on real models, forward and backward."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from dflash_mp.config import OptimConfig, config_dir, to_config
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.drafter.step import batch_loss
from dflash_mp.features import FeatureBatch
from dflash_mp.optim import build_optimizer
from dflash_mp.plan.plan import Sizes, measure_sizes, work_of_drafter, work_of_target
from dflash_mp.plan.settings import PlanRun
from dflash_mp.plan.work import step_work
from dflash_mp.roles.flops import Trained, drafter_flops
from dflash_mp.target.model import FeatureExtractor
from dflash_mp.wire.frame import DTYPES, Layout

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
}
TARGETS: dict[str, Callable[[], PretrainedConfig]] = {
    "dense": lambda: Qwen3Config(**SMALL),
    "sliding": lambda: Qwen3Config(
        **SMALL, use_sliding_window=True, sliding_window=32, max_window_layers=4
    ),
    "experts": lambda: Qwen3MoeConfig(
        **SMALL, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2
    ),
    "linear attention": lambda: Qwen3_5TextConfig(
        **SMALL,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
    ),
}
TOKENS, DOCUMENT = 512, 128


def settings(folder: Path, *overrides: str) -> PlanRun:
    chosen = ["target=hub", f"target.name={folder}", "gpu=cpu", "drafter=dflash_2l", *overrides]
    chosen += [f"data.max_length={TOKENS}", f"data.tokens_per_batch={TOKENS}"]
    chosen += [f"document_tokens={DOCUMENT}"]
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return to_config(compose("plan", chosen), PlanRun)


def filled(sizes: Sizes) -> FeatureBatch:
    """Documents of one length, all of it supervised."""
    layout = Layout(TOKENS, sizes.taps, sizes.taps * sizes.target.hidden, 0, DTYPES["float32"])
    batch = layout.view(layout.allocate(torch.device("cpu")), 0)
    slot = torch.arange(TOKENS)
    batch.input_ids.copy_(slot % 500)
    batch.position_ids.copy_(slot % DOCUMENT)
    batch.document_ids.copy_(slot // DOCUMENT)
    batch.loss_mask.fill_(1)
    return batch


def solve_flops(matrix: tuple[int, ...], right: tuple[int, ...], *_: object, **__: object) -> int:
    """A triangular solve of a chunk; kernels multiply with the inverse instead."""
    return 2 * torch.Size(matrix).numel() * right[-1]


def counted(work: Callable[[], object]) -> int:
    # With plain products in attention: the counter does not know the fused CPU kernel.
    solve = {torch.ops.aten.linalg_solve_triangular: solve_flops}
    counter = FlopCounterMode(display=False, custom_mapping=solve)
    with counter, sdpa_kernel(SDPBackend.MATH):
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", list(TARGETS))
def test_a_target_forward_to_the_deepest_tap(kind: str, tmp_path: Path) -> None:
    config = TARGETS[kind]()
    config.save_pretrained(tmp_path)
    sizes = measure_sizes(settings(tmp_path))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    if kind == "experts":
        model.set_experts_implementation("eager")
    extractor = FeatureExtractor(model, sizes.drafter.dflash_config["target_layer_ids"])
    batch = filled(sizes)
    work = work_of_target(sizes)
    assert sizes.depth < len(sizes.target.layers)
    assert sizes.target.packs == (kind != "linear attention")
    assert work.flops + work.attention == pytest.approx(
        counted(lambda: extractor.fill(batch)), rel=0.01
    )


@pytest.mark.parametrize("sliding", [0, 2])
@pytest.mark.parametrize("anchors", [16, 128])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_drafter_step(sliding: int, anchors: int, recompute: bool, tmp_path: Path) -> None:
    TARGETS["dense"]().save_pretrained(tmp_path)
    run = settings(
        tmp_path,
        f"drafter.sliding_layers={sliding}",
        "drafter.sliding_window=24",
        f"drafter.anchors_per_batch={anchors}",
        f"drafter.activation_checkpointing={recompute}",
    )
    sizes = measure_sizes(run)
    model = DFlashDraftModel(sizes.drafter, recompute=recompute)
    model.init_weights(0)
    head = FrozenHead(torch.randn(sizes.target.vocabulary, sizes.target.hidden))
    batch = filled(sizes)
    done: list[list[float]] = []

    def step() -> None:
        out = batch_loss(model, head, batch, 0, run.drafter, run.loss, seed=0)
        out.loss.backward()
        done.append(out.counts.tolist())

    flops = counted(step)
    *_, supervised, tokens, blocks = done[0]
    run.supervised = supervised / (anchors * (run.drafter.block_size - 1))
    work = work_of_drafter(measure_sizes(run), run)
    # Plain products keep the weights of attention; the planner counts kernels that make them again.
    plain = 8 / 9 if recompute else 6 / 7
    assert work.flops + work.attention * plain == pytest.approx(flops, rel=0.05)
    if recompute:
        return
    # What a run counts for its MFU, here two such micro-batches.
    trained = Trained(2, 2 * tokens, 2 * blocks, 2 * supervised)
    twice = drafter_flops(sizes.drafter, trained, DOCUMENT, reads_target=False)
    assert twice == pytest.approx(2 * (work.flops + work.attention), rel=0.01)


def test_on_a_gpu_slots_without_a_label_cost_as_much(tmp_path: Path) -> None:
    TARGETS["dense"]().save_pretrained(tmp_path)
    half, whole = (
        [
            work_of_drafter(measure_sizes(run), run).flops
            for run in (
                settings(tmp_path, f"gpu={gpu}", f"supervised={share}") for share in (0.5, 1.0)
            )
        ]
        for gpu in ("cpu", "h200")
    )
    assert half[0] < half[1]
    assert whole[0] == whole[1] == half[1]


def test_a_step_of_muon(tmp_path: Path) -> None:
    TARGETS["dense"]().save_pretrained(tmp_path)
    sizes = measure_sizes(settings(tmp_path))
    model = DFlashDraftModel(sizes.drafter)
    model.init_weights(0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = build_optimizer(model, OptimConfig("muon", 1e-4, 0.0, 0.9, 0.95, 0.95, 1.0))
    planned = step_work(sizes.drafter_parameters, sizes.matrices)
    assert planned.flops == counted(optimizer.step)
    assert step_work(sizes.drafter_parameters).flops == 0
