"""Four bits: to the nearest level, sizes and layout as stated, and what no encoder writes is refused."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from protocols.base import BadPayload, Vector
from protocols.codec import codec
from tests.protocols.test_codec import LARGEST, decoded, encoded

LEVELS = {
    "int4": [k / 7 for k in range(-7, 8)],
    "e3m0": [0.0, *(sign * 2.0**-k for k in range(7) for sign in (1, -1))],
}
four_bits = pytest.mark.parametrize("name", LEVELS)


def wild(count: int) -> Vector:
    """Numbers of many magnitudes, those half-way between two levels and their neighbours among them."""
    draw = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=draw) * torch.rand(count, generator=draw) ** 6
    middles = torch.tensor([1.0, 0.75, -0.75, 0.375, 3 * 2**-8, 2**-7, -(2**-7), 1 / 14, 3 / 14, 13 / 14, -0.5])
    values[: len(middles)] = middles
    values[16 : 16 + len(middles)] = torch.nextafter(middles, torch.tensor(9.0))
    values[32 : 32 + len(middles)] = torch.nextafter(middles, torch.tensor(-9.0))
    return values


@four_bits
@pytest.mark.parametrize("count", (64, 127, 128, 129, 1001))
def test_values_round_to_the_nearest_level(name: str, count: int) -> None:
    given = wild(count)
    back = decoded(codec(name), encoded(codec(name), given), count)
    for low in range(0, count, 128):
        block, got = given[low : low + 128].double(), back[low : low + 128].double()
        levels = torch.tensor(LEVELS[name], dtype=torch.float64) * float(block.abs().max())
        nearest = (block[:, None] - levels).abs().amin(1)
        assert ((got - block).abs() <= nearest * (1 + 1e-5) + 1e-6 * float(block.abs().max())).all()


def test_byte_layout_is_stable() -> None:
    given = torch.tensor([7.0, -7.0, 1.0, 0.0, 3.0])
    assert bytes(encoded(codec("int4"), given)) == struct.pack("<f", 1.0) + bytes([0x97, 0x01, 0x03])
    given = torch.tensor([8.0, -8.0, 4.0, 0.0, -0.125])
    assert bytes(encoded(codec("e3m0"), given)) == struct.pack("<f", 8.0) + bytes([0xF7, 0x06, 0x09])


@pytest.mark.parametrize("name, scale", [("int8", 2**-127), ("int4", 2**-149), ("e3m0", 2**-127), ("e3m0", 2**-121)])
def test_scales_giving_subnormals_are_rejected(name: str, scale: float) -> None:
    """No encoder writes them; and those who flush such numbers to zero would hold other bits."""
    data = encoded(codec(name), torch.ones(300))
    struct.pack_into("<f", data, 4, scale)
    with pytest.raises(BadPayload, match="scales"):
        decoded(codec(name), data, 300)


@four_bits
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, -(2**-149)])
def test_bad_scales_are_rejected(name: str, scale: float) -> None:
    for block in (0, 1, 2):
        data = encoded(codec(name), torch.ones(300))
        struct.pack_into("<f", data, 4 * block, scale)
        with pytest.raises(BadPayload, match="scales"):
            decoded(codec(name), data, 300)


@four_bits
def test_bad_codes_are_rejected(name: str) -> None:
    for at, byte in ((12, 0x18), (12 + 70, 0x81), (12 + 149, 0x88), (12 + 150, 0x08)):
        data = encoded(codec(name), torch.ones(301))
        data[at] = byte
        with pytest.raises(BadPayload, match="code 8"):
            decoded(codec(name), data, 301)
    data = encoded(codec(name), torch.ones(301))
    for beyond in (0x10, 0x80):
        data[-1] = 0x01 | beyond
        with pytest.raises(BadPayload, match="beyond the last"):
            decoded(codec(name), data, 301)


def test_overflowing_int4_scales_are_rejected() -> None:
    data = encoded(codec("int4"), torch.ones(4))
    struct.pack_into("<f", data, 0, LARGEST / 6)
    with pytest.raises(BadPayload, match="scales"):
        decoded(codec("int4"), data, 4)


@four_bits
def test_both_ends_of_range_are_encoded(name: str) -> None:
    each = codec(name)
    huge = torch.tensor([LARGEST, -LARGEST, 0.0])
    assert torch.allclose(decoded(each, encoded(each, huge), 3), huge, rtol=1e-6)
    tiny = torch.tensor([7e-38, -1e-44, 2**-149, -0.0])  # a seventh, and a sixty-fourth, of it would be denormal
    assert not decoded(each, encoded(each, tiny), 4).any()
    small = torch.tensor([8e-37, -8e-37])
    assert torch.allclose(decoded(each, encoded(each, small), 2), small, rtol=1e-6, atol=0)
