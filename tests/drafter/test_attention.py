import shutil

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from dflash_mp.drafter.attention import Layout, Rule, _flex, make_attend, visible_keys

RULES = [
    Rule(),
    Rule(causal=True),
    Rule(window=5, causal=True),
    Rule(window=2, causal=True),
    Rule(window=3),
    Rule(window=64, causal=True),
]


def layout(anchors: list[int], starts: list[int], valid: list[bool], size: int, length: int):
    return Layout(
        torch.tensor(anchors),
        torch.tensor(starts),
        torch.tensor(valid),
        size,
        context_length=length,
    )


def test_visibility_of_a_hand_made_row_of_12_tokens():
    # Document 0 is tokens 0-6, document 1 tokens 7-11. Blocks of 3 at 2, 4 and 9; one padded.
    here = layout([2, 4, 9, 11], [0, 0, 7, 7], [True, True, True, False], 3, 12)
    full = ["110000000000", "111100000000", "000000011000"]
    for block, context in enumerate(full):
        own = "".join("111" if other == block else "000" for other in range(4))
        rows = visible_keys(here, Rule())[block].int().tolist()
        assert ["".join(map(str, row)) for row in rows] == [context + own] * 3
    assert not visible_keys(here, Rule())[3].any()


def test_visibility_under_a_window_of_4():
    here = layout([6], [0], [True], 3, 8)
    rows = visible_keys(here, Rule(window=4, causal=True))[0].int().tolist()
    # Slot k stands at token 6 + k: it sees tokens 3 + k to 5 and slots up to itself.
    assert ["".join(map(str, row)) for row in rows] == ["00011100100", "00001100110", "00000100111"]


def test_window_reaches_into_the_block_too():
    here = layout([6], [0], [True], 4, 8)
    causal = visible_keys(here, Rule(window=2, causal=True))[0, :, 8:].int().tolist()
    assert causal == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    both = visible_keys(here, Rule(window=2))[0, :, 8:].int().tolist()
    assert both == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]


def random_case(seed: int) -> tuple[Layout, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    size, length, blocks = 4, 70, 19
    anchors = torch.randint(0, length, (blocks,), generator=generator).sort().values
    cut = 33
    starts = torch.where(anchors >= cut, cut, 0)
    valid = torch.rand(blocks, generator=generator) > 0.3
    here = Layout(anchors, starts, valid, size, context_length=length)
    shapes = [(blocks, size, 6, 8), (length, 2, 8), (length, 2, 8)]
    shapes += [(blocks, size, 2, 8), (blocks, size, 2, 8)]
    return here, [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]


def by_hand(here: Layout, rule: Rule, tensors: list[Tensor]) -> Tensor:
    """Row by row and head by head in float64, from the dense mask."""
    query, context_key, context_value, key, value = (t.detach().double() for t in tensors)
    mask = visible_keys(here, rule)
    keys = torch.cat([context_key, key.flatten(0, 1)])
    values = torch.cat([context_value, value.flatten(0, 1)])
    out = torch.zeros_like(query)
    for a, k in mask.any(-1).nonzero().tolist():
        for head in range(query.shape[2]):
            seen_keys, seen_values = keys[mask[a, k], head // 3], values[mask[a, k], head // 3]
            weights = (seen_keys @ query[a, k, head] * query.shape[-1] ** -0.5).softmax(0)
            out[a, k, head] = weights @ seen_values
    return out


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_backends_equal_a_row_by_row_softmax(backend: str, rule: Rule):
    here, tensors = random_case(seed=3)
    out = make_attend(backend, here, rule)(*[tensor.detach() for tensor in tensors])
    torch.testing.assert_close(out.double(), by_hand(here, rule, tensors), atol=2e-6, rtol=0)
    assert (out[~here.valid] == 0).all()


@pytest.mark.parametrize("rule", RULES[:3], ids=str)
def test_gradients_of_eager_and_sdpa_agree(rule: Rule):
    here, tensors = random_case(seed=4)
    weights = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(0))
    gradients = []
    for backend in ("eager", "sdpa"):
        out = make_attend(backend, here, rule)(*tensors)
        gradients.append(torch.autograd.grad((out * weights).sum(), tensors))
    for eager, sdpa in zip(*gradients, strict=True):
        torch.testing.assert_close(eager, sdpa, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_nothing_visible_gives_zeros_and_finite_gradients(backend: str):
    here, tensors = random_case(seed=5)
    empty = Layout(here.anchors, here.context_start, torch.zeros_like(here.valid), 4, 70)
    out = make_attend(backend, empty, Rule())(*tensors)
    assert (out == 0).all()
    for gradient in torch.autograd.grad(out.sum(), tensors):
        assert (gradient == 0).all()


@pytest.mark.parametrize("length", [127, 128, 129])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_lengths_around_its_tile_size(length: int):
    here = layout([5, length - 1], [0, 3], [True, True], 4, length)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 4, 8), (length, 2, 8), (length, 2, 8), (2, 4, 2, 8), (2, 4, 2, 8)]
    tensors = [torch.randn(s, generator=generator) for s in shapes]
    flex, eager = (make_attend(name, here, Rule())(*tensors) for name in ("flex", "eager"))
    torch.testing.assert_close(flex, eager, atol=2e-6, rtol=0)


def test_unknown_backend():
    with pytest.raises(ValueError, match="unknown attention backend"):
        make_attend("flash", random_case(0)[0], Rule())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@torch.no_grad()
def test_compiled_flex_compiles_once_and_agrees():
    """FlexAttention has no backward on a CPU; forward and mask building are the same code."""
    graphs = []
    for seed in range(3):
        here, tensors = random_case(seed)
        tensors = [tensor.detach() for tensor in tensors]
        out = _flex(here, Rule(), compiled=True)(*tensors)
        eager = make_attend("eager", here, Rule())(*tensors)
        torch.testing.assert_close(out, eager, atol=2e-6, rtol=0)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", RULES[:3], ids=str)
def test_flex_and_eager_agree_on_a_gpu_with_gradients(rule: Rule):
    graphs = []
    for seed in range(3):
        here, tensors = random_case(seed)
        here = Layout(here.anchors.cuda(), here.context_start.cuda(), here.valid.cuda(), 4, 70)
        tensors = [tensor.detach().cuda().requires_grad_() for tensor in tensors]
        results = []
        for backend in ("flex", "eager"):
            out = make_attend(backend, here, rule)(*tensors)
            results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
        for flex, eager in zip(*results, strict=True):
            torch.testing.assert_close(flex, eager, atol=1e-3, rtol=1e-2)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1]
