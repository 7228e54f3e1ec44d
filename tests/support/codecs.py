"""Encoding and decoding of whole vectors, as tests of codecs need it."""

from __future__ import annotations

import math

import torch

from protocols.base import Vector
from protocols.vectors.codec import Codec

LARGEST = torch.finfo(torch.float32).max


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
