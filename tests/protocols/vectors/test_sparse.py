"""Sparse pseudo-gradients: the largest elements are sent, a mean keeps them all, and the rest is sent later."""

from __future__ import annotations

import math
import random
from contextlib import suppress

import pytest
import torch

from protocols.base import BadPayload, Vector
from protocols.vectors import sparse
from protocols.vectors.codec import codec
from protocols.vectors.coding import carry
from protocols.vectors.views import weighted_mean
from tests.support.codecs import bits, decoded, encoded

TOPK = codec("topk")
SIZES = (1, 63, 64, 65, 4095, 4096, 4097, 3 * 4096 + 700)


def heavy(count: int, seed: int) -> Vector:
    """Like a pseudo-gradient: most elements are small, some are large, some are zero."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=draw) * torch.rand(count, generator=draw) ** 4
    return values * (torch.rand(count, generator=draw) < 0.9)


def carried(vector: Vector, members: int = 0) -> Vector:
    held = vector.clone()
    carry(TOPK.reduced(members) if members else TOPK, held)
    return held


@pytest.mark.parametrize("count", SIZES)
def test_largest_elements_of_each_group_are_sent(count: int) -> None:
    given = heavy(count, count)
    back = carried(given)
    for low in range(0, count, 4096):
        group, got = given[low : low + 4096], back[low : low + 4096]
        kept = math.ceil(len(group) / 64)
        order = sorted(range(len(group)), key=lambda at: (-abs(float(group[at])), at))[:kept]
        there = sorted(at for at in order if group[at] != 0)
        assert got.nonzero().view(-1).tolist() == there
        assert (got[there].sign() == group[there].sign()).all()
        assert len(got[there].abs().unique()) <= 2


def test_first_of_equal_elements_are_sent() -> None:
    given = torch.ones(4096)
    assert carried(given).nonzero().view(-1).tolist() == list(range(64))
    given[:100] = 0.5
    given[4000] = -2.0
    assert carried(given).nonzero().view(-1).tolist() == [*range(100, 163), 4000]


@pytest.mark.parametrize("count", SIZES)
def test_reencoding_is_lossless(count: int) -> None:
    for seed in range(4):
        once = carried(heavy(count, seed) * 10.0 ** (10 * seed - 20))
        assert bits(carried(once)) == bits(once)


@pytest.mark.parametrize("members", (1, 2, 3, 5, 16, 32))
@pytest.mark.parametrize("count", (700, 2 * 4096 + 700))
def test_mean_keeps_all_its_elements(members: int, count: int) -> None:
    given = [carried(heavy(count, seed)) for seed in range(members)]
    mean = torch.empty(count)
    weighted_mean([each.clone() for each in given], [1000.0 + seed for seed in range(members)], mean)
    back = carried(mean, members)
    block = mean.abs().max()
    assert ((back - mean).abs() <= block / 250).all()
    lost = (back == 0) & (mean != 0)
    assert (mean[lost].abs() <= block / 250).all()
    assert ((mean == 0) <= (back == 0)).all()


def test_bytes_no_encoder_writes_are_rejected() -> None:
    good = encoded(TOPK, heavy(4096, 1))

    def refused(at: int, value: int, why: str) -> None:
        bad = bytearray(good)
        bad[at] ^= value
        with pytest.raises(BadPayload, match=why):
            decoded(TOPK, bad, 4096)

    refused(48, 1 << next(bit for bit in range(8) if not good[48] >> bit & 1), "not 64 positions")
    refused(63, 128, "beyond the last")
    backwards = bytearray(good)
    backwards[:48] = bytes(48)
    backwards[48:64] = b"\xff" * 8 + bytes(8)  # all 64 at once
    with pytest.raises(BadPayload, match="out of order"):
        decoded(TOPK, backwards, 4096)


@pytest.mark.parametrize(
    "low, high", [(0x7FC0, 0x7FC0), (0x3F80, 0x7F80), (0xBF80, 0x3F80), (0x8000, 0x3F80), (0x4000, 0x3F80), (1, 0x3F80)]
)
def test_levels_no_encoder_writes_are_rejected(low: int, high: int) -> None:
    data = encoded(TOPK, heavy(4096, 1))
    data[64:68] = low.to_bytes(2, "little") + high.to_bytes(2, "little")
    with pytest.raises(BadPayload, match="levels"):
        decoded(TOPK, data, 4096)


def test_minus_zero_and_trailing_codes_are_rejected() -> None:
    data = encoded(TOPK, torch.zeros(4096))
    data[-1] |= 1
    with pytest.raises(BadPayload, match="minus zero"):
        decoded(TOPK, data, 4096)
    data = encoded(TOPK, torch.ones(10))  # one element is sent
    data[-1] |= 4
    with pytest.raises(BadPayload, match="beyond the last"):
        decoded(TOPK, data, 10)


@pytest.mark.parametrize("members", (0, 3))
def test_flipped_bits_decode_to_finite_or_are_rejected(members: int) -> None:
    each, draw = (TOPK.reduced(members) if members else TOPK), random.Random(members)
    good = encoded(each, heavy(5000, 3))
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        with suppress(BadPayload):
            assert decoded(each, bad, 5000).isfinite().all()


# -- error feedback ---------------------------------------------------------------------------------------------------


def test_sent_plus_residual_equals_the_original() -> None:
    """To the bit where nothing was sent; otherwise to one rounding."""
    delta, residual, gone = heavy(9000, 1), heavy(9000, 2), torch.empty(9000)
    before = residual.mul(0.95).add(delta)
    sparse.sent(TOPK, residual, delta, gone)
    sparse.settle(TOPK, residual, delta, gone)
    unsent = gone == 0
    assert bits(residual[unsent]) == bits(before[unsent])
    assert unsent.sum() >= 9000 - (128 + math.ceil((9000 - 8192) / 64))
    together = residual.double() + gone.double()
    assert ((together - before.double()).abs() <= 2**-24 * gone.abs().double()).all()


def test_residual_is_sent_eventually() -> None:
    """With the same pseudo-gradient in each round, all that was sent, decayed and is left adds up to the sum."""
    delta, residual, gone = heavy(4096, 1), torch.zeros(4096), torch.empty(4096)
    total, forgotten = torch.zeros(4096, dtype=torch.float64), torch.zeros(4096, dtype=torch.float64)
    rounds = 120
    for _ in range(rounds):
        sparse.sent(TOPK, residual, delta, gone)
        forgotten += 0.05 * residual.double()
        sparse.settle(TOPK, residual, delta, gone)
        total += gone.double()
    came_to = rounds * delta.double()
    assert torch.allclose(total + forgotten + residual.double(), came_to, rtol=1e-4, atol=1e-4)
    assert (total != 0).sum() > 30 * 64 / 4  # not the same 64 each time


def test_non_finite_sum_is_rejected() -> None:
    delta = torch.ones(100)
    delta[7] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        sparse.sent(TOPK, torch.zeros(100), delta, torch.empty(100))
