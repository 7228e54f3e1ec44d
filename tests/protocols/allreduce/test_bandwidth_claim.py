"""What a member claims as its bandwidth after each data phase."""

from __future__ import annotations

from protocols.allreduce.all_reduce import MIN_BANDWIDTH, next_claim


def test_bandwidth_claim_follows_observed_results() -> None:
    """Budgets follow claims: halved after a data phase that did not end in time, and slowly more again."""
    claim = 8e6
    for in_time, due in ((False, 4e6), (False, 2e6), (True, 2.1e6), *((True, None),) * 27, (True, 8e6)):
        claim = next_claim(claim, 8e6, in_time)
        assert due is None or claim == due
    for _ in range(100):
        claim = next_claim(claim, 8e6, False)
    assert claim == MIN_BANDWIDTH
