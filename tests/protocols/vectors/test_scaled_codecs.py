"""int8, int4 and e3m0: values round to the nearest level, and what no encoder writes is rejected."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from protocols.base import BadPayload, Vector
from protocols.vectors.codec import codec
from tests.support.codecs import LARGEST, decoded, encoded

LEVELS = {
    "int4": [k / 7 for k in range(-7, 8)],
    "e3m0": [0.0, *(sign * 2.0**-k for k in range(7) for sign in (1, -1))],
}
four_bits = pytest.mark.parametrize("name", LEVELS)
BAD_SCALES = (math.nan, math.inf, -math.inf, -1.0, -(2**-149))


def wild(count: int) -> Vector:
    """Numbers of many magnitudes, among them those half-way between two levels and their neighbours."""
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
    values = wild(count)
    back = decoded(codec(name), encoded(codec(name), values), count)
    for low in range(0, count, 128):
        block, result = values[low : low + 128].double(), back[low : low + 128].double()
        levels = torch.tensor(LEVELS[name], dtype=torch.float64) * float(block.abs().max())
        nearest = (block[:, None] - levels).abs().amin(1)
        assert ((result - block).abs() <= nearest * (1 + 1e-5) + 1e-6 * float(block.abs().max())).all()


def test_byte_layout_is_stable() -> None:
    values = torch.tensor([7.0, -7.0, 1.0, 0.0, 3.0])
    assert bytes(encoded(codec("int4"), values)) == struct.pack("<f", 1.0) + bytes([0x97, 0x01, 0x03])
    values = torch.tensor([8.0, -8.0, 4.0, 0.0, -0.125])
    assert bytes(encoded(codec("e3m0"), values)) == struct.pack("<f", 8.0) + bytes([0xF7, 0x06, 0x09])


@pytest.mark.parametrize(
    "name, scale",
    [
        *((name, scale) for name in ("int8", "int4", "e3m0") for scale in BAD_SCALES),
        *(("int8", scale) for scale in (LARGEST, LARGEST / 126)),
        ("int4", LARGEST / 6),
        # Scales that give subnormal numbers: machines that flush those to zero would decode other bits.
        *(("int8", 2**-127), ("int4", 2**-149), ("e3m0", 2**-127), ("e3m0", 2**-121)),
    ],
)
def test_bad_scales_are_rejected(name: str, scale: float) -> None:
    for block in (0, 1, 2):
        data = encoded(codec(name), torch.ones(300))
        struct.pack_into("<f", data, 4 * block, scale)
        with pytest.raises(BadPayload, match="scales"):
            decoded(codec(name), data, 300)


@pytest.mark.parametrize(
    "name, size, at, byte, why",
    [
        *(("int8", 300, at, 0x80, "code") for at in (12, 212, 311)),
        *(
            (name, 301, at, byte, why)
            for name in LEVELS
            for at, byte, why in (
                (12, 0x18, "code 8"),
                (12 + 70, 0x81, "code 8"),
                (12 + 149, 0x88, "code 8"),
                (12 + 150, 0x08, "code 8"),
                (12 + 150, 0x11, "beyond the last"),
                (12 + 150, 0x81, "beyond the last"),
            )
        ),
    ],
)
def test_bad_codes_are_rejected(name: str, size: int, at: int, byte: int, why: str) -> None:
    data = encoded(codec(name), torch.ones(size))
    data[at] = byte
    with pytest.raises(BadPayload, match=why):
        decoded(codec(name), data, size)
