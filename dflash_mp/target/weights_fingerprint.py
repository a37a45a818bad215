"""A short name for the weights of a target: other weights, other name."""

import hashlib

import numpy as np
import torch
from torch import Tensor, nn

CHUNK = 1 << 20
"""Values summed at a time: 8 MiB as int64, also on a GPU."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""By bytes of a value: the integers its bits are read as; far smaller than the sums' 64 bits."""


@torch.no_grad()
def weights_fingerprint(model: nn.Module) -> str:
    """A digest of names, shapes, types and all values of a model's parameters and saved buffers.

    It is the same on every device and for any number of threads: sums of integers do not depend on
    their order.
    """
    digest = hashlib.sha256()
    # Drawn on the host, to be the same everywhere: this generator's numbers stay as they are.
    weights = torch.from_numpy((np.random.PCG64(0).random_raw(CHUNK) | 1).view(np.int64))
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            continue  # what a module adds to its state on its own
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        weights = weights.to(value.device)
        digest.update(np.array(weighted_sums(value, weights).tolist(), np.int64).tobytes())
    return digest.hexdigest()[:20]


def weighted_sums(value: Tensor, weights: Tensor) -> Tensor:
    """Sums of the bits of ``value``, as integers times ``weights``, modulo 2**64; one a chunk.

    Weights are odd, so one changed value always changes its sum. They are random, so other changes,
    such as swapped rows, do so but for chance (multilinear hashing: Carter and Wegman, 1979).

    Args:
        value: any shape and type, on any device.
        weights: ``[CHUNK]`` int64, on the same device.

    Returns:
        ``[C]`` int64 for C chunks of at most ``CHUNK`` integers.
    """
    flat = value.reshape(-1)
    bits = flat.view(BITS[flat.element_size()])
    return torch.stack([(chunk * weights[: len(chunk)]).sum() for chunk in bits.split(CHUNK)])
