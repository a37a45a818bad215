"""The bytes of one frame: a header of a few integers and one buffer of fixed size.

Legend: S token slots, n tapped layers, H hidden size of the target.
"""

import struct
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from dflash_mp.features import FeatureBatch
from dflash_mp.quantise import LARGEST, dequantise

MAGIC = 0x444D5031
VERSION = 2
HEADER = struct.Struct("<9q")
ALIGNMENT = 256
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
"""Types of hidden states on the wire by ``wire.dtype``."""


class FrameError(Exception):
    """A frame that is not what both ends agreed on."""


@dataclass(frozen=True)
class Header:
    """What a target announces before it sends.

    ``source`` is the target's role rank, ``drafter`` and ``k`` the place in the drafter's order,
    ``number`` the micro-batch, ``nbytes`` the size of the payload, ``checksum`` its checksum
    (``Edge.checksum``). A SKIP frame has no payload.
    """

    source: int
    drafter: int
    k: int
    kind: int
    number: int
    nbytes: int
    checksum: int

    def pack(self) -> bytes:
        """The header as bytes."""
        return HEADER.pack(MAGIC, VERSION, *astuple(self))

    @staticmethod
    def unpack(data: bytes, reader: str) -> "Header":
        """Parse ``data``; ``reader`` names this end in errors.

        Raises:
            FrameError: wrong length, magic or version.
        """
        if len(data) != HEADER.size:
            raise FrameError(f"{reader}: a header of {len(data)} bytes, expected {HEADER.size}")
        magic, version, source, *rest = HEADER.unpack(data)
        if magic != MAGIC or version != VERSION:
            raise FrameError(
                f"{reader}: frame of target{source} has magic {magic:#x} version {version}, "
                f"expected {MAGIC:#x} version {VERSION}: do all ranks run the same release?"
            )
        return Header(source, *rest)


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a FeatureBatch lies in a frame; the same for every frame of a run.

    ``hidden_width`` is that of ``taps`` layers together; ``final_width`` is 0 without
    ``final_hidden``, which is never quantised: labels come from it.
    """

    tokens: int
    taps: int
    hidden_width: int
    final_width: int
    dtype: torch.dtype

    @property
    def sections(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """``(field, dtype, shape)`` in the order of the buffer."""
        slots = self.tokens
        rows = [
            ("input_ids", torch.int32, (slots,)),
            ("position_ids", torch.int32, (slots,)),
            ("document_ids", torch.int32, (slots,)),
            ("loss_mask", torch.uint8, (slots,)),
            ("hidden_states", self.dtype, (slots, self.hidden_width)),
        ]
        if self.final_width:
            rows.append(("final_hidden", self.plain.dtype, (slots, self.final_width)))
        if self.quantised:
            rows.append(("hidden_scales", torch.float32, (slots, self.taps)))
        return rows

    @property
    def quantised(self) -> bool:
        """Whether hidden states are codes with scales."""
        return self.dtype in LARGEST

    @property
    def plain(self) -> "Layout":
        """What a drafter computes with: values instead of codes."""
        return replace(self, dtype=torch.bfloat16) if self.quantised else self

    @property
    def nbytes(self) -> int:
        """Size of a frame; every section starts at a multiple of ``ALIGNMENT``."""
        return sum(aligned(size(dtype, shape)) for _, dtype, shape in self.sections)

    def allocate(self, device: torch.device) -> Tensor:
        """A zeroed buffer for one frame: ``[nbytes]`` uint8."""
        return zeroed(self.nbytes, device)

    def view(self, buffer: Tensor, number: int) -> FeatureBatch:
        """The FeatureBatch whose tensors are views into ``buffer`` (``[nbytes]`` uint8)."""
        tensors, start = {}, 0
        for field, dtype, shape in self.sections:
            end = start + size(dtype, shape)
            tensors[field] = buffer[start:end].view(dtype).view(shape)
            start += aligned(end - start)
        return FeatureBatch(number=number, **tensors)


def decode(batch: FeatureBatch, into: FeatureBatch) -> FeatureBatch:
    """``batch`` with values instead of codes; they are written into ``into``, of ``plain``."""
    if batch.hidden_scales is None:
        return batch
    dequantise(batch.hidden_states, batch.hidden_scales, into.hidden_states)
    return replace(batch, hidden_states=into.hidden_states, hidden_scales=None)


def zeroed(nbytes: int, device: torch.device) -> Tensor:
    """A buffer of zeros that any stream may use: ``[nbytes]`` uint8."""
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if buffer.is_cuda:
        # An edge writes on a stream of its own, which knows nothing of this one.
        torch.cuda.current_stream(device).synchronize()
    return buffer


def size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor."""
    count = 1
    for extent in shape:
        count *= extent
    return count * dtype.itemsize


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
