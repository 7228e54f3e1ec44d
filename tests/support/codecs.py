"""Encoding and decoding of whole vectors, as tests of codecs need it, and how far the result may be off."""

from __future__ import annotations

import math

import torch

from protocols.base import Vector
from protocols.vectors.codec import Codec, FloatCodec
from protocols.vectors.lowbit import BLOCK, E3M0, _Blockwise, _spans
from protocols.vectors.sparse import KEEP, TopK, TwoBits, _padded

LARGEST = torch.finfo(torch.float32).max
STEPS = 0.50002  # half a step, and at most 127 * 2**-24 for each rounding of quotient and product


def encoded(codec: Codec, vector: Vector) -> bytearray:
    data = bytearray(codec.encoded_bytes(len(vector)))
    codec.encode(vector, memoryview(data))
    return data


def decoded(codec: Codec, data: bytes | bytearray | memoryview, size: int) -> Vector:
    into = torch.full((size,), math.nan)
    codec.decode(data, into)
    return into


def bits(vector: Vector) -> list[int]:
    return [int(each) for each in vector.view(torch.int32)]


def error_bound(codec: Codec, source: Vector) -> Vector:
    """For each element of a finite `source`, an upper bound on |decode(encode(source)) - source|."""
    if isinstance(codec, FloatCodec):
        return _float_bound(codec, source)
    if isinstance(codec, _Blockwise):
        return _blockwise_bound(codec, source)
    if isinstance(codec, TopK):
        return _top_k_bound(codec, source)
    assert isinstance(codec, TwoBits)  # less than the largest magnitude of the block
    sizes = _padded(source.abs(), KEEP)
    most = sizes.amax(1, keepdim=True) * (1 + 2**-8) if len(source) else sizes
    return torch.maximum(sizes, most.sub(sizes)).clamp_(max=LARGEST).view(-1)[: len(source)]


def _float_bound(codec: FloatCodec, source: Vector) -> Vector:
    """Half a unit in the last place; beyond the range the whole difference to the largest number."""
    unit, floor = {"fp32": (0.0, 0.0), "fp16": (2.0**-11, 2.0**-25), "bf16": (2.0**-8, 2.0**-134)}[codec.name]
    size = source.abs()
    cut = torch.nextafter(size - codec._largest, size)  # the difference may have been rounded down
    return size.mul(unit).clamp_(min=floor).maximum(cut.masked_fill_(size <= codec._largest, 0.0))


def _blockwise_bound(codec: _Blockwise, source: Vector) -> Vector:
    """Half a step; of e3m0 a third of the element, or absmax / 128 of the block if that is more."""
    bound = source.abs()
    for start, stop, width in _spans(0, len(source)):
        block = bound[start:stop].view(-1, width)
        scales = torch.empty(-(-(stop - start) // BLOCK))
        codec._scales(block, torch.empty_like(block), scales)
        scale = scales[:, None]
        of_power = torch.maximum(block * 0.333334, scale * 0.0078126)
        block.copy_(torch.where(scale == 0, block, of_power if isinstance(codec, E3M0) else scale * STEPS))
    return bound


def _top_k_bound(codec: TopK, source: Vector) -> Vector:
    """The magnitude of an element that is not sent; else the error of the codec of the values."""
    bound = source.abs()
    blocks = [(block, group.largest(block)) for group, block in codec._blocks(bound)]
    values = [block.gather(1, positions).view(-1) for block, positions in blocks]
    sent = error_bound(codec._values, torch.cat(values) if values else source)  # signs do not matter
    for block, positions in blocks:
        here, sent = sent[: positions.numel()], sent[positions.numel() :]
        block.scatter_(1, positions, here.view_as(positions))
    return bound
