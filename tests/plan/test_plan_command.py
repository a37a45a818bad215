"""The plan of a 27B target, what memory is made of, and how a job grows with its nodes."""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import ClassVar

import pytest
import torch
from hydra import compose, initialize_config_dir
from transformers import Qwen3Config

from dflash_mp.config import TrainConfig, UserError, config_dir, to_config
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.drafter.step import batch_loss
from dflash_mp.plan.memory import refuse_if_too_large, saved_activations
from dflash_mp.plan.plan import learning_of, make_plan, measure_sizes
from dflash_mp.plan.predict import Costs, Prediction, predict
from dflash_mp.plan.report import splits
from dflash_mp.plan.scaling import expected_maximum, node_counts, simulate
from dflash_mp.plan.settings import PlanRun, ScalingConfig
from dflash_mp.wire.frame import Layout

HERE = Path(__file__).parent
CONF = Path(config_dir())
TARGET_27B = ["target=hub", f"target.name={HERE / 'qwen3_6_27b'}"]
SEEDS_RATE = 12_000
"""Tokens/s of the programs that this project was started from, on eight GPUs."""


def settings(*overrides: str) -> PlanRun:
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return to_config(compose("plan", [*TARGET_27B, *overrides]), PlanRun)


def test_five_and_three_comes_out_for_a_27b_target_on_eight_gpus() -> None:
    plan = make_plan(settings("gpus=8", "gpu=h200"))
    assert (plan["best"]["targets"], plan["best"]["drafters"]) == (5, 3)
    assert plan["best"] == plan["default"]
    assert plan["best"]["rate"] > 3 * SEEDS_RATE
    # 27 billion parameters less the embedding, and the draft layers of its width.
    assert plan["target"]["parameters"] == pytest.approx(26.9e9, rel=0.01)
    assert (plan["target"]["layers_run"], plan["drafter"]["layers"]) == (62, 5)
    assert plan["wire"]["share_of_link"] < 0.05


@pytest.mark.parametrize("gpu", ["h100", "b200", "a100"])
def test_the_split_hardly_depends_on_the_gpu(gpu: str) -> None:
    plan = make_plan(settings(f"gpu={gpu}"))
    assert plan["default"]["rate"] > 0.85 * plan["best"]["rate"]


OTHERWISE = ["optim=muon", "loss=kl", "experiment=two_nodes", "drafter.layers=4"]


@pytest.mark.parametrize(
    ("target", "more"),
    [
        *((path.stem, []) for path in sorted(CONF.glob("target/*.yaml"))),
        ("qwen3_8b", OTHERWISE),
    ],
)
def test_what_is_planned_is_what_would_be_trained(target: str, more: list[str]) -> None:
    """The same words make the same models and micro-batches as those of the training."""
    words = [f"target={target}", "target.name=some", "data.train=my.jsonl", "optim.lr=3e-4", *more]
    with initialize_config_dir(config_dir(), version_base="1.3"):
        training = to_config(compose("train", words), TrainConfig)
        plan = to_config(compose("plan", words), PlanRun)
    for part in vars(training):
        assert getattr(plan, part) == getattr(training, part), part


