"""What outer steps make of fixed pseudo-gradients, bit for bit.

A difference from `outer.json` means that peers of two versions no longer hold the same parameters after a round.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from node.outer.state import OuterSGD
from protocols.base import Vector
from protocols.vectors.codec import CODECS
from protocols.vectors.views import root
from tests.golden.codecs import every_exponent, ordinary

FILE = Path(__file__).with_name("outer.json")
SETTINGS = tuple((rate, momentum) for rate in (0.7, 0.9) for momentum in (0.9, 0.5, 0.0))
LONG = ((0.7, 0.9), (0.9, 0.5))
DELTAS = (1.0, -0.3, 0.1, 0.1, -7e-3, 1e-8, 3.5)


def walk(learning_rate: float, momentum: float) -> Iterator[tuple[float, float]]:
    """One weight that starts at 1: (weight, momentum) after each of `DELTAS`."""
    outer, anchor, velocity = OuterSGD(learning_rate, momentum), torch.ones(1), torch.zeros(1)
    for delta in DELTAS:
        outer.step(anchor, velocity, torch.tensor([delta]))
        yield float(anchor), float(velocity)


def long_walk(learning_rate: float, momentum: float) -> str:
    """State root after steps over a vector of several pieces, the last one ragged."""
    outer = OuterSGD(learning_rate, momentum)
    anchor = torch.cat([ordinary(start) for start in (0, 5, 11)])
    velocity = torch.zeros_like(anchor)
    wild = torch.cat([every_exponent() * 2.0**-20] * 3)
    for delta in (anchor.flip(0), wild, ordinary(3).repeat(3)):
        assert outer.step(anchor, velocity, delta)
    return root([anchor, velocity]).hex()


def trajectories() -> dict[str, object]:
    """What -> floats in hexadecimal, or a hash."""
    found: dict[str, object] = {}
    for rate, momentum in SETTINGS:
        name = f"lr {rate}, momentum {momentum}"
        found[name] = [f"{weight.hex()} {moment.hex()}" for weight, moment in walk(rate, momentum)]
    for rate, momentum in LONG:
        found[f"lr {rate}, momentum {momentum}, root"] = long_walk(rate, momentum)
    return found


SELF_TEST_DIGEST = "334c929d3f97405650dde84a8e2a4e6bba38796b1ff1b1a6f7a1cc20b9636a44"


def pattern(count: int, step: int) -> Vector:
    """Numbers of both signs over many magnitudes, subnormal ones included, from integers alone."""
    index = torch.arange(count, dtype=torch.int64)
    mantissa = (index * (2 * step + 2654435761) % 65521 - 32760).to(torch.float32)
    exponent = (index * 7 + step) % 151 - 140
    return torch.ldexp(mantissa, exponent)


def self_test_digest() -> str:
    anchor, velocity = pattern(4096, 1), torch.zeros(4096)
    outer = OuterSGD(0.7, 0.9)
    digest = hashlib.sha256()
    sides = dict.fromkeys(side for codec in CODECS.values() for side in (codec, codec.reduced(4)))
    for step, codec in enumerate(sides):
        delta = pattern(4096, step + 2)
        encoded = bytearray(codec.encoded_bytes(len(delta)))
        codec.encode(delta, memoryview(encoded))
        codec.decode(encoded, delta)
        outer.step(anchor, velocity, delta)
        digest.update(memoryview(encoded))
        digest.update(root([anchor, velocity]))
    return digest.hexdigest()


def self_test() -> None:
    """Raise RuntimeError if this machine does not compute the bits of the outer step that all others do."""
    if float(torch.tensor([1e-40]) * torch.tensor([0.5])) == 0.0:
        raise RuntimeError("this process flushes subnormal numbers to zero; call torch.set_flush_denormal(False)")
    if self_test_digest() != SELF_TEST_DIGEST:
        raise RuntimeError("this machine's float32 arithmetic differs from the reference: it cannot join a run")


if __name__ == "__main__":
    print(json.dumps(trajectories(), indent=2))
