"""What a slow member costs its group, and how slow it may be: against the planner's own times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.allreduce.plan import (
    BUDGET_FLOOR_SECONDS,
    BUDGET_MULTIPLE,
    bandwidths,
    cost_seconds,
    expected_seconds,
    least_claim,
    shares,
)


@given(st.integers(10_000, 10**10), st.floats(1e5, 1e9), st.integers(3, 32))
def test_least_claim_is_in_time_under_its_own_plan(size: int, others: float, members: int) -> None:
    least, _ = least_claim(size, others)
    claims = bandwidths([min(least, others)] + [others] * (members - 1))
    planned = expected_seconds(shares(claims, [True] * members), claims, size)
    assert size / least <= BUDGET_MULTIPLE * planned + BUDGET_FLOOR_SECONDS


def test_cost_of_a_cap_is_that_of_the_plan() -> None:
    assert cost_seconds(12.5e6, 12.5e6, 10**8, 4) == 0
    assert cost_seconds(1e6, 12.5e6, 10**8, 1) == 0, "alone it costs nobody anything"
    assert cost_seconds(1e6, 12.5e6, 10**8, 4) == pytest.approx(100 - 12)
