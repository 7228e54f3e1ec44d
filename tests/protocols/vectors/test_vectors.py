"""Flat vectors: one sequence of elements over several tensors, an accurate mean, and a root over every bit."""

from __future__ import annotations

import hashlib
import math
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocols.base import Vector
from protocols.registry import CHUNK_ELEMENTS
from protocols.vectors.robust import ESTIMATE_ERROR
from protocols.vectors.views import (
    VectorView,
    chunk_count,
    chunk_range,
    estimated_norm,
    norm,
    root,
    weighted_mean,
)

sizes = st.lists(st.integers(0, 9), max_size=6)
LARGEST = torch.finfo(torch.float32).max


def split(values: Vector, lengths: list[int]) -> list[Vector]:
    return [part.clone() for part in torch.split(values[: sum(lengths)], lengths)] if lengths else []


@given(lengths=sizes, ends=st.tuples(st.integers(0, 54), st.integers(0, 54)))
def test_access_across_boundaries_equals_joined_vector(lengths: list[int], ends: tuple[int, int]) -> None:
    joined = torch.arange(float(sum(lengths)))
    flat = VectorView(parts := split(joined, lengths))
    low, high = sorted(min(end, flat.size) for end in ends)
    assert flat.size == len(joined)
    assert flat.read(low, high, torch.empty(high - low)).tolist() == joined[low:high].tolist()
    joined[low:high] = torch.arange(-1.0, low - high - 1, -1)
    flat.write(low, joined[low:high].clone())
    assert [value for part in parts for value in part.tolist()] == joined.tolist()


def test_range_inside_one_vector_is_not_copied() -> None:
    vector = torch.arange(10.0)
    view = VectorView([torch.zeros(3), torch.zeros(0), vector]).read(4, 13, torch.empty(0))
    assert view.data_ptr() == vector[1:].data_ptr() and len(view) == 9


def test_view_rejects_bad_ranges_and_vectors() -> None:
    flat = VectorView([torch.zeros(3), torch.zeros(4)])
    for low, high in ((-1, 2), (3, 2), (0, 8), (8, 8)):
        with pytest.raises(ValueError, match="of a vector of 7"):
            flat.read(low, high, torch.empty(9))
    with pytest.raises(ValueError, match="scratch of 1"):
        flat.read(2, 4, torch.empty(1))
    with pytest.raises(ValueError, match="of a vector of 7"):
        flat.write(5, torch.ones(3))
    plain = torch.zeros(4)
    for bad in (plain.double(), plain.view(2, 2), plain[::2], torch.empty(4, device="meta"), plain.requires_grad_()):
        with pytest.raises(ValueError, match="a vector is"):
            VectorView([bad])


@given(low=st.integers(0, 1 << 40), size=st.integers(0, 5 * CHUNK_ELEMENTS))
def test_chunks_cover_a_range_once_and_in_order(low: int, size: int) -> None:
    ranges = [chunk_range(low, low + size, index) for index in range(chunk_count(size))]
    edges = [low, *(high for _, high in ranges)]
    assert [start for start, _ in ranges] == edges[:-1] and edges[-1] == low + size
    assert all(0 < high - start <= CHUNK_ELEMENTS for start, high in ranges)
    assert all(high - start == CHUNK_ELEMENTS for start, high in ranges[:-1])
    for beyond in (-1, len(ranges)):
        with pytest.raises(ValueError, match="chunk"):
            chunk_range(low, low + size, beyond)


@given(
    random=st.randoms(use_true_random=False),
    count=st.integers(1, 32),
    spread=st.sampled_from([0.0, 3.0, 12.0]),
    bias=st.sampled_from([0.0, 1.0, 100.0]),
)
def test_mean_is_within_a_millionth_of_float64(random: Random, count: int, spread: float, bias: float) -> None:
    generator = torch.Generator().manual_seed(random.getrandbits(40))
    scales = [10 ** random.uniform(-spread, spread) for _ in range(count)]
    weights = [10 ** random.uniform(-spread, spread) for _ in range(count)]
    vectors = [(torch.randn(999, generator=generator) + bias) * scale for scale in scales]
    want = sum((v.double() * w for v, w in zip(vectors, weights, strict=True)), torch.zeros(999).double()) / sum(
        weights
    )
    mean = torch.empty(999)
    weighted_mean([vector.clone() for vector in vectors], weights, mean)
    assert float((mean.double() - want).norm()) <= 1e-6 * float(want.norm())


