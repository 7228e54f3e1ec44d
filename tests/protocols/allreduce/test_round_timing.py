"""When a round is called, and what a member claims as its bandwidth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.allreduce import plan as planning
from protocols.allreduce.all_reduce import MIN_BANDWIDTH, next_claim


@pytest.mark.parametrize(
    "complete, members, expected",
    [
        ([], 1, None),
        ([7.0], 1, 0.0),
        ([], 2, None),
        ([10.0], 2, 15.0),
        ([10.0, 400.0], 2, 0.0),
        ([10.0], 3, 15.0),
        ([10.0, 12.0], 3, 13.2),
        ([10.0, 14.0], 3, 15.0),  # the grace would end at 15.4
        ([10.0], 4, None),
        ([10.0, 12.0], 4, 18.0),
        ([10.0, 12.0, 14.0], 4, 15.4),
        ([10.0, 12.0, 17.0], 4, 18.0),
        ([10.0, 12.0, 14.0, 14.0], 4, 0.0),
        ([10.0, 12.0], 5, 18.0),
        ([10.0, 12.0, 13.0], 5, 18.0),
        ([10.0, 12.0, 13.0, 14.0], 5, 15.4),
        ([10.0], 6, None),
        ([10.0, 20.0], 6, 30.0),
        ([10.0, 20.0, 21.0], 6, 30.0),
        ([10.0, 20.0, 21.0, 22.0], 6, 24.2),
        ([22.0, 10.0, 21.0, 20.0], 6, 24.2),
        ([10.0, 20.0, 21.0, 22.0, 23.0], 6, 24.2),
        ([float(n) for n in range(10, 0, -1)], 32, None),
        ([float(n) for n in range(11, 0, -1)], 32, 16.5),
        ([0.0], 2, 0.25),  # short rounds leave offers a quarter of a second to travel
        ([0.1], 2, 0.35),
        ([2.0, 2.1], 3, 2.35),
        ([1.0, 2.0], 3, 1.5),
    ],
)
def test_call_time_follows_complete_members(complete: list[float], members: int, expected: float | None) -> None:
    after = planning.call_after(complete, members)
    assert (after is None) == (expected is None)
    assert after == (None if expected is None else pytest.approx(expected))


@given(seconds=st.lists(st.floats(0, 1e4), min_size=1, max_size=32), data=st.data())
def test_more_completions_never_postpone_the_call(seconds: list[float], data: st.DataObject) -> None:
    in_time = sorted(seconds)
    before = float("inf")
    for known in range(len(seconds) + 1):
        after = planning.call_after(data.draw(st.permutations(in_time[:known])), len(seconds))
        assert after == planning.call_after(in_time[:known], len(seconds))
        assert after is not None or 3 * known < len(seconds)
        before, latest = before if after is None else after, before
        assert before <= latest
    assert before == 0.0


def test_bandwidth_claim_follows_observed_results() -> None:
    """Budgets follow claims: halved after a data phase that did not end in time, and slowly more again."""
    claim = 8e6
    for in_time, due in ((False, 4e6), (False, 2e6), (True, 2.1e6), *((True, None),) * 27, (True, 8e6)):
        claim = next_claim(claim, 8e6, in_time)
        assert due is None or claim == due
    for _ in range(100):
        claim = next_claim(claim, 8e6, False)
    assert claim == MIN_BANDWIDTH
