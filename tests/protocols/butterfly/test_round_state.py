"""What a member knows of a round: every transition, without a loop or a clock."""

from __future__ import annotations

import pytest

from protocols.base import Member, RoundKey
from protocols.butterfly.round_state import RoundState
from protocols.consensus.messages import Promise

PROMISE = Promise(RoundKey(bytes(32), "run", bytes(32), 7), Member("a"), 3, 0, b"", bytes(32), ())


def test_ballot_won_is_led_until_its_record_is_chosen() -> None:
    state = RoundState(None)
    state.ballot_won(3, (PROMISE,))
    assert (state.leading, state.promises) == (3, (PROMISE,))
    state.record_chosen()
    assert state.leading is None and state.promises == (PROMISE,)


def test_later_promise_ends_the_lead() -> None:
    state = RoundState(0)
    state.ballot_promised(0, 0.0)
    assert state.leading == 0
    state.ballot_promised(1, 0.0)
    assert state.leading is None
    state.ballot_promised(1, 0.0)
    assert state.leading is None


@pytest.mark.parametrize("now, silent", [(12.0, ["a"]), (13.1, ["a", "b"]), (100.0, ["a", "b", "c"])])
def test_silence_since_promise_was_asked_counts(now: float, silent: list[str]) -> None:
    """A member that answered then may be quiet for as long as it trains; T_b is five seconds."""
    state = RoundState(None)
    state.peer_heard("b", 8.0)
    state.peer_heard("c", 9.9)
    state.ballot_promised(2, 10.0)
    state.ballot_promised(2, 11.0)  # noted after every event
    state.peer_heard("d", 10.1)
    assert state.silent("abcd", now, 5.0) == silent


def test_new_attempt_gives_up_a_published_ballot_only() -> None:
    state = RoundState(0)
    assert not state.attempt_restarted() and state.leading == 0
    state.plan_published(0)
    assert state.attempt_restarted() and state.leading is None
    assert not state.attempt_restarted(), "it is given up once"
    state.ballot_won(2, ())
    assert not state.attempt_restarted() and state.leading == 2, "no plan was published in this ballot"


def test_missing_parts_are_handed_out_once_and_wanted_again_after_a_failure() -> None:
    state = RoundState(None)
    state.parts_missing(b"record", (b"a", b"b"))
    assert state.fetch_begun() == (b"a", b"b")
    assert (state.wanted, state.proposed) == ((), b"record")
    state.fetch_failed((b"b",))
    assert (state.wanted, state.proposed) == ((b"b",), b"record")
    state.parts_missing(b"other", ())
    assert (state.wanted, state.proposed) == ((), b"other")


def test_leavers_add_up_and_the_last_sign_of_life_counts() -> None:
    state = RoundState(None)
    state.members_leave({"a"})
    state.members_leave(frozenset({"b"}))
    state.members_leave(())
    assert state.leaving == {"a", "b"}
    state.peer_heard("a", 1.0)
    state.peer_heard("a", 2.5)
    assert state.heard == {"a": 2.5}


def test_onlooker_is_news_once_in_each_life() -> None:
    state = RoundState(None)
    assert state.onlooker_asked(Member("a", 1))
    assert not state.onlooker_asked(Member("a", 1))
    assert state.onlooker_asked(Member("a", 2))
    assert state.onlookers == {"a": Member("a", 2)}


def test_time_alone_starts_anew_when_others_were_here() -> None:
    state = RoundState(None)
    assert state.alone_seconds(10.0, alone=True) == 0.0
    assert state.alone_seconds(14.0, alone=True) == 4.0
    assert state.alone_seconds(15.0, alone=False) == 0.0
    assert state.alone_seconds(16.0, alone=True) == 0.0
    assert state.alone_seconds(18.5, alone=True) == 2.5


def test_planned_data_phase_gives_its_length() -> None:
    state = RoundState(None)
    assert state.phase_seconds == 0.0
    state.data_phase_planned(1.5)
    assert state.phase_seconds == 1.5
