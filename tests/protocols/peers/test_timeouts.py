"""The time limits of exchanges follow from the times of earlier ones; each request counts once."""

from __future__ import annotations

import pytest

from protocols.base import DISTRUST_SECONDS, BadPayload, Member
from protocols.peers.timeouts import (
    CHEAP_SECONDS,
    MAX_PEERS,
    REQUEST_WINDOW,
    REST_MULTIPLE,
    PeerTimeouts,
    RequestDeduplicator,
)

SIZE = 1_000_000


def test_timeout_follows_observed_times() -> None:
    timeouts = PeerTimeouts(1e6)
    for _ in range(40):
        timeouts.answered("far", 4.0)
        timeouts.took("far", SIZE, 0.0, 0.1)
    assert 8.0 < timeouts.expected_seconds("far", SIZE) < 8.2, "four round trips of two seconds"
    assert timeouts.answer_seconds("far") > 17.0
    for _ in range(40):
        timeouts.answered("far", 0.02)
    assert timeouts.answer_seconds("far") < 2.2 < timeouts.answer_seconds("near") + 0.3


def test_slow_answers_do_not_extend_timeout_forever() -> None:
    timeouts = PeerTimeouts(1e6)
    for _ in range(20):
        timeouts.answered("p", 0.99 * timeouts.answer_seconds("p"))
    assert timeouts.answer_seconds("p") < 60.0


def test_timeout_doubles_over_a_slow_link() -> None:
    timeouts, needed, tries = PeerTimeouts(1e6), 300.0, 0
    while timeouts.timeout_seconds("slow", SIZE) < needed:
        timeouts.late("slow", 0.0, 1.0)
        tries += 1
    assert tries == 7, "twice the time at each try"
    assert timeouts.timeout_seconds("other", SIZE) < 30.0, "one slow peer says little about others"
    for number in range(20):
        timeouts.late(f"p{number}", 0.0, 1.0)
    assert timeouts.timeout_seconds("other", SIZE) > 100.0, "but if all are slow, the slow line is ours"


def test_link_estimate_stays_within_bounds() -> None:
    """Without bounds, one very fast exchange, or a hundred failed ones, would leave no time, or all of it."""
    timeouts = PeerTimeouts(1e6)
    timeouts.took("p", SIZE, 0.0, 1e-6)
    assert timeouts.expected_seconds("p", SIZE) == timeouts.expected_seconds("other", SIZE) == 1.0 / 1.5
    for _ in range(100):
        timeouts.late("p", 0.0, 1.0)
        timeouts.took("q", SIZE, 0.0, 1e9)
    assert timeouts.expected_seconds("p", SIZE) == timeouts.expected_seconds("q", SIZE) == 1000.0
    assert timeouts.expected_seconds("other", SIZE) == 1000.0


def test_late_peer_rests_in_proportion_to_cost() -> None:
    timeouts = PeerTimeouts(1e6)
    timeouts.late("p", now=100.0, cost_seconds=5.0)
    rest = 5.0 * REST_MULTIPLE
    assert timeouts.resting("p", 100.0 + rest - 0.1) and not timeouts.resting("p", 100.0 + rest)
    assert not timeouts.resting("q", 100.0)
    timeouts.took("p", SIZE, 0.0, 1.0)
    assert not timeouts.resting("p", 101.0)
    timeouts.distrust("q", 100.0)
    timeouts.took("q", SIZE, 0.0, 1.0)
    assert timeouts.resting("q", 100.0 + DISTRUST_SECONDS - 0.1) and not timeouts.resting("q", 100.0 + DISTRUST_SECONDS)


def test_slow_peer_is_met_rarely() -> None:
    """It completes every exchange, so it is never late, and each time it may take twice as long."""
    timeouts = PeerTimeouts(1e6)
    quick = 2.0 + 2 * timeouts.expected_seconds("p", SIZE)
    timeouts.took("p", SIZE, 100.0, quick - 0.1)
    assert not timeouts.resting("p", 100.0)
    timeouts = PeerTimeouts(1e6)
    timeouts.took("p", SIZE, 100.0, quick + 0.1)
    assert timeouts.resting("p", 100.0 + REST_MULTIPLE * quick) and not timeouts.resting("q", 100.0)


def test_aborted_exchange_rests_without_slower_estimate() -> None:
    timeouts = PeerTimeouts(1e6)
    before = timeouts.expected_seconds("p", SIZE)
    timeouts.failed("p", 100.0, 100.0 + CHEAP_SECONDS / 2, 110.0, slow=True)
    assert not timeouts.resting("p", 101.0)
    timeouts.failed("p", 100.0, 109.0, 110.0, slow=True)
    assert timeouts.resting("p", 109.0 + REST_MULTIPLE * 9 - 0.1) and timeouts.expected_seconds("p", SIZE) == before
    timeouts.failed("p", 200.0, 210.0, 210.0, slow=True)
    assert timeouts.expected_seconds("p", SIZE) > before


def test_remembered_peers_are_bounded() -> None:
    timeouts, questions = PeerTimeouts(1e6), RequestDeduplicator()
    timeouts.late("first", 0.0, 1000.0)
    for number in range(MAX_PEERS):
        timeouts.expected_seconds(f"p{number}", SIZE)
        questions.hear(Member(f"p{number}"), 0, 0)
    assert not timeouts.resting("first", 1.0)
    assert len(timeouts._peers) == len(questions._by_member) == MAX_PEERS


def test_each_request_is_accepted_once_and_not_stale() -> None:
    questions, member = RequestDeduplicator(), Member("p")
    for number in (5, 3, 4, 70):
        questions.hear(member, number, number // 10)
    for number, why in ((5, "stale"), (70, "again"), (6, "stale")):
        with pytest.raises(BadPayload, match=why):
            questions.hear(member, number, 7)
    questions.hear(member, 70 - REQUEST_WINDOW + 1, 0)
    with pytest.raises(BadPayload, match="after one of round 7"):
        questions.hear(member, 71, 6)
    questions.hear(Member("p", 1), 0, 0)  # another incarnation counts anew
