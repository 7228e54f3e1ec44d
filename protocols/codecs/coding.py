"""What every codec is, and what its encoder and decoder check first. `protocols.codec` has them by name. Pure."""

from __future__ import annotations

import math
import sys
from typing import Protocol

import torch

from protocols.base import BadPayload, Buffer, Vector
from protocols.vectors import CHUNK_ELEMENTS, check_vector

if sys.byteorder != "little":
    raise ImportError("Starling's vectors travel as they lie in memory, which must be little-endian")

PIECE = CHUNK_ELEMENTS  # what scratch an encoder takes at most; with less, the calls cost more than the numbers


class Codec(Protocol):
    """Bytes of one vector, usually of one chunk of it.

    A codec has two sides. A contribution travels as `encode` makes it; the mean of some travels as that of `reduced`
    does, which is the same codec nearly always.

    Attributes:
        grain: vectors are cut at multiples of so many elements, and nowhere else.
        decay: how much of what was not sent is still owed a round later (error feedback); 0: nothing is kept back.
    """

    name: str
    grain: int = 1
    decay: float = 0.0

    def reduced(self, members: int) -> Codec:
        """The codec of a mean of that many contributions at most, each of which this one has carried."""
        return self

    def encoded_bytes(self, elements: int) -> int:
        """Exact size of that many elements, encoded."""

    def encode(self, source: Vector, into: memoryview) -> None:
        """Encode `source` into the whole of `into`, `encoded_bytes(len(source))` bytes.

        Raises:
            ValueError: `source` is no finite `Vector`, or `into` is of another size or read-only; what was written to
                `into` is then undefined.
        """

    def decode(self, data: Buffer, into: Vector) -> None:
        """Decode `data` into the whole of `into`. Read-only data costs one more copy.

        Raises:
            BadPayload: another size than `encoded_bytes(len(into))`, NaN, infinity, or bytes that no encoder writes;
                the content of `into` is then undefined.
            ValueError: `into` is no `Vector`.
        """

    def error_bound(self, source: Vector) -> Vector:
        """For each element of a finite `source`, an upper bound on |decode(encode(source)) - source|."""


def carry(codec: Codec, vector: Vector) -> None:
    """Put what arrives of a vector in its place.

    Raises:
        ValueError: it is no finite `Vector`.
    """
    data = memoryview(bytearray(codec.encoded_bytes(len(vector))))
    codec.encode(vector, data)
    codec.decode(data, vector)


def target(codec: Codec, source: Vector, into: memoryview) -> torch.Tensor:
    """`into` as bytes, after the checks that every encoder makes."""
    check_vector(source)
    expected = codec.encoded_bytes(len(source))
    if into.nbytes != expected or into.readonly:
        state = "read-only" if into.readonly else "writable"
        raise ValueError(f"{codec.name} of {len(source)} elements takes {expected} bytes, not {into.nbytes} {state}")
    return _bytes(into)


def received(codec: Codec, data: Buffer, into: Vector) -> torch.Tensor:
    """`data` as bytes, after the checks that every decoder makes."""
    check_vector(into)
    view = memoryview(data)
    expected = codec.encoded_bytes(len(into))
    if view.nbytes != expected:
        raise BadPayload(f"{view.nbytes} bytes where {codec.name} of {len(into)} elements takes {expected}")
    return _bytes(memoryview(bytearray(view)) if view.readonly else view)  # torch warns of read-only memory


def _bytes(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8)


def typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes at any address, seen as numbers."""
    return data.view(dtype)


def finite_range(values: torch.Tensor) -> tuple[float, float]:
    """Least and largest in one pass, 16 times as fast as `isfinite().all()`: both are NaN if one element is.

    Raises:
        ValueError: an element is NaN or infinite.
    """
    if not len(values):
        return 0.0, 0.0
    low, high = (float(end) for end in torch.aminmax(values))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("the vector holds NaN or infinity")
    return low, high


def refuse_non_finite(values: Vector) -> None:
    """
    Raises:
        BadPayload: an element is NaN or infinite.
    """
    try:
        finite_range(values)
    except ValueError:
        raise BadPayload("the payload holds NaN or infinity") from None
