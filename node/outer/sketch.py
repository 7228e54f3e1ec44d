"""Sketches of parameters: 64 numbers from which peers estimate their distances without sending their states. No I/O.

Each number is a projection of the vector on signs ±1, which are the same for all peers of a run. The mean square of the
numbers estimates the vector's squared norm, to a factor of 1 ± sqrt(2/64). The sketch of a difference is the difference
of the sketches. Within a block of 64 elements the signs are those of a Hadamard matrix with randomly flipped rows and
columns. They are as good as independent signs, and take two random bits an element instead of 64.

Source: Alon, Matias, Szegedy 1996, section 2.2 (the tug of war); Ailon, Chazelle 2006 (flips and Hadamard).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from protocols.base import PeerId, Vector

Sketch: TypeAlias = tuple[float, ...]

NUMBERS = 64
PACKED_BYTES = 4 * NUMBERS
_MOST = 1e30
_PIECE = NUMBERS << 10  # Elements projected at a time


def sketch(vector: Vector, seed: bytes) -> Sketch:
    """The projections of a vector, float32 (n). The seed must be the same for all sketches that are compared."""
    total = torch.zeros(NUMBERS, dtype=torch.float64)
    rows = _hadamard()
    for low in range(0, len(vector), _PIECE):
        piece = vector[low : low + _PIECE]
        blocks = torch.zeros(-(-len(piece) // NUMBERS), NUMBERS)
        blocks.view(-1)[: len(piece)].copy_(piece)
        before, after = _signs(seed, low, 2 * blocks.numel()).view(2, *blocks.shape)
        total += ((blocks * before) @ rows).mul_(after).sum(dim=0, dtype=torch.float64)
    return tuple(total.tolist())


def norm(numbers: Sequence[float]) -> float:
    return math.sqrt(sum(number * number for number in numbers) / NUMBERS)


def mean(sketches: Sequence[Sketch]) -> Sketch:
    """Zeros if there are none."""
    return tuple(math.fsum(numbers) / len(sketches) for numbers in zip(*sketches, strict=True)) or (0.0,) * NUMBERS


def distance(one: Sketch, middle: Sketch) -> float:
    """‖θ − mean‖ / ‖mean‖; nan if a sketch is not finite or the mean is zero."""
    whole = norm(middle)
    return norm([a - b for a, b in zip(one, middle, strict=True)]) / whole if whole else math.nan


def spread(sketches: Sequence[Sketch]) -> float:
    """max ‖θ_i − mean‖ / ‖mean‖ over the peers; 0 for one peer, nan for none."""
    middle = mean(sketches)
    return max((distance(each, middle) for each in sketches), default=math.nan)


def pack(numbers: Sketch) -> bytes:
    """Encode a sketch as little-endian float32, `PACKED_BYTES` in all; empty if a number is not finite."""
    if not all(map(math.isfinite, numbers)):
        return b""
    return struct.pack(f"<{NUMBERS}f", *(max(-_MOST, min(_MOST, number)) for number in numbers))


def unpack(data: bytes) -> Sketch | None:
    """None if it is invalid."""
    if len(data) != PACKED_BYTES:
        return None
    numbers = struct.unpack(f"<{NUMBERS}f", data)
    return numbers if all(map(math.isfinite, numbers)) else None


def furthest(sketches: Mapping[PeerId, Sketch]) -> tuple[PeerId, float]:
    """The peer that is furthest from the mean, and its estimated ‖θ − mean‖ / ‖mean‖. Ties go to the greater id.

    Peers with the same sketches find the same peer. Of two peers that are apart, only one takes the other's state.
    """
    middle = mean([sketches[peer] for peer in sorted(sketches)])
    far = {peer: distance(numbers, middle) for peer, numbers in sketches.items()}
    peer = max(far, key=lambda each: (round(far[each], 6), each))
    return peer, far[peer]


def _signs(seed: bytes, low: int, count: int) -> Vector:
    """float32 (count) of ±1, the same on every machine; `count` a multiple of 8."""
    bits = hashlib.shake_128(seed + low.to_bytes(8, "little")).digest(count // 8)
    data = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
    places = torch.arange(8, dtype=torch.uint8)
    return ((data[:, None] >> places) & 1).view(-1).float().mul_(2.0).sub_(1.0)


def _hadamard() -> torch.Tensor:
    """Sylvester's Hadamard matrix: (64, 64) of ±1 with orthogonal rows."""
    rows = torch.ones(1, 1)
    while len(rows) < NUMBERS:
        rows = torch.cat([torch.cat([rows, rows], dim=1), torch.cat([rows, -rows], dim=1)])
    return rows
