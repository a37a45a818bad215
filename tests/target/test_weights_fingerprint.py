"""Every value of a target counts in its fingerprint; where and how it is computed does not."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dflash_mp.target.weights_fingerprint import CHUNK, weighted_sums, weights_fingerprint

TYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.int8,
    torch.bool,
]


def model_of(dtype: torch.dtype) -> nn.Module:
    """A matrix of ``dtype``, a bias, a saved buffer, one that is not, no value and one value."""
    model = nn.Module()
    values = (torch.arange(60).reshape(10, 6) % 7 - 3).to(dtype)
    model.matrix = nn.Parameter(values, requires_grad=False)
    model.bias = nn.Parameter(torch.linspace(-1, 1, 5))
    model.register_buffer("correction", torch.linspace(0, 1, 4))
    model.register_buffer("angles", torch.linspace(0, 1, 4), persistent=False)
    model.empty, model.scale = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.tensor(2.5))
    return model


def changed(dtype: torch.dtype, change: Callable[[nn.Module], object]) -> str:
    model = model_of(dtype)
    with torch.no_grad():
        change(model)
    return weights_fingerprint(model)


def flip(values: Tensor, index: int, bit: int) -> None:
    """Flip one bit of the value ``index``."""
    size = values.element_size()
    values.view(-1).view(torch.uint8)[index * size + bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("dtype", TYPES)
def test_any_single_value_counts(dtype: torch.dtype) -> None:
    own = weights_fingerprint(model_of(dtype))
    bits = (0,) if dtype == torch.bool else (0, torch.empty(0, dtype=dtype).element_size() * 8 - 1)
    others = {
        changed(dtype, lambda m, i=i, bit=bit: flip(m.matrix, i, bit))
        for i in range(60)
        for bit in bits
    }
    for name, count in {"bias": 5, "correction": 4, "scale": 1}.items():
        for i in range(count):
            others.add(changed(dtype, lambda m, i=i, name=name: flip(getattr(m, name), i, 3)))
    assert len(others) == 60 * len(bits) + 10
    assert own not in others


@pytest.mark.parametrize("dtype", TYPES)
def test_swapped_rows_count_even_where_their_sums_are_equal(dtype: torch.dtype) -> None:
    def rolled(model: nn.Module) -> None:
        model.matrix[3] = model.matrix[2].roll(1)

    def swapped(model: nn.Module) -> None:
        rolled(model)
        model.matrix[[2, 3]] = model.matrix[[3, 2]]

    assert (
        len({changed(dtype, lambda m: None), changed(dtype, rolled), changed(dtype, swapped)}) == 3
    )


def test_a_large_matrix_counts_to_its_last_value() -> None:
    model = nn.Linear(1025, 2050, bias=False, dtype=torch.bfloat16)
    assert model.weight.numel() > CHUNK + 1000
    names = [weights_fingerprint(model)]
    for index in (0, CHUNK - 1, CHUNK, -1):
        with torch.no_grad():
            flip(model.weight, index % model.weight.numel(), 0)
        names.append(weights_fingerprint(model))
    assert len(set(names)) == 5


def test_sums_are_those_of_whole_numbers() -> None:
    values = torch.tensor([[1.5, -2.0], [float("nan"), 0.0]])
    weights = np.random.PCG64(0).random_raw(4) | 1
    bits = values.numpy().reshape(-1).view(np.int32)
    expected = sum(int(b) * int(w) for b, w in zip(bits, weights, strict=True)) % 2**64
    found = weighted_sums(values, torch.from_numpy(weights.view(np.int64)))
    assert [int(value) % 2**64 for value in found] == [expected]


def test_it_is_the_same_everywhere() -> None:
    """In other processes, with other threads, for other strides, without what is not saved."""
    model = model_of(torch.float32)
    assert weights_fingerprint(model) == "d5866dc318bfe058ff67"
    model.matrix = nn.Parameter(model.matrix.t().contiguous().t(), requires_grad=False)
    model.angles += 1
    before = torch.get_num_threads()
    torch.set_num_threads(3 - min(before, 2))
    try:
        assert weights_fingerprint(model) == "d5866dc318bfe058ff67"
        large = nn.Linear(1024, 1500)
        several = weights_fingerprint(large)
    finally:
        torch.set_num_threads(before)
    assert weights_fingerprint(large) == several


def test_names_shapes_and_types_count() -> None:
    def reshaped(model: nn.Module) -> None:
        model.matrix = nn.Parameter(model.matrix.reshape(6, 10), requires_grad=False)

    def retyped(model: nn.Module) -> None:
        model.matrix = nn.Parameter(model.matrix.view(torch.int32), requires_grad=False)

    def renamed(model: nn.Module) -> None:
        model.other = model.bias
        del model.bias

    names = [changed(torch.float32, c) for c in (lambda m: None, reshaped, retyped, renamed)]
    assert len(set(names)) == 4
