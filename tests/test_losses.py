import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflash_mp import losses
from dflash_mp.losses import (
    KINDS,
    HeadRows,
    dpace_weights,
    head_cross_entropy,
    head_loss,
    position_weights,
)

ROWS, WIDTH, VOCAB = 23, 16, 97


def make_rows(seed: int = 0, softcap: float | None = None, soft: bool = True) -> HeadRows:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    hidden = draw(ROWS, WIDTH).requires_grad_()
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    target = draw(ROWS, WIDTH) if soft else None
    return HeadRows(hidden, draw(VOCAB, WIDTH), labels, target, softcap)


def plain(rows: HeadRows, kind: str) -> Tensor:
    """The objective written down once more, in float64, with full logits."""

    def logits(hidden: Tensor) -> Tensor:
        out = hidden.double() @ rows.weight.double().T
        return out if rows.softcap is None else rows.softcap * torch.tanh(out / rows.softcap)

    draft = logits(rows.hidden)
    q = draft.softmax(-1)
    p = None if rows.target_hidden is None else logits(rows.target_hidden).softmax(-1)
    labels = p.argmax(-1) if rows.labels is None else rows.labels
    ce = F.cross_entropy(draft, labels, reduction="none")
    if kind == "ce":
        return ce
    kl = (p * (p / q).log()).sum(-1)
    tv = 0.5 * (p - q).abs().sum(-1)
    return {"kl": kl, "tv": tv, "ce+kl": ce + kl}[kind]


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("piece", [1, 3 * VOCAB, losses.PIECE])
def test_value_and_gradient_equal_float64(
    kind: str, softcap: float | None, chunk: int, piece: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(losses, "PIECE", piece)
    rows = make_rows(softcap=softcap)
    scale = torch.rand(ROWS, generator=torch.Generator().manual_seed(1))
    loss = head_loss(rows, kind, chunk).loss
    (gradient,) = torch.autograd.grad((loss * scale).sum(), rows.hidden)
    twin = plain(rows, kind)
    (expected,) = torch.autograd.grad((twin * scale).sum(), rows.hidden)
    torch.testing.assert_close(loss.double(), twin, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_head_stays_within_a_percent(kind: str):
    rows = make_rows()
    rounded = rows._replace(
        hidden=rows.hidden.detach().bfloat16().float().requires_grad_(),
        weight=rows.weight.bfloat16(),
        target_hidden=rows.target_hidden.bfloat16(),
    )
    loss = head_loss(rounded, kind).loss
    (gradient,) = torch.autograd.grad(loss.sum(), rounded.hidden)
    twin = plain(rounded, kind)
    (expected,) = torch.autograd.grad(twin.sum(), rounded.hidden)
    assert (loss - twin).norm() / twin.norm() < 0.01
    assert (gradient - expected).norm() / expected.norm() < 0.01


def test_labels_from_the_target_are_its_most_likely_tokens():
    rows = make_rows()._replace(labels=None)
    loss, correct = head_loss(rows, "ce")
    torch.testing.assert_close(loss.double(), plain(rows, "ce"), atol=1e-5, rtol=1e-5)
    same = rows._replace(target_hidden=rows.hidden.detach())
    assert head_loss(same, "ce").correct.all()
    assert not correct.all()


def test_correct_says_whether_the_label_is_most_likely():
    rows = make_rows()
    best = (rows.hidden @ rows.weight.T).argmax(-1)
    labels = torch.where(torch.arange(ROWS) % 2 == 0, best, (best + 1) % VOCAB)
    _, correct = head_cross_entropy(rows.hidden, rows.weight, labels, rows_per_chunk=5)
    assert correct.tolist() == [i % 2 == 0 for i in range(ROWS)]


def test_equal_distributions_have_no_divergence():
    rows = make_rows()
    same = rows._replace(target_hidden=rows.hidden.detach())
    for kind in ("kl", "tv"):
        assert head_loss(same, kind).loss.abs().max() < 1e-5


def test_huge_logits_stay_finite():
    rows = make_rows()
    hot = rows._replace(hidden=(rows.hidden.detach() * 1e3).requires_grad_())
    for kind in KINDS:
        loss = head_loss(hot, kind).loss
        (gradient,) = torch.autograd.grad(loss.sum(), hot.hidden)
        assert loss.isfinite().all()
        assert gradient.isfinite().all()


def test_no_rows_and_no_gradient():
    rows = make_rows()
    empty = HeadRows(rows.hidden[:0], rows.weight, rows.labels[:0])
    loss = head_loss(empty, "ce").loss
    assert loss.shape == (0,)
    loss.sum().backward()
    assert rows.hidden.grad is not None
    with torch.no_grad():
        assert not head_loss(rows, "ce").loss.requires_grad


class Largest(TorchDispatchMode):
    """Remembers the element count of the largest tensor of a dtype that any operation returned."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype, self.numel = dtype, 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        sizes = [tensor.numel() for tensor in tensors if tensor.dtype == self.dtype]
        self.numel = max([self.numel, *sizes])
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_all_rows_never_exist(kind: str):
    rows = make_rows()
    with Largest() as largest:
        head_loss(rows, kind, rows_per_chunk=4).loss.sum().backward()
    assert largest.numel == rows.weight.numel() < ROWS * VOCAB


@pytest.mark.parametrize("kind", KINDS)
def test_beside_bf16_products_fp32_logits_are_those_of_a_piece(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(losses, "PIECE", 5 * VOCAB)
    rows = make_rows()
    low = rows._replace(weight=rows.weight.bfloat16())
    with Largest() as wide:
        head_loss(low, kind).loss.sum().backward()
    assert wide.numel == 5 * VOCAB
    with Largest(torch.bfloat16) as narrow:
        head_loss(low, kind).loss.sum().backward()
    assert narrow.numel == ROWS * VOCAB


@pytest.mark.parametrize("shape", [(512, 151_936), (3, 97), (0, 97), (2, 2**25)])
def test_pieces_of_a_gpu_cover_all_rows_once(shape: tuple[int, int]):
    logits = torch.empty(shape, device="meta")
    rows = [row for piece in losses._pieces(logits) for row in range(shape[0])[piece]]
    assert rows == list(range(shape[0]))
    sizes = [len(range(shape[0])[piece]) for piece in losses._pieces(logits)]
    assert all(size == 1 or size * shape[1] <= losses.GPU_PIECE for size in sizes)


def test_what_an_objective_needs():
    rows = make_rows(soft=False)
    with pytest.raises(ValueError, match="needs target_hidden"):
        head_loss(rows, "kl")
    with pytest.raises(ValueError, match="needs target_hidden"):
        head_loss(rows._replace(labels=None), "ce")
    with pytest.raises(ValueError, match="unknown objective"):
        head_loss(rows, "mse")


def test_autocast_decides_the_precision_of_the_products():
    rows = make_rows()
    with torch.autocast("cpu", torch.bfloat16):
        loss = head_loss(rows, "ce").loss
        (gradient,) = torch.autograd.grad(loss.sum(), rows.hidden)
    assert loss.dtype == torch.float32
    assert gradient.dtype == torch.float32
    exact = plain(rows, "ce")
    error = (loss - exact).abs().max()
    assert 1e-4 < error < 0.1


def test_position_weights():
    assert position_weights(4, None).tolist() == [0, 1, 1, 1]
    expected = [0.0] + [torch.exp(torch.tensor(-k / 7.0)).item() for k in range(3)]
    assert position_weights(4, 7.0).tolist() == pytest.approx(expected)


def test_dpace_of_a_hand_made_block():
    # Slot 2 is unsupervised: its factor is 1 and it counts nowhere.
    ce = torch.tensor([[0.0, 0.5, 9.0, 1.0]]).log1p()  # q = 1 / (1 + value)
    supervised = torch.tensor([[False, True, False, True]])
    first = 0.5 / 1.5 + 0.5
    second = first * (0.5 / 2 + 0.5)
    expected = [[0.0, first + second, 0.0, second]]
    assert dpace_weights(ce, supervised, alpha=0.5)[0].tolist() == pytest.approx(expected[0])


def test_dpace_ends():
    supervised = torch.tensor([[False, True, True, True]])
    confident, hopeless = torch.zeros(1, 4), torch.full((1, 4), 1e4)
    assert dpace_weights(confident, supervised, 0.5).tolist() == [[0, 3, 2, 1]]
    assert dpace_weights(hopeless, supervised, 0.5).tolist() == [[0, 0.875, 0.375, 0.125]]
    assert not dpace_weights(confident.requires_grad_(), supervised, 0.5).requires_grad
