"""A compiled target: the same features, one form of each layer, and decoding left alone."""

import shutil
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from dflash_mp.config import TargetConfig, UserError
from dflash_mp.roles.target import rows
from dflash_mp.speculate import DecodeSettings, speculative_decode
from dflash_mp.target.model import FeatureExtractor
from golden_models import golden_drafter, golden_head, golden_prompts, golden_target
from test_features import LAYER_IDS, LENGTHS, packed, tiny_model

SLOTS = 200
ROWS = [LENGTHS, [1, 2, 3, 4], [199], [SLOTS], [64, 2, 100], [1] * SLOTS]
"""Few and many documents, with and without padding; one document has a form of its own."""


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs and guards as ever, but no code is generated: for speed."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def fill_both(model: nn.Module, ids: list[int], vocabulary: int = 100) -> list[int]:
    """Fill all ``ROWS`` compiled and not, and compare; the number of graphs behind each."""
    final = model.config.hidden_size == 32
    plain = FeatureExtractor(model, ids, final, fixed=True)
    other = FeatureExtractor(model, ids, final, compiled_slots=SLOTS)
    begun, made = graphs(), []
    for lengths in ROWS:
        width, used = len(ids) * model.config.hidden_size, sum(lengths)
        expected, found = (packed(lengths, SLOTS, width, vocabulary) for _ in range(2))
        plain.fill(expected)
        other.fill(found, used)
        for name in ("hidden_states", "final_hidden") if final else ("hidden_states",):
            got, right = getattr(found, name), getattr(expected, name)
            assert (got[:used] - right[:used]).abs().max() < 1e-4 * right[:used].abs().max()
            assert got[used:].isnan().all(), "padding is left alone"
        made.append(graphs() - begun)
    assert other.tokens == plain.tokens
    return made


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.usefixtures("traced")
def test_all_layers_share_two_graphs_whatever_the_documents(kind: str) -> None:
    assert fill_both(tiny_model(kind), LAYER_IDS) == [2] * len(ROWS)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_generated_code_makes_the_same_features() -> None:
    assert fill_both(tiny_model("llama"), LAYER_IDS) == [2] * len(ROWS)


@pytest.mark.usefixtures("traced")
def test_rows_of_other_lengths_run_uncompiled() -> None:
    extractor = FeatureExtractor(tiny_model("qwen3"), LAYER_IDS, compiled_slots=SLOTS)
    extractor.fill(packed(LENGTHS, SLOTS, 64))
    before = graphs()
    batch = packed(LENGTHS, SLOTS, 64)
    for part in (rows(batch, 0, 75), rows(batch, 75, SLOTS)):
        extractor.fill(part)
    assert graphs() == before
    assert batch.hidden_states[: sum(LENGTHS)].isfinite().all()


@pytest.mark.usefixtures("traced")
def test_decoding_goes_on_with_the_target_as_it_was() -> None:
    target, drafter, head = golden_target(), golden_drafter(), golden_head()
    prompts, settings = golden_prompts()[:3], DecodeSettings(20)
    texts = [speculative_decode(target, drafter, head, p, settings).tokens for p in prompts]
    ids = drafter.config.dflash_config["target_layer_ids"]
    extractor = FeatureExtractor(target, ids, compiled_slots=64)
    batch = packed([30, 20], 64, len(ids) * target.config.hidden_size)
    extractor.fill(batch)
    before = graphs()
    assert before > 0
    again = [speculative_decode(target, drafter, head, p, settings).tokens for p in prompts]
    assert again == texts
    assert graphs() == before
    assert all(
        ours.data_ptr() == theirs.data_ptr()
        for ours, theirs in zip(extractor._compiled.parameters(), target.parameters(), strict=True)
    ), "no second copy of the weights"


def test_a_target_that_takes_a_row_a_document_is_refused() -> None:
    with pytest.raises(UserError, match=r"target\.compile=true: Qwen3NextForCausalLM runs every"):
        FeatureExtractor(tiny_model("hybrid"), LAYER_IDS, compiled_slots=SLOTS)


def test_an_attention_whose_shapes_vary_is_refused() -> None:
    with pytest.raises(UserError, match=r"target\.compile=true: with target\.attention=flash"):
        TargetConfig("some/model", None, "auto", "flash_attention_2", None, False, compile=True)
