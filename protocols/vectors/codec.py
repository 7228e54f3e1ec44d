"""Codecs: encode a float32 vector as bytes of a size known in advance, and decode it. Pure.

All codecs are little-endian, work in place on buffers at any address, and may be used by several threads at once.
Encoding refuses values that are not finite. Decoding yields finite values or raises `BadPayload`, the same bits on
every machine: it widens or looks up each code, then multiplies at most once.

    fp32   4 bytes an element, exact
    fp16   2 bytes, rounded to nearest even; saturates at the largest float16 (65,504)
    bf16   2 bytes, rounded to nearest even; saturates at the largest bfloat16 (about 3.39e38)
    int8   1.03125 bytes, .258 of fp32 (`protocols.vectors.lowbit`)
    int4   .53125 bytes, .133 of fp32
    e3m0   .53125 bytes: a sign and a power of two
    topk   .0205 bytes, 1/195 of fp32, with error feedback (`protocols.vectors.sparse`)
"""

from __future__ import annotations

from typing import Final

import torch

from protocols.base import Buffer, Vector
from protocols.registry import require_known
from protocols.vectors.coding import (
    PIECE,
    Codec,
    finite_range,
    received,
    refuse_non_finite,
    require_finite,
    target,
    typed,
)
from protocols.vectors.lowbit import E3M0, Int4, Int8
from protocols.vectors.sparse import TopK

__all__ = ["CODECS", "Codec", "codec", "state_codec"]


class FloatCodec(Codec):
    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self._dtype = name, dtype
        self._largest = torch.finfo(dtype).max
        self.in_place = dtype == torch.float32

    def encoded_bytes(self, elements: int) -> int:
        return self._dtype.itemsize * elements

    def encode(self, source: Vector, into: memoryview) -> None:
        data = typed(target(self, source, into), self._dtype)
        if self.in_place:
            require_finite(source)
            return _copy(source, data)
        low, high = finite_range(source)
        if max(-low, high) <= self._largest:
            data.copy_(source)
            return
        scratch = torch.empty(min(PIECE, len(source)))
        for start in range(0, len(source), PIECE):
            piece = source[start : start + PIECE]
            held = torch.clamp(piece, -self._largest, self._largest, out=scratch[: len(piece)])
            data[start : start + PIECE].copy_(held)

    def decode(self, data: Buffer, into: Vector) -> None:
        _copy(typed(received(self, data, into), self._dtype), into)
        refuse_non_finite(into)


def _copy(source: torch.Tensor, into: torch.Tensor) -> None:
    if source.data_ptr() != into.data_ptr():
        into.copy_(source)


CODECS: Final[dict[str, Codec]] = {
    "fp32": FloatCodec("fp32", torch.float32),
    "fp16": FloatCodec("fp16", torch.float16),
    "bf16": FloatCodec("bf16", torch.bfloat16),
    "int8": Int8(),
    "int4": Int4(),
    "e3m0": E3M0(),
    "topk": TopK(),
}


STATE_CODECS = ("fp32", "fp16")
"""Codecs precise enough for states. A coarser one would undo the work of a round, each time peers average."""


def state_codec(name: str) -> Codec:
    """The codec for states in a run with this codec: fp32 if the run's codec is only meant for pseudo-gradients."""
    return codec(name if name in STATE_CODECS else "fp32")


def codec(name: str) -> Codec:
    return CODECS[require_known("codec", name, CODECS)]