def test_mean_of_one_vector_is_that_vector() -> None:
    vector = torch.tensor([1.1, -2.7e-45, 3e38, -0.0])
    mean = torch.empty(4)
    for weight in (1.0, 0.1, 3.0, 1e-300, 1e300):
        weighted_mean([vector.clone()], [weight], mean)
        assert torch.equal(mean, vector)


def test_mean_may_overwrite_the_first_contribution() -> None:
    first = torch.tensor([1.0, 2.0])
    weighted_mean([first, torch.tensor([4.0, -1.0])], [2.0, 1.0], first)
    assert torch.allclose(first, torch.tensor([2.0, 1.0]))


@given(count=st.integers(1, 32), weights=st.lists(st.floats(1e-300, 1e308), min_size=32, max_size=32))
def test_mean_of_finite_vectors_is_finite(count: int, weights: list[float]) -> None:
    mean = torch.empty(3)
    contributions = [torch.tensor([LARGEST, -LARGEST, LARGEST * (-1) ** index]) for index in range(count)]
    weighted_mean(contributions, weights[:count], mean)
    assert mean.isfinite().all()
    assert torch.allclose(mean[:2], torch.tensor([LARGEST, -LARGEST]), rtol=1e-6)


def test_mean_rejects_bad_weights_and_sizes() -> None:
    for weights in ([0.0, 1.0], [-1.0, 1.0], [math.nan, 1.0], [math.inf, 1.0]):
        with pytest.raises(ValueError, match="positive and finite"):
            weighted_mean([torch.ones(2), torch.ones(2)], weights, torch.empty(2))
    for contributions, counted in (([], []), ([torch.ones(2)], [1.0, 2.0]), ([torch.ones(3)], [1.0])):
        with pytest.raises(ValueError, match="contributions"):
            weighted_mean(contributions, counted, torch.empty(2))


def test_norm_matches_float64() -> None:
    generator = torch.Generator().manual_seed(5)
    vectors = [torch.randn(size, generator=generator) for size in (200_000, 0, 1)]
    assert norm(vectors) == pytest.approx(float(torch.cat(vectors).double().norm()), rel=1e-12)
    assert norm([]) == 0.0
    assert norm([torch.full((4,), LARGEST)]) == pytest.approx(2 * LARGEST)
    assert norm([torch.full((4,), 2.0**-149)]) == 2.0**-148
    assert not math.isfinite(norm([torch.tensor([1.0, math.nan])]))


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    repeats=st.sampled_from([1, 100]),
)
def test_estimated_norm_is_close_to_the_norm(values: list[float], repeats: int) -> None:
    vector = torch.tensor(values * repeats)
    assert estimated_norm(vector) == pytest.approx(norm([vector]), rel=ESTIMATE_ERROR)


@pytest.mark.parametrize("scale", (1e-30, 1e-12, 1.0, 1e12, 1e30))
def test_estimated_norm_of_a_chunk_is_close(scale: float) -> None:
    vector = torch.rand(CHUNK_ELEMENTS, generator=torch.Generator().manual_seed(1)) * scale
    assert estimated_norm(vector) == pytest.approx(norm([vector]), rel=ESTIMATE_ERROR)
    for bad in (math.nan, math.inf):
        vector[CHUNK_ELEMENTS // 2] = bad
        assert not math.isfinite(estimated_norm(vector))


def test_root_matches_its_specification() -> None:
    vectors = [torch.arange(CHUNK_ELEMENTS + 3.0), torch.empty(0), torch.tensor([1.0])]
    outer = hashlib.sha256(b"starling root 1\n" + (3).to_bytes(8, "little"))
    for vector in vectors:
        raw = vector.numpy().astype("<f4").tobytes()
        chunks = [raw[low : low + (1 << 20)] for low in range(0, len(raw), 1 << 20)]
        outer.update(len(vector).to_bytes(8, "little"))
        outer.update(b"".join(hashlib.sha256(chunk).digest() for chunk in chunks))
    assert root(vectors) == outer.digest()


def test_root_depends_on_bits_sizes_and_boundaries() -> None:
    vector = torch.arange(12.0)
    others = [
        [vector[:5], vector[5:]],
        [vector[:6], vector[6:]],
        [vector, torch.empty(0)],
        [torch.empty(0), vector],
        [vector[:11]],
        [torch.cat([vector[:1].neg(), vector[1:]])],  # -0.0 is not 0.0
        [vector.flip(0)],
        [],
    ]
    roots = {root([vector]), *(root(other) for other in others)}
    assert len(roots) == 1 + len(others)
    assert root([vector]) == root([vector.clone()]) and len(root([])) == 32
