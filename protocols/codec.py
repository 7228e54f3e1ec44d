"""Codecs: a float32 vector as bytes and back, at a size that is known beforehand. Pure.

Everything is little-endian. Encoding refuses what is not finite; decoding yields finite numbers or raises `BadPayload`.
Both work in place on the caller's buffers, which may lie at any address, and are safe on several threads at once.
Decoding is a widening, then (int8) one separate multiplication: the same bits on every machine.

    fp32   4 bytes an element, exact
    fp16   2 bytes, to nearest even; beyond the largest float16 (65,504) it saturates there
    bf16   2 bytes, to nearest even; beyond the largest bfloat16 (about 3.39e38) it saturates there
    int8   1 byte and 1/32 for the scale: blocks of 128 elements, each with the float32 scale absmax / 127; first all
           scales, then all codes in -127..127 (blockwise absmax quantisation, Dettmers et al. 2021, arXiv 2110.02861,
           section 2.1, with a linear code). 0.258 of fp32 for whole blocks
"""

from __future__ import annotations

import difflib
import math
import sys
from typing import Final, Protocol

import torch

from protocols.base import BadPayload, Buffer, Vector
from protocols.vectors import CHUNK_ELEMENTS, check_vector

if sys.byteorder != "little":
    raise ImportError("Starling's vectors travel as they lie in memory, which must be little-endian")

_PIECE = CHUNK_ELEMENTS  # what scratch an encoder takes at most; with less, the calls cost more than the numbers


class Codec(Protocol):
    """Bytes of one vector, usually of one chunk of it."""

    name: str

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


class Float32:
    """The vector itself."""

    name = "fp32"

    def encoded_bytes(self, elements: int) -> int:
        return 4 * elements

    def encode(self, source: Vector, into: memoryview) -> None:
        target = _target(self, source, into)
        _finite_range(source)
        _typed(target, torch.float32).copy_(source)

    def decode(self, data: Buffer, into: Vector) -> None:
        into.copy_(_typed(_received(self, data, into), torch.float32))
        _refuse_non_finite(into)

    def error_bound(self, source: Vector) -> Vector:
        return torch.zeros_like(source)


class Narrow:
    """A 16-bit float, to nearest even, saturating.

    An element x of at most the largest finite number is off by at most half a unit in the last place: `unit` * |x|, or
    `floor` where the format is denormal. One beyond becomes the largest, and is off by the whole difference: the bound
    then tells how much was cut, and is not small against x.
    """

    def __init__(self, name: str, dtype: torch.dtype, unit: float, floor: float) -> None:
        self.name = name
        self._dtype = dtype
        self._unit = unit
        self._floor = floor
        self._largest = torch.finfo(dtype).max

    def encoded_bytes(self, elements: int) -> int:
        return 2 * elements

    def encode(self, source: Vector, into: memoryview) -> None:
        target = _typed(_target(self, source, into), self._dtype)
        low, high = _finite_range(source)
        if max(-low, high) <= self._largest:
            target.copy_(source)
            return
        scratch = torch.empty(min(_PIECE, len(source)))
        for start in range(0, len(source), _PIECE):
            piece = source[start : start + _PIECE]
            held = torch.clamp(piece, -self._largest, self._largest, out=scratch[: len(piece)])
            target[start : start + _PIECE].copy_(held)

    def decode(self, data: Buffer, into: Vector) -> None:
        into.copy_(_typed(_received(self, data, into), self._dtype))
        _refuse_non_finite(into)

    def error_bound(self, source: Vector) -> Vector:
        size = source.abs()
        cut = torch.nextafter(size - self._largest, size)  # the difference may have been rounded down
        return size.mul(self._unit).clamp_(min=self._floor).maximum(cut)


