"""What a member knows of a round: every transition, without a loop or a clock."""

from __future__ import annotations

from protocols.base import Member
from protocols.butterfly.round_state import RoundState


def test_later_promise_ends_the_lead() -> None:
    state = RoundState(0)
    state.ballot_promised(0, 0.0)
    assert state.leading == 0
    state.ballot_promised(1, 0.0)
    assert state.leading is None
    state.ballot_promised(1, 0.0)
    assert state.leading is None


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
