"""How a vector is divided among reducers: the shares by which the slowest link ends first, and their parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from protocols.allreduce import plan as planning


def seconds_of(
    fractions: Sequence[float], bandwidths: Sequence[float], able: Sequence[bool], growth: float = 1.0
) -> float:
    """Time, per byte of the vector, of the slowest member that reduces anything."""
    count = len(fractions)
    return max(
        (1 - f + growth * (count - 1) * f) / b
        for f, b, one in zip(fractions, bandwidths, able, strict=True)
        if one and f > 0
    )


def least_seconds(bandwidths: list[float], able: list[bool], growth: float = 1.0) -> float:
    """The least T at which the able members can reduce everything, by bisection."""
    usable = [b for b, one in zip(bandwidths, able, strict=True) if one]
    room = growth * (len(bandwidths) - 1) - 1
    low, high = 0.0, (1 + room) / max(usable)
    for _ in range(200):
        middle = (low + high) / 2
        enough = sum(max(0.0, middle * b - 1) for b in usable) >= room
        low, high = (low, middle) if enough else (middle, high)
    return high


@st.composite
def uplinks(draw: st.DrawFn, fewest: int = 1) -> tuple[list[float], list[bool]]:
    count = draw(st.integers(fewest, 32))
    speed = st.sampled_from([1.0, 1e6, 1e7, 1e13]) | st.floats(5, 8).map(lambda exponent: 10**exponent)
    able = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    able[draw(st.integers(0, count - 1))] = True
    return draw(st.lists(speed, min_size=count, max_size=count)), able


@given(links=uplinks())
def test_shares_sum_to_one(links: tuple[list[float], list[bool]]) -> None:
    bandwidths, able = links
    fractions = planning.shares(bandwidths, able)
    assert len(fractions) == len(bandwidths)
    assert sum(fractions) == pytest.approx(1, abs=1e-12)
    assert all(0 <= f <= 1 for f in fractions)
    assert all(f == 0 for f, one in zip(fractions, able, strict=True) if not one)


@given(links=uplinks(fewest=2), growth=st.just(1.0) | st.floats(1.01, 40))
def test_shares_minimise_the_time(links: tuple[list[float], list[bool]], growth: float) -> None:
    """`growth`: how many bytes the mean takes for each byte of a contribution."""
    bandwidths, able = links
    assume(growth > 1.0 or len(bandwidths) > 2)  # of two, each sends the whole vector, whatever the shares
    fractions = planning.shares(bandwidths, able, growth)
    least = least_seconds(bandwidths, able, growth)
    assert seconds_of(fractions, bandwidths, able, growth) == pytest.approx(least, rel=1e-9)
    slowest = max(least, *(1 / b for b in bandwidths))
    assert planning.expected_seconds(fractions, bandwidths, 1, growth) == pytest.approx(slowest, rel=1e-9)
    for f, b, one in zip(fractions, bandwidths, able, strict=True):
        assert not one or f > 0 or 1 / b >= least * (1 - 1e-9)  # idle only if handing in alone takes it as long


@given(links=uplinks(), elements=st.integers(0, 10**7), grain=st.sampled_from([1, 64, 4096]))
def test_parts_start_at_multiples_of_the_grain(
    links: tuple[list[float], list[bool]], elements: int, grain: int
) -> None:
    bounds = planning.part_bounds(planning.shares(*links), elements, grain)
    assert (bounds[0], bounds[-1]) == (0, elements) and list(bounds) == sorted(bounds)
    assert all(bound % grain == 0 for bound in bounds if bound < elements)


@pytest.mark.parametrize(
    "bandwidths, able, expected",
    [
        ([5.0], [True], (1.0,)),
        ([1.0, 1e9], [True, True], (0.5, 0.5)),  # of two, each sends S, whatever the shares
        ([1.0, 1e9], [True, False], (1.0, 0.0)),
        ([1e9, 1.0, 1.0, 1.0], [True] * 4, (1.0, 0.0, 0.0, 0.0)),
        ([1e9, 1.0, 1.0, 1.0], [False, True, True, True], (0.0, 1 / 3, 1 / 3, 1 / 3)),
        ([1e6, 1e6, 1e5, 1e6], [True] * 4, (1 / 3, 1 / 3, 0.0, 1 / 3)),
        ([1.0, 30.0, 20.0], [True] * 3, (0.0, 0.8, 0.2)),
    ],
)
def test_shares_match_hand_calculation(bandwidths: list[float], able: list[bool], expected: tuple[float, ...]) -> None:
    assert planning.shares(bandwidths, able) == pytest.approx(expected)


@given(links=uplinks(), elements=st.integers(0, 40) | st.integers(0, 10**9))
def test_parts_tile_the_vector(links: tuple[list[float], list[bool]], elements: int) -> None:
    """Odd sizes, fewer elements than members; a member without a share has no element."""
    fractions = planning.shares(*links)
    bounds = planning.part_bounds(fractions, elements)
    assert len(bounds) == len(fractions) + 1 and (bounds[0], bounds[-1]) == (0, elements)
    for f, (low, high) in zip(fractions, itertools.pairwise(bounds), strict=True):
        assert abs(high - low - f * elements) <= 1.001
        assert low <= high and (f > 0 or low == high)


@pytest.mark.parametrize(
    "fractions, elements, expected",
    [
        ((1.0,), 7, (0, 7)),
        ((0.25, 0.25, 0.5), 7, (0, 2, 4, 7)),
        ((0.25,) * 4, 2, (0, 0, 1, 2, 2)),
        ((0.5, 0.0, 0.5), 9, (0, 4, 4, 9)),
        ((0.1,) * 10, 10, tuple(range(11))),
    ],
)
def test_part_bounds_match_hand_calculation(
    fractions: tuple[float, ...], elements: int, expected: tuple[int, ...]
) -> None:
    assert planning.part_bounds(fractions, elements) == expected
