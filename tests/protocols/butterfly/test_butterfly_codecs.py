"""The butterfly with few bits and with two sides: the right mean, the same bits, the stated bytes."""

from __future__ import annotations

import pytest
import torch

from protocols.base import Outcome, Vector
from protocols.codec import codec
from protocols.codecs.coding import carry
from protocols.vectors import weighted_mean
from tests.sim.butterfly_harness import Averaged, ButterflyHarness

CHUNK = 4096


def vectors(count: int, elements: int) -> list[Vector]:
    """Of one norm, so that nothing is clipped."""
    draw = torch.Generator().manual_seed(count)
    given = [torch.randn(elements, generator=draw) * torch.rand(elements, generator=draw) ** 3 for _ in range(count)]
    return [vector * (elements**0.5 / vector.norm()) for vector in given]


def average(name: str, given: list[Vector], chunk_elements: int = CHUNK) -> Averaged:
    averaged = ButterflyHarness(
        given, [1000] * len(given), [1e8] * len(given), codec=name, chunk_elements=chunk_elements
    ).average()
    assert [mean.outcome for mean in averaged.means] == [Outcome.COMMITTED] * len(given)
    assert all(torch.equal(result, averaged.results[0]) for result in averaged.results)
    return averaged


def stated_bytes(name: str, count: int, elements: int) -> float:
    """What each peer sends, with equal shares: N - 1 parts of its own vector, and its reduced part N - 1 times."""
    used = codec(name)
    both = used.encoded_bytes(elements) + used.reduced(count).encoded_bytes(elements)
    return (count - 1) / count * both


@pytest.mark.parametrize("count", (1, 2, 5))
def test_mean_is_of_the_encoded_contributions(count: int) -> None:
    """Each contribution is what topk makes of it, its reducer's own as well; the mean is off by int8's steps."""
    given = vectors(count, 10 * CHUNK + 700)
    averaged = average("topk", given)
    sent = [vector.clone() for vector in given]
    for vector in sent:
        carry(codec("topk"), vector)
    expected = torch.empty_like(given[0])
    weighted_mean(sent, [1000.0] * count, expected)
    result = averaged.results[0]
    assert ((result - expected).abs() <= expected.abs().max() / 250).all()
    assert not result[expected == 0].any()
    assert (result != 0).sum() > 0.9 * (expected != 0).sum()


@pytest.mark.parametrize("name, most", [("int4", 0.25), ("e3m0", 0.35)])
@pytest.mark.parametrize("count", (2, 5))
def test_four_bit_codecs_approximate_the_mean(name: str, most: float, count: int) -> None:
    given = vectors(count, 30_011)
    expected = torch.stack(given).double().mean(0)
    error = (average(name, given).results[0].double() - expected).norm() / expected.norm()
    assert 0.01 < float(error) < most


@pytest.mark.parametrize("name, factor", [("fp32", 1), ("int8", 3.8), ("int4", 7.4), ("e3m0", 7.4), ("topk", 58)])
def test_bytes_sent_match_the_codec_estimate(name: str, factor: float) -> None:
    """Within 1 % and a few KiB of headers and votes; `factor` times less than float32, and more for four peers."""
    count, elements = 4, 1 << 20
    averaged = average(name, vectors(count, elements), chunk_elements=1 << 18)
    stated = stated_bytes(name, count, elements)
    assert all(stated <= sent <= 1.01 * stated + 8192 for sent in averaged.sent_bytes), (averaged.sent_bytes, stated)
    assert stated_bytes("fp32", count, elements) / stated >= factor


def test_chunks_splitting_codec_groups_are_rejected() -> None:
    with pytest.raises(ValueError, match="take a multiple of 4096"):
        average("topk", vectors(1, 100), chunk_elements=1000)