def test_a_step_is_that_of_the_training_and_a_split_of_more_drafters_says_so() -> None:
    plan = make_plan(settings("micro_batches_per_step=4", "steps=1000"))
    steps = {one["drafters"]: one["step_tokens"] // 4096 for one in plan["splits"]}
    assert [steps[drafters] for drafters in (1, 4, 5, 7)] == [4, 4, 5, 7]
    rows = {line.split()[2]: line for line in splits(plan) if " + " in line}
    assert "needs" not in rows["4"]
    assert rows["5"].endswith("needs micro_batches_per_step=5")
    assert plan["steps"] == 1000


@pytest.mark.parametrize("words", ["init.from=a/b", "isolation=threads"])
def test_what_cannot_be_planned_is_refused(words: str) -> None:
    with pytest.raises(UserError, match=words.replace("/", ".")):
        settings(words)


def test_the_split_of_the_run_is_pointed_out() -> None:
    plan = make_plan(settings("topology.drafters=2"))
    assert (plan["default"]["targets"], plan["default"]["drafters"]) == (6, 2)
    assert plan["best"] == make_plan(settings())["best"]


def test_nodes_multiply_ranks_and_cost_an_exchange() -> None:
    one, four = make_plan(settings()), make_plan(settings("nodes=4"))
    assert 3 * one["best"]["rate"] < four["best"]["rate"] <= 4 * one["best"]["rate"]
    assert four["best"]["all_reduce_s"] > one["best"]["all_reduce_s"]
    assert one["wire"]["share_of_network"] == 0 < four["wire"]["share_of_network"]


def test_an_exchange_is_hidden_behind_a_backward_that_flex_has_and_sdpa_has_not() -> None:
    flex, sdpa = (
        make_plan(settings(f"drafter.attention={kind}", "gpu.exchange_gb_s=10"))["best"]
        for kind in ("flex", "sdpa")
    )
    assert 0.5 < flex["all_reduce_s"] / sdpa["all_reduce_s"] < 2
    assert 0 < sdpa["exposed_s"] == sdpa["all_reduce_s"]
    assert flex["exposed_s"] < flex["all_reduce_s"]
    # What is not hidden is a part of the step.
    hidden, exposed = (
        predict(Costs(**{**vars(COSTS), "hidden_s": seconds}), 5, 3, 1) for seconds in (0.19, 0.0)
    )
    assert exposed.step_s - hidden.step_s == pytest.approx(exposed.exposed_s - hidden.exposed_s)
    assert hidden.exposed_s == max(0.0, hidden.all_reduce_s - 0.19)


def test_hours_and_disk_follow_the_data_and_the_policy() -> None:
    once = make_plan(settings("tokens=1e8", "epochs=1"))
    twice = make_plan(settings("tokens=1e8", "epochs=2", "checkpoint.keep=5"))
    assert twice["hours"] == pytest.approx(2 * once["hours"])
    assert once["gpu_hours"] == pytest.approx(8 * once["hours"])
    assert once["disk"]["checkpoint"] == 12 * once["drafter"]["parameters"]
    assert (
        twice["disk"]["checkpoints"] - once["disk"]["checkpoints"] == 3 * once["disk"]["checkpoint"]
    )


def test_a_quantised_wire_halves_the_load_and_a_drafter_pays_for_the_values() -> None:
    wide, narrow = measure_sizes(settings()), measure_sizes(settings("wire.dtype=fp8"))
    assert 0.5 < narrow.frame / wide.frame < 0.51
    # The ring shrinks; padding and the values of one frame stay in bfloat16.
    assert wide.beside_ring == wide.frame
    assert 1.99 < narrow.beside_ring / wide.frame <= 2.01
    plans = make_plan(settings()), make_plan(settings("wire.dtype=fp8"))
    loads = [plan["wire"]["drafter_receives"] for plan in plans]
    assert loads[1] / loads[0] == pytest.approx(narrow.frame / wide.frame)


def test_what_does_not_fit_is_refused_with_the_part_to_change() -> None:
    with pytest.raises(UserError, match=r"a target rank needs 5\d\.. GB \(weights 53.*smaller"):
        make_plan(settings("gpu.memory_gb=40"))
    with pytest.raises(UserError, match=r"a drafter rank needs .* lower .*anchors_per_batch"):
        make_plan(settings("gpu.memory_gb=80", "drafter.anchors_per_batch=4096"))
    refuse_if_too_large("target", {"weights": 1.0}, 1.0)


class Kept:
    """A tensor that autograd keeps; storages are counted once, parameters (``free``) never."""

    free: ClassVar[set[int]] = set()
    uses: ClassVar[Counter[int]] = Counter()
    now = peak = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, storage = tensor, tensor.untyped_storage()
        self.key, self.nbytes = storage.data_ptr(), storage.nbytes()
        Kept.uses[self.key] += 1
        if Kept.uses[self.key] == 1 and self.key not in Kept.free:
            Kept.now += self.nbytes
            Kept.peak = max(Kept.peak, Kept.now)

    def __del__(self) -> None:
        Kept.uses[self.key] -= 1
        if Kept.uses[self.key] == 0 and self.key not in Kept.free:
            Kept.now -= self.nbytes


@pytest.mark.parametrize("anchors", [16, 128])
def test_saved_activations_are_those_that_autograd_keeps(anchors: int, tmp_path: Path) -> None:
    """Counted by torch: the most bytes that exist at a time, in one slice of blocks or four."""
    Qwen3Config(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=64,
    ).save_pretrained(tmp_path)
    run = settings(
        f"target.name={tmp_path}",
        "gpu=cpu",
        "data.max_length=256",
        "data.tokens_per_batch=256",
        "document_tokens=256",
        f"drafter.anchors_per_batch={anchors}",
        "supervised=1",
        "drafter.precision=float32",
    )
    sizes = measure_sizes(run)
    model = DFlashDraftModel(sizes.drafter)
    model.init_weights(0)
    head = FrozenHead(torch.randn(64, 256))
    layout = Layout(256, sizes.taps, sizes.taps * 256, 0, torch.float32)
    batch = layout.view(layout.allocate(torch.device("cpu")), 0)
    batch.position_ids.copy_(torch.arange(256))
    batch.loss_mask.fill_(1)
    Kept.free = {p.untyped_storage().data_ptr() for p in model.parameters()}
    Kept.uses, Kept.now, Kept.peak = Counter(), 0, 0
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        batch_loss(model, head, batch, 0, run.drafter, run.loss, seed=0)
    assert Kept.peak == pytest.approx(
        saved_activations(sizes.drafter, learning_of(sizes, run)), rel=0.15
    )


COSTS = Costs(
    tokens=4096,
    target_s=0.4,
    drafter_s=0.28,
    hidden_s=0.19,
    per_step_s=0.01,
    gradient=7e9,
    exchange=4.5e11,
    network=5e10,
    latency_s=1e-5,
    per_step=6000,
)


def test_the_slowest_of_many_as_drawn() -> None:
    generator = random.Random(0)
    for count in (1, 3, 30, 300):
        drawn = fmean(max(generator.gauss(0, 1) for _ in range(count)) for _ in range(3000))
        assert expected_maximum(count) == pytest.approx(drawn, abs=0.06)


def test_a_job_loses_a_little_with_each_node_and_much_when_its_store_is_full() -> None:
    split = predict(COSTS, 5, 3, 1)
    scales = simulate(COSTS, split, 1000, ScalingConfig(0.02, 10.0, 5000.0))
    assert [scale.nodes for scale in scales] == node_counts(1000)
    own = [scale.efficiency_node_stores for scale in scales]
    assert own[0] == 1
    assert own == sorted(own, reverse=True)
    assert own[-1] > 0.8
    assert scales[-1].one_store == 5000 * COSTS.tokens < scales[-1].node_stores


def test_equal_ranks_without_costs_lose_nothing() -> None:
    costs = Costs(**{**vars(COSTS), "gradient": 0.0, "latency_s": 0.0, "per_step": 6 * 64})
    scales = simulate(costs, predict(costs, 5, 3, 1), 64, ScalingConfig(0.0, 0.0, 1e9))
    assert [scale.efficiency_node_stores for scale in scales] == pytest.approx([1.0] * len(scales))


@pytest.mark.slow
def test_the_command_writes_a_table_json_and_a_picture(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dflash_mp.plan", *TARGET_27B, f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(
        [*command, "simulate=true", "nodes=1000"], capture_output=True, text=True, check=True
    )
    assert "5 + 3" in done.stdout
    assert "best, default" in done.stdout
    facts = json.loads((tmp_path / "plan.json").read_text())
    assert Prediction(**facts["best"]).nodes == 1000
    assert len(facts["scaling"]) == len(node_counts(1000))
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
