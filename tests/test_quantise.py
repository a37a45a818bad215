"""Codes and scales of hidden states against the values they stand for, in float64."""

import pytest
import torch

from dflash_mp.quantise import LARGEST, dequantise, quantise

TYPES = pytest.mark.parametrize("dtype", list(LARGEST), ids=str)


def there_and_back(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``values`` ``[S, n, H]`` after both ways as float64, and their scales ``[S, n, 1]``."""
    slots, taps, width = values.shape
    codes = torch.zeros(slots, taps * width, dtype=dtype)
    scales = torch.zeros(slots, taps)
    for tap in range(taps):
        part = codes[:, tap * width : (tap + 1) * width]
        quantise(values[:, tap], part, scales[:, tap])
    found = torch.zeros(slots, taps * width)
    dequantise(codes, scales, found)
    return found.view_as(values).double(), scales[..., None].double()


def wild_values(seed: int) -> torch.Tensor:
    """Rows of any size, with channels a thousand times larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(40, 3, 24, generator=generator)
    values *= torch.logspace(-30, 30, 40)[torch.randperm(40, generator=generator), None, None]
    values[:, :, 5] *= 1000
    values[3] = 0.0
    values[4, :, 1:] = 0.0
    return values


@TYPES
@pytest.mark.parametrize("seed", range(5))
def test_the_error_is_bounded(dtype: torch.dtype, seed: int) -> None:
    values = wild_values(seed)
    found, scale = there_and_back(values, dtype)
    error = (found - values.double()).abs()
    if dtype == torch.int8:
        bound = scale / 2
    else:
        # Three bits behind the leading one; below 2**-6 steps of 2**-9.
        bound = torch.maximum(values.double().abs() / 16, scale / 1024)
    rounding = 1e-6 * values.double().abs()
    assert (error <= bound + rounding).all()
    largest = values.double().abs().amax(-1, keepdim=True)
    torch.testing.assert_close(scale * LARGEST[dtype], largest)


@TYPES
def test_a_layer_keeps_its_own_scale(dtype: torch.dtype) -> None:
    """A large layer must not take the bits of a small one."""
    values = torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(0))
    alone, _ = there_and_back(values[:, :1], dtype)
    values[:, 1] *= 1e5
    both, _ = there_and_back(values, dtype)
    assert torch.equal(both[:, :1], alone)


@TYPES
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows_in_the_scale(dtype: torch.dtype, bad: float) -> None:
    values = torch.ones(3, 2, 8)
    values[1, 1, 4] = bad
    _, scales = there_and_back(values, dtype)
    assert torch.isfinite(scales).flatten().tolist() == [True, True, True, False, True, True]


@TYPES
def test_the_smallest_numbers_stay_numbers(dtype: torch.dtype) -> None:
    """A scale of a few of the smallest steps of float32 is far from what it should be."""
    values = torch.arange(1.0, 2000.0)[:, None, None] * 2.0**-149
    found, _ = there_and_back(values, dtype)
    assert ((found >= 0) & (found <= 2 * values.double().max())).all()
