"""The clock of all stages: neither joiners nor peers that are stuck stop it, and one liar does not drive it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from protocols.base import Member
from protocols.pipeline.stages import STUCK_SECONDS, StageClock, StageMembers


def test_clock_follows_the_median_of_those_that_move() -> None:
    said = {"a": 0, "b": 0, "c": 0}
    directory: Any = SimpleNamespace(rounds_of=said.__getitem__)
    clock = StageClock(directory)

    def at(now: float, **rounds: int) -> int:
        said.update(rounds)
        return clock.rounds([Member(peer) for peer in said], now)

    assert at(0.0) == 0
    assert at(1.0, a=3) == 3, "b and c have announced nothing yet: they may be joiners that download their state"
    assert at(2.0, b=4) == 3 and at(3.0, a=4) == 4
    assert at(4.0, c=1) == 4, "it never goes back"
    assert at(5.0, a=6, b=5) == 5 and at(6.0, b=6) == 6
    assert at(7.0, c=1_000_000) == 6, "a liar of three"
    assert at(9.0 + STUCK_SECONDS) == 6, "also in rounds that are longer than this: a and b are the majority"
    assert at(400.0, a=8, b=8, c=7) == 8 and at(401.0, a=9) == 8
    del said["c"]
    assert at(402.0) == 8 and at(403.0 + STUCK_SECONDS) == 9, "b has not moved for long"
    assert clock.rounds([], 1e6) == 9


def test_stage_members_follow_changes_and_cost_nothing_between_them() -> None:
    """In a run of hundreds each message asks for them."""
    asked: list[str] = []
    here = {"a": 0, "b": 1, "me": 1}

    def stage_of(peer: str) -> int:
        asked.append(peer)
        return here[peer]

    members: Any = SimpleNamespace(version=0, live=lambda: tuple(map(Member, here)))
    mine = StageMembers(members, cast("Any", SimpleNamespace(stage_of=stage_of)), 1, Member("me"))
    assert mine.live() == mine.live() == (Member("b"), Member("me")) and len(asked) == 2
    here["c"], members.version = 1, 1
    assert mine.live() == (Member("b"), Member("me"), Member("c"))
