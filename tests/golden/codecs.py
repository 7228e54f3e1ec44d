"""Hashes of what the codecs, the reducer and the state root make of fixed vectors.

The vectors come from integer arithmetic alone, so that every machine starts from the same bits. A difference from
`codecs.json` means that peers of two versions no longer understand, or no longer agree with, each other.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from protocols.base import Vector
from protocols.vectors.codec import CODECS
from protocols.vectors.views import root, weighted_mean

FILE = Path(__file__).with_name("codecs.json")
_ELEMENTS = 100_003  # a prime: every block and piece has a ragged end


def ordinary(start: int = 0) -> Vector:
    """Float32 in [-8, 8), like weights and gradients."""
    mixed = torch.arange(start, start + _ELEMENTS, dtype=torch.int64) * 2654435761 % (1 << 24) - (1 << 23)
    return mixed.to(torch.float32) * 2.0**-20


def every_exponent() -> Vector:
    """Float32 over the whole finite range, denormals and both zeros among them."""
    bits = torch.arange(_ELEMENTS, dtype=torch.int64) * 2654435761 % (1 << 32)
    bits = torch.where(bits % (1 << 31) < 0x7F80_0000, bits, bits & 0x8000_0000)  # no NaN, no infinity
    return torch.where(bits < 1 << 31, bits, bits - (1 << 32)).to(torch.int32).view(torch.float32)


def digests() -> dict[str, str]:
    """What -> SHA-256, hexadecimal."""
    found = {}
    for vector_name, vector in (("ordinary", ordinary()), ("every exponent", every_exponent())):
        for name, codec in (CODECS | {"topk of 4": CODECS["topk"].reduced(4)}).items():
            encoded = bytearray(codec.encoded_bytes(len(vector)))
            codec.encode(vector, memoryview(encoded))
            decoded = torch.empty_like(vector)
            codec.decode(encoded, decoded)
            found[f"{name}, {vector_name}, encoded"] = hashlib.sha256(encoded).hexdigest()
            found[f"{name}, {vector_name}, decoded"] = root([decoded]).hex()
    mean = torch.empty(_ELEMENTS)
    weighted_mean([ordinary(), ordinary(7), every_exponent(), ordinary(99)], [3.0, 0.1, 1e-30, 8191.0], mean)
    found["weighted mean"] = root([mean]).hex()
    found["root of two"] = root([ordinary(), every_exponent()]).hex()
    return found


if __name__ == "__main__":
    print(json.dumps(digests(), indent=2))
