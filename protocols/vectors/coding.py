"""The interface of codecs, and checks that all of them share. `vectors.codec` has the codecs by name. Pure."""

from __future__ import annotations

import math
import sys
from typing import Protocol

import torch

from protocols.base import BadPayload, Buffer, Vector
from protocols.registry import CHUNK_ELEMENTS
from protocols.vectors.views import check_vector

if sys.byteorder != "little":
    raise ImportError("Starling sends vectors as they are in memory, so it needs a little-endian machine")

PIECE = CHUNK_ELEMENTS  # largest scratch of an encoder; in smaller pieces the calls cost more than the arithmetic


class Codec(Protocol):
    """Encodes and decodes one vector, usually one chunk.

    If a codec is `in_place`, encoded elements are the float32 numbers as they are in memory. `encode` and `decode` of a
    vector whose memory is also that of the encoded bytes then copy nothing, and only check it.
    """

    name: str
    grain: int = 1  # vectors may only be cut at multiples of this many elements
    decay: float = 0.0  # by which the error feedback shrinks each round; 0: the codec has none
    in_place: bool = False

    def reduced(self, members: int) -> Codec:
        """The codec for a mean of at most this many contributions, each of which this codec has encoded."""
        return self

    def encoded_bytes(self, elements: int) -> int:
        """Exact size of this many encoded elements."""

    def encode(self, source: Vector, into: memoryview) -> None:
        """Encode `source` into the whole of `into`. `ValueError` if it is not finite, or `into` of another size."""

    def decode(self, data: Buffer, into: Vector) -> None:
        """Decode `data` into the whole of `into`; read-only data costs one more copy. Raises `BadPayload` if `data`
        has another size, or holds NaN, infinity, or bytes that no encoder writes.
        """


def carry(codec: Codec, vector: Vector) -> None:
    """Encode a vector and decode it in place: afterwards it holds what a receiver would get."""
    data = memoryview(bytearray(codec.encoded_bytes(len(vector))))
    codec.encode(vector, data)
    codec.decode(data, vector)


def target(codec: Codec, source: Vector, into: memoryview) -> torch.Tensor:
    check_vector(source)
    expected = codec.encoded_bytes(len(source))
    if into.nbytes != expected or into.readonly:
        state = "read-only" if into.readonly else "writable"
        raise ValueError(f"{codec.name} of {len(source)} elements takes {expected} bytes, not {into.nbytes} {state}")
    return _bytes(into)


def received(codec: Codec, data: Buffer, into: Vector) -> torch.Tensor:
    check_vector(into)
    view = memoryview(data)
    expected = codec.encoded_bytes(len(into))
    if view.nbytes != expected:
        raise BadPayload(f"{view.nbytes} bytes where {codec.name} of {len(into)} elements takes {expected}")
    return _bytes(memoryview(bytearray(view)) if view.readonly else view)  # torch warns about read-only memory


def _bytes(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8)


def typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return data.view(dtype)


def finite_range(values: torch.Tensor) -> tuple[float, float]:
    """The least and the largest element, (0, 0) without any; `ValueError` if one is NaN or infinite."""
    if not len(values):
        return 0.0, 0.0
    low, high = (float(end) for end in torch.aminmax(values))  # 16 times as fast as isfinite().all()
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("the vector holds NaN or infinity")
    return low, high


def require_finite(values: torch.Tensor) -> None:
    """Raise `ValueError` if an element is NaN or infinite. A finite sum proves that none is, in a quarter of the time
    of `finite_range`.
    """
    if not math.isfinite(float(values.sum())):
        finite_range(values)


def refuse_non_finite(values: Vector) -> None:
    try:
        require_finite(values)
    except ValueError:
        raise BadPayload("the payload holds NaN or infinity") from None
