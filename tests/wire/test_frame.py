"""Frames: whatever goes in comes out, and nothing else is accepted."""

import struct

import pytest
import torch

from dflash_mp.wire.frame import ALIGNMENT, DTYPES, FrameError, Header, Layout


@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
@pytest.mark.parametrize("final_width", [0, 5])
@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "int8"])
def test_sections_keep_their_values_and_do_not_overlap(
    tokens: int, final_width: int, kind: str
) -> None:
    layout = Layout(tokens, 3, hidden_width=12, final_width=final_width, dtype=DTYPES[kind])
    buffer = layout.allocate(torch.device("cpu"))
    batch = layout.view(buffer, number=3)
    generator = torch.Generator().manual_seed(tokens)
    written = {}
    for field, dtype, shape in layout.sections:
        value = torch.randint(0, 100, shape, generator=generator).to(dtype)
        getattr(batch, field).copy_(value)
        written[field] = value
    again = layout.view(buffer.clone(), number=3)
    for field, value in written.items():
        assert torch.equal(getattr(again, field), value)
    assert again.number == 3
    assert (again.final_hidden is None) == (final_width == 0)
    assert (again.hidden_scales is None) == (kind == "bfloat16")
    assert buffer.numel() % ALIGNMENT == 0


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_a_quantised_frame_is_little_more_than_half_as_large(dtype: str) -> None:
    """The default run's: 1024 tokens, five layers of 576."""
    sizes = [Layout(1024, 5, 5 * 576, 0, DTYPES[name]).nbytes for name in (dtype, "bfloat16")]
    assert 0.5 < sizes[0] / sizes[1] < 0.51


def test_header_round_trip() -> None:
    header = Header(source=2, drafter=1, k=2**40, kind=1, number=7, nbytes=4096, checksum=-5)
    assert Header.unpack(header.pack(), "drafter1") == header


@pytest.mark.parametrize(
    ("field", "value"), [(0, 1234), (1, 99)], ids=["wrong magic", "wrong version"]
)
def test_a_strange_header_is_refused_with_both_ends_named(field: int, value: int) -> None:
    numbers = list(struct.unpack("<9q", Header(2, 1, 0, 1, 0, 64, 9).pack()))
    numbers[field] = value
    with pytest.raises(FrameError, match=r"drafter1.*target2"):
        Header.unpack(struct.pack("<9q", *numbers), "drafter1")


def test_a_short_header_is_refused() -> None:
    with pytest.raises(FrameError, match=r"drafter0.*71 bytes"):
        Header.unpack(Header(0, 0, 0, 0, 0, 0, 0).pack()[:-1], "drafter0")
