"""What a contribution counts: its weight by tokens, and the clipping of its norm."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from protocols import wire
from protocols.allreduce import plan as clipping


@pytest.mark.parametrize(
    "tokens, expected",
    [
        ([], ()),
        ([0, 0], (0.0, 0.0)),
        ([5], (5.0,)),
        ([0, 7], (0.0, 7.0)),
        ([100, 200, 300], (100.0, 200.0, 300.0)),
        ([100, 100, 1601], (100.0, 100.0, 1600.0)),
        ([100, 100, 1600], (100.0, 100.0, 1600.0)),
        ([1000, 10**9], (1000.0, 16_000.0)),  # of two, the smaller is the measure
        ([0, 0, 0, 100, 100, 5000], (0.0, 0.0, 0.0, 100.0, 100.0, 1600.0)),  # those that bring nothing move no median
        ([1, 3, 100, 1000], (1.0, 3.0, 48.0, 48.0)),
        ([wire.MAX_TOKENS, 1, 1], (16.0, 1.0, 1.0)),
        ([wire.MAX_TOKENS], (float(wire.MAX_TOKENS),)),
    ],
)
def test_weights_are_tokens_capped_by_median_multiple(tokens: list[int], expected: tuple[float, ...]) -> None:
    assert clipping.weights(tokens) == expected


@given(tokens=st.lists(st.integers(0, 10**6), min_size=1, max_size=32))
def test_unit_multiple_caps_weights_at_the_median(tokens: list[int]) -> None:
    brought = sorted(count for count in tokens if count)
    if not brought:
        return
    assert max(clipping.weights(tokens, 1.0)) == brought[(len(brought) - 1) // 2]
    assert all(low <= high for low, high in zip(clipping.weights(tokens, 1.0), tokens, strict=True))
    assert set(clipping.allowances(clipping.weights(tokens, 1.0))) == {1.0}


@pytest.mark.parametrize(
    "norms, weights, factors",
    [
        ([], [], ()),
        ([0.0, 0.0], [0.0, 0.0], (1.0, 1.0)),
        ([2.0], [1.0], (1.0,)),
        ([1.0, 2.0, 3.0], [1.0] * 3, (1.0, 1.0, 2 / 3)),
        ([1.0, 2.0, 4.0, 8.0], [1.0] * 4, (1.0, 1.0, 0.5, 0.25)),  # of two in the middle, the smaller is the measure
        ([1.0, 2.0**90], [1.0, 1.0], (1.0, 2.0**-90)),
        ([0.0, 0.0, 1.0, 1.0, 64.0], [0.0, 0.0, 1.0, 1.0, 1.0], (1.0, 1.0, 1.0, 1.0, 1 / 64)),
        ([1e-320, 1.0, 1.0], [1.0] * 3, (1.0, 1.0, 1.0)),
        ([1.0, 1.0, 5.0], [100.0, 100.0, 1000.0], (1.0, 1.0, 1.0)),  # ten times the steps: up to ten times the norm
        ([1.0, 1.0, 20.0], [100.0, 100.0, 1000.0], (1.0, 1.0, 0.5)),
        ([1.0, 5.0], [100.0, 1000.0], (1.0, 1.0)),
        ([4.0, 1.0, 1.0], [1.0, 100.0, 100.0], (0.25, 1.0, 1.0)),  # fewer steps are no reason for a smaller one
    ],
)
def test_norms_are_clipped_to_median_and_token_allowance(
    norms: list[float], weights: list[float], factors: tuple[float, ...]
) -> None:
    assert clipping.clip_factors(norms, clipping.allowances(weights)) == factors


@given(
    norms=st.lists(st.floats(0.0, 1e30), min_size=1, max_size=16),
    lies=st.lists(st.floats(0.0, 1e30), max_size=15),
    data=st.data(),
)
def test_lying_minority_cannot_exceed_largest_honest_norm(
    norms: list[float], lies: list[float], data: st.DataObject
) -> None:
    lies = lies[: max(0, len(norms) - 1)]
    claims = data.draw(st.permutations([*norms, *lies]))
    factors = clipping.clip_factors(claims, [1.0] * len(claims))
    assume(sum(norm > 0 for norm in norms) > len(lies))
    assert all(norm * factor <= max(norms) * (1 + 1e-12) for norm, factor in zip(claims, factors, strict=True))
