"""To whom a coordinator gives the parts of a lost reducer. Each new version of a plan goes to the whole roster."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from protocols.base import Member
from protocols.butterfly.coordinator import RoundCoordinator

PEERS, UPLINKS = ("p0", "p1", "p2"), (1.0, 3.0, 2.0)
REDUCERS = (1, 1, 2)
FINISHED, NOW = 10.0, 100.0


def coordinator(me: str, live: Collection[str], failed: dict[int, str] | None = None) -> tuple[RoundCoordinator, Any]:
    """Part 2 is here; parts 0 and 1, of p1, have been overdue for long."""
    exchange = SimpleNamespace(parts={2: None}, failed=failed or {}, finished=FINISHED, complete=False)
    vote = SimpleNamespace(phase_seconds=1.0, patience_seconds=1.0)
    call = SimpleNamespace(cut_at=0.0)
    attempt: Any = SimpleNamespace(
        call=call, vote=vote, me=Member(me), exchange=exchange, live_peers=lambda: {*live}, deadline=1e9
    )
    return RoundCoordinator(attempt), exchange


def plan(reducers: tuple[int, ...] = REDUCERS) -> Any:
    return SimpleNamespace(
        peers=PEERS,
        uplinks=UPLINKS,
        reducer=lambda part: PEERS[reducers[part]],
        plan=SimpleNamespace(reducers=reducers, budget_seconds=60.0),
    )


@pytest.mark.parametrize(
    ("me", "live", "expected"),
    [
        ("p0", PEERS, {0: 0, 1: 0}),  # itself
        ("rests", PEERS, {0: 2, 1: 2}),  # the fastest of the plan, but for p1 itself
        ("rests", ("p0", "p2"), {0: 2, 1: 2}),  # p1 is gone
        ("rests", ("p1",), {}),
        ("rests", (), {}),
    ],
)
def test_overdue_parts_go_to_another_member_that_is_there(me: str, live: tuple[str, ...], expected: Any) -> None:
    leading, exchange = coordinator(me, live)
    assert leading._repairs(plan(), exchange, NOW) == expected


def test_overdue_part_is_given_away_once() -> None:
    """By a coordinator that is not in the plan: its new reducer needs time, too."""
    leading, exchange = coordinator("rests", PEERS)
    leading._given |= {*leading._repairs(plan(), exchange, NOW)}
    moved = plan((2, 2, 2))
    assert not leading._repairs(moved, exchange, NOW)
    exchange.failed[0] = "p2"
    assert leading._repairs(moved, exchange, NOW) == {0: 1}, "that one fails, too"
