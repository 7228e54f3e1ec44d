"""The butterfly with each codec: the right mean, the same bits, the bytes that the codec states."""

from __future__ import annotations

import pytest
import torch

from protocols.base import Outcome, Vector
from protocols.vectors.codec import codec
from protocols.vectors.coding import carry
from protocols.vectors.views import weighted_mean
from tests.sim.averaging import Averaged, ButterflyHarness
from tests.support.codecs import error_bound
from tests.support.example_vectors import equal_norm_vectors

CHUNK = 4096


def vectors(count: int, elements: int) -> list[Vector]:
    """Of one norm, so that nothing is clipped."""
    draw = torch.Generator().manual_seed(count)
    given = [torch.randn(elements, generator=draw) * torch.rand(elements, generator=draw) ** 3 for _ in range(count)]
    return [vector * (elements**0.5 / vector.norm()) for vector in given]


def average(name: str, given: list[Vector], tokens: list[int] | None = None, chunk_elements: int = CHUNK) -> Averaged:
    """Average over equal links; all peers commit, with the same bits."""
    harness = ButterflyHarness(
        given, tokens or [1000] * len(given), [1e8] * len(given), codec=name, chunk_elements=chunk_elements
    )
    averaged = harness.average()
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


@pytest.mark.parametrize("name, factor", [("fp32", 1), ("int8", 3.8), ("int4", 7.4), ("e3m0", 7.4), ("topk", 58)])
def test_bytes_sent_match_the_codec_estimate(name: str, factor: float) -> None:
    """Within 1 % or a few KiB of headers and votes; `factor` times less than float32, and more for four peers."""
    count, elements = 4, 10 * (1 << 20) // 4
    averaged = average(name, vectors(count, elements), chunk_elements=1 << 18)
    stated = stated_bytes(name, count, elements)
    most = max(1.01 * stated, stated + 8192)
    assert all(stated <= sent <= most for sent in averaged.sent_bytes), (averaged.sent_bytes, stated)
    assert stated_bytes("fp32", count, elements) / stated >= factor


def test_chunks_splitting_codec_groups_are_rejected() -> None:
    with pytest.raises(ValueError, match="take a multiple of 4096"):
        average("topk", vectors(1, 100), chunk_elements=1000)


@pytest.mark.parametrize("name", ("fp32", "fp16", "bf16", "int8"))
@pytest.mark.parametrize("count", (2, 3, 5, 8))
def test_codec_errors_stay_within_bound(name: str, count: int) -> None:
    """Each contribution is encoded once and the mean once: the errors of both, element by element."""
    given = equal_norm_vectors(count, 30_011, seed=count)
    tokens = [1000 + 500 * index for index in range(count)]
    averaged = average(name, given, tokens)
    weights = torch.tensor(tokens, dtype=torch.float64) / sum(tokens)
    weighted = list(zip(given, weights, strict=True))
    expected = torch.stack([weight * vector.double() for vector, weight in weighted]).sum(0)
    bound = torch.stack([weight * error_bound(codec(name), vector).double() for vector, weight in weighted]).sum(0)
    rounding = 1e-6 * torch.stack([weight * vector.double().abs() for vector, weight in weighted]).sum(0)
    bound = bound + _block_bound(name, expected.abs().float() + bound.float()).double() + rounding
    assert bool(((averaged.results[0].double() - expected).abs() <= bound).all())


def _block_bound(name: str, magnitude: Vector) -> Vector:
    """The bound of encoding any vector of at most these magnitudes, wherever its blocks begin."""
    if name != "int8":
        return error_bound(codec(name), magnitude) * 2
    return torch.full_like(magnitude, float(magnitude.max()) / 127)
