"""Sketches: their estimates of norms and distances, and that all machines compute the same ones."""

from __future__ import annotations

import hashlib
import math
import statistics
import struct

import pytest
import torch

from node.outer import sketch as sketches
from node.outer.sketch import NUMBERS, sketch, spread
from protocols.base import Vector

STRIPE = torch.zeros(5000)
STRIPE[5::64] = 1.0  # one element of each block


@pytest.mark.parametrize(
    "vector, count",
    [
        pytest.param(torch.randn(5000, generator=torch.Generator().manual_seed(1)), 200, id="dense"),
        pytest.param(STRIPE, 200, id="stripe"),
        pytest.param(torch.full((70_001,), 1e3), 40, id="large"),
    ],
)
def test_sketch_norm_estimates_within_promised_error(vector: Vector, count: int) -> None:
    ratios = [sketches.norm(sketch(vector, b"%d" % seed)) ** 2 / float(vector.norm()) ** 2 for seed in range(count)]
    error = math.sqrt(2 / NUMBERS)
    assert abs(statistics.mean(ratios) - 1) < 4 * error / math.sqrt(count)
    assert statistics.pstdev(ratios) < 1.4 * error


def test_sketches_are_linear() -> None:
    one, other = torch.arange(1000.0), torch.arange(1000.0).sin()
    sums = [a + b for a, b in zip(sketch(one, b"run"), sketch(other, b"run"), strict=True)]
    assert sums == pytest.approx(sketch(one + other, b"run"), rel=1e-5)


def test_signs_depend_only_on_the_seed() -> None:
    """With powers of two every sum is exact, so that no machine may differ."""
    numbers = sketch(torch.ones(1000), b"run")
    assert hashlib.sha256(struct.pack("<64d", *numbers)).hexdigest()[:16] == "28dbf13226b52df2"
    assert sketch(torch.ones(1000), b"other") != numbers


def test_spread_matches_that_of_the_vectors() -> None:
    """One vector has no spread, and none or zero vectors have no defined one."""
    generator = torch.Generator().manual_seed(2)
    states = [1.0 + 0.1 * each * torch.randn(20_000, generator=generator) for each in (1, 1, 3)]
    middle = torch.stack(states).mean(dim=0)
    exact = max(float((state - middle).norm() / middle.norm()) for state in states)
    assert spread([sketch(state, b"run") for state in states]) == pytest.approx(exact, rel=0.3)
    assert spread([sketch(torch.ones(10), b"run")]) == 0.0
    assert math.isnan(spread([])) and math.isnan(spread([sketch(torch.zeros(10), b"run")] * 2))


def test_non_finite_sketch_is_not_sent() -> None:
    """Else it would look like a peer that is far away, and draw the mean of all peers towards it."""
    for bad in (math.nan, math.inf):
        assert sketches.pack((*[1.0] * (NUMBERS - 1), bad)) == b""
    assert sketches.unpack(b"") is None
    assert sketches.unpack(sketches.pack((1e39,) * NUMBERS)) is not None