class Int8:
    """One byte an element, with a scale for each block.

    An element is off by at most half a step, which is absmax / 254 of its block and a little for rounding. A block so
    small that its scale would be denormal (absmax below 127 * 2**-126, about 1.5e-36) becomes zeros with scale 0: a
    denormal scale is too coarse for a bound, and processors differ in how they treat one. A scale is held where
    127 * scale is still finite.
    """

    name = "int8"
    _BLOCK = 128
    _LEAST = torch.finfo(torch.float32).tiny
    _MOST = float.fromhex("0x1.020406p+121")  # the largest float32 whose product with 127, rounded, is finite
    _STEP = 0.50002  # half a step; quotient and product each round off by at most 127 * 2**-24 of a step

    def encoded_bytes(self, elements: int) -> int:
        return elements + 4 * -(-elements // self._BLOCK)

    def encode(self, source: Vector, into: memoryview) -> None:
        scales, codes = self._split(_target(self, source, into), len(source))
        scratch = torch.empty(min(_PIECE, len(source)))
        for low in range(0, len(source), _PIECE):
            for start, stop, width in self._spans(low, min(low + _PIECE, len(source))):
                block = source[start:stop].view(-1, width)
                work = scratch[: stop - start].view(-1, width)
                scale = self._scales(block, work, scales[start // self._BLOCK : -(-stop // self._BLOCK)])
                torch.div(block, scale.masked_fill(scale == 0, 1.0)[:, None], out=work)
                codes[start:stop].view(-1, width).copy_(work.round_())

    def decode(self, data: Buffer, into: Vector) -> None:
        scales, codes = self._split(_received(self, data, into), len(into))
        if not len(into):
            return
        low, high = (float(end) for end in torch.aminmax(scales))
        if not (low >= 0 and high <= self._MOST):  # also where they are NaN
            raise BadPayload(f"int8 scales from {low:g} to {high:g}")
        if int(codes.amin()) < -127:
            raise BadPayload("int8 code -128")
        into.copy_(codes)
        for start, stop, width in self._spans(0, len(into)):
            scale = scales[start // self._BLOCK : -(-stop // self._BLOCK)]
            into[start:stop].view(-1, width).mul_(scale[:, None])

    def error_bound(self, source: Vector) -> Vector:
        bound = source.abs()
        for start, stop, width in self._spans(0, len(source)):
            block = bound[start:stop].view(-1, width)
            scale = self._scales(block, torch.empty_like(block), torch.empty(len(block)))[:, None]
            block.copy_(torch.where(scale == 0, block, scale * self._STEP))
        return bound

    def _split(self, data: torch.Tensor, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and codes as views of the encoded bytes."""
        scales = len(data) - elements
        return _typed(data[:scales], torch.float32), _typed(data[scales:], torch.int8)

    def _spans(self, low: int, high: int) -> list[tuple[int, int, int]]:
        """(start, stop, width): the whole blocks, then the short last one. `low` starts a block."""
        whole = high - (high - low) % self._BLOCK
        spans = ((low, whole, self._BLOCK), (whole, high, high - whole))
        return [span for span in spans if span[0] < span[1]]

    def _scales(self, block: torch.Tensor, scratch: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """The scale of each row of `block`, written to `into`.

        Raises:
            ValueError: an element is not finite.
        """
        torch.amax(torch.abs(block, out=scratch), dim=1, out=into)
        _finite_range(into)
        into.div_(127).clamp_(max=self._MOST)
        return into.masked_fill_(into < self._LEAST, 0.0)


CODECS: Final[dict[str, Codec]] = {
    "fp32": Float32(),
    "fp16": Narrow("fp16", torch.float16, unit=2.0**-11, floor=2.0**-25),
    "bf16": Narrow("bf16", torch.bfloat16, unit=2.0**-8, floor=2.0**-134),
    "int8": Int8(),
}


def codec(name: str) -> Codec:
    """The codec of that name.

    Raises:
        ValueError: there is none; one line that names those there are.
    """
    if name in CODECS:
        return CODECS[name]
    near = difflib.get_close_matches(name.lower(), CODECS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown codec {name[:40]!r}: there are {', '.join(CODECS)}{hint}")


def _target(codec: Codec, source: Vector, into: memoryview) -> torch.Tensor:
    """`into` as bytes, after the checks that every encoder makes."""
    check_vector(source)
    expected = codec.encoded_bytes(len(source))
    if into.nbytes != expected or into.readonly:
        state = "read-only" if into.readonly else "writable"
        raise ValueError(f"{codec.name} of {len(source)} elements takes {expected} bytes, not {into.nbytes} {state}")
    return _bytes(into)


def _received(codec: Codec, data: Buffer, into: Vector) -> torch.Tensor:
    """`data` as bytes, after the checks that every decoder makes."""
    check_vector(into)
    view = memoryview(data)
    expected = codec.encoded_bytes(len(into))
    if view.nbytes != expected:
        raise BadPayload(f"{view.nbytes} bytes where {codec.name} of {len(into)} elements takes {expected}")
    return _bytes(memoryview(bytearray(view)) if view.readonly else view)  # torch warns of read-only memory


def _bytes(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8)


def _typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return data.view(dtype)


def _finite_range(values: torch.Tensor) -> tuple[float, float]:
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


def _refuse_non_finite(values: Vector) -> None:
    try:
        _finite_range(values)
    except ValueError:
        raise BadPayload("the payload holds NaN or infinity") from None
