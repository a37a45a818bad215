"""Hidden states in one byte a value: codes, and a scale for each token and tapped layer.

Hidden states of a language model have a few channels that are hundreds of times larger than the
rest, and tapped layers differ in size. A layer's own scale for each token keeps that apart; one
scale for all layers of a token would leave nothing of the small ones in int8.

Legend: S token slots, n tapped layers, H hidden size.
"""

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest code of each type."""


def quantise(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write ``values`` as ``codes * scales``, each row's largest value as the largest code.

    A value's error is at most half a scale in int8; in fp8 (e4m3), a 16th of the value, or a
    1024th of a scale for the smallest.

    Args:
        values: ``[S, H]`` of any floating type. A row that is not finite gets a scale that is not.
        codes: ``[S, H]`` int8 or float8_e4m3fn, written.
        scales: ``[S]`` float32, written.
    """
    largest = LARGEST[codes.dtype]
    values = values.float()
    scale = values.abs().amax(-1) / largest  # [S]
    units = values / torch.where(scale > 0, scale, 1.0)[:, None]  # [S, H]
    if codes.dtype == torch.int8:
        units = units.round()
    # A scale so small that it is rounded itself makes units beyond the largest code.
    codes.copy_(units.clamp(-largest, largest))
    scales.copy_(scale)


def dequantise(codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """The inverse of ``quantise``, layer by layer.

    Args:
        codes: ``[S, n * H]``.
        scales: ``[S, n]`` float32.
        values: ``[S, n * H]`` of any floating type, written.
    """
    taps = scales.shape[1]
    parts = zip(codes.chunk(taps, 1), scales.T, values.chunk(taps, 1), strict=True)
    for layer, scale, out in parts:
        out.copy_(layer.float() * scale[:, None])
