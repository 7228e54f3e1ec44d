"""What outer steps make of fixed pseudo-gradients, bit for bit.

A difference from `outer.json` means that peers of two versions no longer hold the same parameters after a round.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from node.outer.sgd import OuterSGD
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


if __name__ == "__main__":
    print(json.dumps(trajectories(), indent=2))
