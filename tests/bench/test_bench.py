"""The benchmarks run, and what they count is what is computed. Nothing here is timed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_mp.bench import data, gpu, plan, step, step_ours, stream, tables
from dflash_mp.bench.step_case import (
    Case,
    attention_flops,
    make_tensors,
    product_flops,
    write_models,
)
from dflash_mp.bench.step_worker import Prepare
from dflash_mp.markdown import with_tables

PAGE = Path(__file__).parents[2] / "BENCH.md"


class CountProducts(TorchDispatchMode):
    """Counts floating-point operations of products of two matrices."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = args[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


def test_tables_are_those_of_the_results():
    text = PAGE.read_text()
    assert with_tables(text, tables.tables()) == text


@pytest.mark.parametrize("case", [Case(8, "full", 192, (48,)), Case(8, "ragged", 192, (6,))])
def test_our_step_multiplies_no_more_than_what_is_useful(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """All matrix products that torch is asked for are those that ``product_flops`` names."""
    write_models(tmp_path, step.TINY)
    head = load_file(tmp_path / "target" / "model.safetensors")["lm_head.weight"]
    tensors = make_tensors(case, step.TINY, head)

    def count(folder: Path, model: torch.nn.Module, prepare: Prepare) -> None:
        forward = prepare(tensors)
        with CountProducts() as counter:
            forward().backward()
        assert counter.flops == product_flops(case, step.TINY, tensors)

    monkeypatch.setattr(step_ours, "serve", count)
    step_ours.main(tmp_path)


def test_attention_counts_visible_pairs():
    case = Case(8, "ragged", 192, (48, 6))
    tensors = make_tensors(case, step.TINY, torch.randn(300, 32))
    pairs = 0
    for anchors, keep in zip(tensors["anchors"].tolist(), tensors["keep"].tolist(), strict=True):
        for anchor, real in zip(anchors, keep, strict=True):
            pairs += real * 16 * (anchor + 16)
    # 2 FLOP a product and channel, seven products, five layers, 32 channels.
    assert attention_flops(step.TINY, tensors) == 2 * 7 * 5 * 32 * pairs


@pytest.mark.slow
def test_quick_form_of_the_step_runs(tmp_path: Path):
    step.main(["quick", str(tmp_path / "step.json")])
    (row,) = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert row["who"] == tables.OURS
    assert 5 < row["loss"] < 7
    assert row["peak_mib"] > 0
    assert tables.step_table([row])


@pytest.mark.distributed
@pytest.mark.slow
def test_quick_form_of_the_stream_runs(tmp_path: Path):
    stream.main(["quick", str(tmp_path / "stream.json")])
    found = json.loads((tmp_path / "stream.json").read_text())
    for part in ("windows", "sizes"):
        assert [row["edge"] for row in found[part]] == ["gloo", "shm"]
    for window, size in zip(found["windows"], found["sizes"], strict=True):
        assert 0 < window["efficiency"] < 2
        assert min(size["edge_gb_per_s"], size["stream_gb_per_s"], size["memcpy_gb_per_s"]) > 0
    assert tables.stream_tables(found)


@pytest.mark.slow
def test_the_benchmark_of_the_data_runs(tmp_path: Path):
    data.main(["300", str(tmp_path / "data.json")])
    found = json.loads((tmp_path / "data.json").read_text())
    assert found["rows"] == 300
    assert 0.5 < found["fill"] <= 1
    assert tables.data_table(found)


@pytest.mark.slow
def test_the_benchmark_of_the_planner_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    narrow = plan.SHAPES[0]
    target = narrow.target | {"num_hidden_layers": 10, "vocab_size": 500}
    fewer = [*narrow.overrides, "data.max_length=128", "data.tokens_per_batch=128"]
    fewer += ["document_tokens=64", "drafter.anchors_per_batch=4"]
    monkeypatch.setattr(plan, "SHAPES", [plan.Shape("tiny", target, fewer)])
    monkeypatch.setattr(plan, "ROUNDS", 1)
    plan.main([str(tmp_path / "plan.json")])
    rows = json.loads((tmp_path / "plan.json").read_text())["rows"]
    assert len(rows) == len(tables.plan_table({"rows": rows})) - 3
    assert all(row["predicted_s"] > 0 for row in rows)


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_runs_with_tiny_models_on_a_cpu(tmp_path: Path):
    path = tmp_path / "gpu.json"
    gpu.main(["--tiny", str(path)])
    found = json.loads(path.read_text())
    assert found["target"]["layers_run"] == 10
    plain, again = found["drafter"][:2], found["drafter"][2:]
    for row, other in zip(plain, again, strict=True):
        assert row["loss"] == other["loss"]
        assert row["recompiles"] == 0
    assert plain[1]["flop_per_s"] * plain[1]["tokens_per_s"] > 0
    assert [edge["name"] for edge in found["edges"]] == ["gloo", "shm"]
    assert all(edge["gb_per_s"] > 0 for edge in found["edges"])
    assert not any("Compiled again" in line for line in tables.gpu_tables(found))
    found["drafter"][1]["recompiles"] = 3
    flagged = [line for line in tables.gpu_tables(found) if "Compiled again" in line]
    assert flagged[0].endswith("sdpa at 8 anchors, 3 times.\n")


def test_without_a_gpu_the_benchmark_of_one_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.main([str(tmp_path / "gpu.json")])
    assert "no GPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
