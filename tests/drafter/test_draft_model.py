"""The draft model against values of independent implementations, and its own invariants."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from golden_rows import BLOCK, MASK, concatenate
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_mp.drafter.anchors import Blocks, make_blocks
from dflash_mp.drafter.frozen_head import FrozenHead
from dflash_mp.drafter.model import DFlashDraftModel, DraftCache
from dflash_mp.features import FeatureBatch

GoldenRow = Callable[[str, int], tuple[FeatureBatch, Blocks]]


def run(model: DFlashDraftModel, head: FrozenHead, batch: FeatureBatch, blocks: Blocks) -> Tensor:
    return model(head.embed(blocks.input_ids), batch.hidden_states, batch.position_ids, blocks)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", ["main", "full", "tail"])
def test_hidden_states_equal_the_golden_ones(
    case: str,
    attention: str,
    drafter: DFlashDraftModel,
    head: FrozenHead,
    golden_row: GoldenRow,
    outputs: dict[str, Tensor],
):
    drafter.attention = attention
    for row in range(2):
        batch, blocks = golden_row(case, row)
        hidden = run(drafter, head, batch, blocks)
        golden = outputs[f"specforge.{case}.hidden"][row].view(hidden.shape)
        torch.testing.assert_close(hidden[blocks.valid], golden[blocks.valid], atol=1e-5, rtol=0)
        assert (hidden[~blocks.valid] == 0).all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_equals_the_golden_hidden_states(
    drafter: DFlashDraftModel, head: FrozenHead, golden_row: GoldenRow, outputs: dict[str, Tensor]
):
    drafter.attention = "flex"
    batch, blocks = golden_row("main", 1)
    hidden = run(drafter, head, batch, blocks)
    golden = outputs["specforge.main.hidden"][1].view(hidden.shape)
    torch.testing.assert_close(hidden[blocks.valid], golden[blocks.valid], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("specforge.full.sliding10.hidden", {}),
        ("zlab.full.per_anchor.sliding10.hidden", {}),
        ("zlab.full.per_anchor.sliding10.noncausal.hidden", {"is_causal": False}),
    ],
)
def test_sliding_window_equals_the_golden_hidden_states(
    name: str,
    changes: dict[str, bool],
    sliding_drafter: Callable[..., DFlashDraftModel],
    head: FrozenHead,
    golden_row: GoldenRow,
    outputs: dict[str, Tensor],
):
    model = sliding_drafter(10, **changes)
    golden = outputs[name].view(2, 5, BLOCK, -1)
    for row in range(2):
        batch, blocks = golden_row("full", row)
        hidden = run(model, head, batch, blocks)
        torch.testing.assert_close(hidden, golden[row], atol=1e-5, rtol=0)


def test_packed_documents_equal_the_golden_hidden_states(
    drafter: DFlashDraftModel, head: FrozenHead, outputs: dict[str, Tensor]
):
    packed = {
        key.removeprefix("speculators.packed_input."): value
        for key, value in outputs.items()
        if key.startswith("speculators.packed_input.")
    }
    batch = FeatureBatch(
        number=0,
        input_ids=packed["input_ids"][0],
        position_ids=packed["position_ids"][0],
        document_ids=packed["document_ids"][0],
        loss_mask=packed["loss_mask"][0].to(torch.uint8),
        hidden_states=packed["hidden_states"][0].float(),
    )
    blocks = make_blocks(batch, packed["anchors"], packed["keep"], BLOCK, MASK)
    hidden = run(drafter, head, batch, blocks)
    golden = outputs["speculators.packed.sdpa.kl_div.gamma4.hidden"].view(hidden.shape)
    torch.testing.assert_close(hidden[blocks.valid], golden[blocks.valid], atol=1e-5, rtol=0)
    # Of the 35 labels speculators counts there, 4 lie in the next document.
    assert blocks.supervised.sum() == 31


@torch.no_grad()
def test_cached_decoding_equals_the_golden_hidden_states(
    drafter: DFlashDraftModel, head: FrozenHead, golden_row: GoldenRow, outputs: dict[str, Tensor]
):
    batch, _ = golden_row("full", 0)
    cache = DraftCache()
    for start, end, name in ((0, 13, "nocache"), (13, 17, "step2")):
        ids = torch.tensor([int(batch.input_ids[end])] + [MASK] * (BLOCK - 1))
        hidden = drafter.draft(head.embed(ids), batch.hidden_states[start:end], cache)
        golden = outputs[f"zlab.infer.{name}.hidden"][0]
        torch.testing.assert_close(hidden, golden, atol=1e-5, rtol=0)
        assert cache.length == end


@pytest.mark.parametrize("window", [None, 3, 10])
@torch.no_grad()
def test_cached_decoding_equals_training_at_every_anchor(
    window: int | None,
    drafter: DFlashDraftModel,
    sliding_drafter: Callable[..., DFlashDraftModel],
    head: FrozenHead,
    golden_row: GoldenRow,
):
    model = drafter if window is None else sliding_drafter(window)
    batch, blocks = golden_row("full", 1)
    trained = run(model, head, batch, blocks)
    cache = DraftCache()
    for block, anchor in enumerate(blocks.anchors.tolist()):
        new = batch.hidden_states[cache.length : anchor]
        drafted = model.draft(head.embed(blocks.input_ids[block]), new, cache)
        torch.testing.assert_close(drafted, trained[block], atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 10])
def test_two_documents_in_a_row_behave_as_two_rows(
    window: int | None,
    drafter: DFlashDraftModel,
    sliding_drafter: Callable[..., DFlashDraftModel],
    head: FrozenHead,
    golden_row: GoldenRow,
):
    model = drafter if window is None else sliding_drafter(window)
    (first, a), (second, b) = golden_row("main", 0), golden_row("tail", 1)
    batch = concatenate(first, second, padding=5)
    anchors = torch.cat([a.anchors, b.anchors + 40])
    packed = make_blocks(batch, anchors, torch.cat([a.valid, b.valid]), BLOCK, MASK)
    for name in ("input_ids", "position_ids", "labels", "supervised"):
        assert torch.equal(getattr(packed, name), torch.cat([getattr(a, name), getattr(b, name)]))
    hidden = run(model, head, batch, packed)
    apart = torch.cat([run(model, head, first, a), run(model, head, second, b)])
    torch.testing.assert_close(hidden, apart, atol=1e-5, rtol=0)


@torch.no_grad()
def test_only_features_before_the_anchor_of_its_own_document_reach_a_block(
    drafter: DFlashDraftModel, head: FrozenHead, golden_row: GoldenRow
):
    (first, _), (second, _) = golden_row("full", 0), golden_row("full", 1)
    batch = concatenate(first, second)
    valid = torch.tensor([True, True])
    blocks = make_blocks(batch, torch.tensor([12, 52]), valid, BLOCK, MASK)
    before = run(drafter, head, batch, blocks)
    reached = {0: range(12), 1: range(40, 52)}
    for slot in (0, 11, 12, 13, 39, 40, 51, 52, 53, 79):
        disturbed = batch.hidden_states.clone()
        disturbed[slot] += 1.0
        after = run(drafter, head, replace(batch, hidden_states=disturbed), blocks)
        for block in (0, 1):
            assert (not torch.equal(after[block], before[block])) == (slot in reached[block])


@torch.no_grad()
def test_neighbouring_blocks_do_not_see_each_other(
    drafter: DFlashDraftModel, head: FrozenHead, golden_row: GoldenRow
):
    batch, _ = golden_row("full", 0)
    blocks = make_blocks(batch, torch.tensor([10, 12]), torch.ones(2).bool(), BLOCK, MASK)
    noise = head.embed(blocks.input_ids)
    before = drafter(noise, batch.hidden_states, batch.position_ids, blocks)
    for block in (0, 1):
        disturbed = noise.clone()
        disturbed[block] += 1.0
        after = drafter(disturbed, batch.hidden_states, batch.position_ids, blocks)
        assert torch.equal(after[1 - block], before[1 - block])
        assert not torch.allclose(after[block], before[block])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_valid_block_still_reaches_every_parameter(
    attention: str, drafter: DFlashDraftModel, head: FrozenHead, golden_row: GoldenRow
):
    drafter.attention = attention
    batch, _ = golden_row("main", 0)
    none = make_blocks(batch, torch.full((3,), 39), torch.zeros(3).bool(), BLOCK, MASK)
    hidden = run(drafter, head, batch, none)
    assert (hidden == 0).all()
    hidden.sum().backward()
    for parameter in drafter.parameters():
        assert parameter.grad is not None
        assert (parameter.grad == 0).all()


def test_rotary_frequencies_stay_fp32(drafter: DFlashDraftModel):
    exact = drafter.rotary_emb.inv_freq.clone()
    drafter.to(torch.bfloat16).to("cpu").float().half()
    assert drafter.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(drafter.rotary_emb.inv_freq, exact)
    assert drafter.fc.weight.dtype == torch.float16


def test_rotation_at_30000_positions(drafter: DFlashDraftModel):
    position = torch.tensor([0, 1, 29_999, 30_000])
    cos, sin = drafter.to(torch.bfloat16).rotary_emb.rotation(position)
    size = drafter.config.head_dim
    angle = position.double()[:, None] / 1e6 ** (torch.arange(0, size, 2).double() / size)
    torch.testing.assert_close(cos.double(), angle.cos().repeat(1, 2), atol=4e-3, rtol=0)
    torch.testing.assert_close(sin.double(), angle.sin().repeat(1, 2), atol=4e-3, rtol=0)
    reference = Qwen3RotaryEmbedding(drafter.config)(torch.zeros(1), position[None])
    assert torch.equal(cos, reference[0][0])
    assert torch.equal(sin, reference[1][0])


def test_initial_weights(drafter: DFlashDraftModel):
    drafter.init_weights(seed=3)
    state = {key: value.clone() for key, value in drafter.state_dict().items()}
    assert len(state) == 11 * 2 + 3
    for key, value in state.items():
        if key.endswith("norm.weight"):
            assert (value == 1).all()
        else:
            assert value.std() == pytest.approx(0.02, rel=0.1)
            assert value.mean().abs() < 0.003
    drafter.init_weights(seed=3)
    assert all(torch.equal(value, state[key]) for key, value in drafter.state_dict().items())
    drafter.init_weights(seed=4)
    assert not torch.equal(drafter.fc.weight, state["fc.weight"])


def test_autocast_keeps_the_residual_in_fp32(
    drafter: DFlashDraftModel, head: FrozenHead, golden_row: GoldenRow
):
    batch, blocks = golden_row("full", 0)
    exact = run(drafter, head, batch, blocks)
    seen = []
    handle = drafter.layers[1].register_forward_hook(lambda *call: seen.append(call[2].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        rough = run(drafter, head, batch, blocks)
    handle.remove()
    assert seen == [torch.float32]
    assert rough.dtype == torch.float32
    assert (rough - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", ["main", "tail"])
def test_needed_rows_alone_equal_the_same_rows_of_all(
    case: str,
    attention: str,
    drafter: DFlashDraftModel,
    head: FrozenHead,
    golden_row: GoldenRow,
):
    drafter.attention = attention
    batch, blocks = golden_row(case, 1)
    arguments = (head.embed(blocks.input_ids), batch.hidden_states, batch.position_ids, blocks)
    everything = drafter(*arguments)[blocks.supervised]
    alone = drafter(*arguments, rows=blocks.supervised)
    torch.testing.assert_close(alone, everything, atol=1e-6, rtol=0)
    weights = torch.randn(alone.shape, generator=torch.Generator().manual_seed(0))
    parameters = list(drafter.parameters())
    gradients = [
        torch.autograd.grad((rows * weights).sum(), parameters) for rows in (everything, alone)
    ]
    for full, part in zip(*gradients, strict=True):
        torch.testing.assert_close(part, full, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", ["none valid", "none supervised"])
def test_no_rows_still_reach_every_parameter(
    rows: str, drafter: DFlashDraftModel, head: FrozenHead, golden_row: GoldenRow
):
    batch, blocks = golden_row("main", 0)
    valid = torch.full((5,), rows == "none supervised")
    blocks = make_blocks(batch, blocks.anchors, valid, BLOCK, MASK)
    needed = torch.zeros_like(blocks.supervised)
    hidden = drafter(
        head.embed(blocks.input_ids), batch.hidden_states, batch.position_ids, blocks, rows=needed
    )
    assert hidden.shape == (0, 64)
    hidden.sum().backward()
    assert all((parameter.grad == 0).all() for parameter in drafter.parameters())


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_rows_of_padded_blocks_keep_their_place(
    attention: str, drafter: DFlashDraftModel, head: FrozenHead, golden_row: GoldenRow
):
    drafter.attention = attention
    batch, blocks = golden_row("main", 1)
    arguments = (head.embed(blocks.input_ids), batch.hidden_states, batch.position_ids, blocks)
    needed = torch.ones_like(blocks.supervised)
    needed[:, 0] = False
    rows = drafter(*arguments, rows=needed).view(5, BLOCK - 1, -1)
    everything = drafter(*arguments)
    valid = blocks.valid
    torch.testing.assert_close(rows[valid], everything[valid, 1:], atol=1e-5, rtol=0)
    assert rows.isfinite().all()
