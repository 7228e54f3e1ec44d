"""Announcements of peers' rounds and cells: which are rejected or stale, and what follows from the others."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from protocols.base import BadPayload, Member
from protocols.moshpit.peer_tracker import (
    DONE,
    MAX_GONE,
    TRAINING,
    UNHEARD_SECONDS,
    WAITING,
    PeerTracker,
    PositionAnnouncement,
    check,
)
from protocols.wire import Offer

ME = Member("p0")
OFFER = Offer(Member("p1"), 5, 1.0, 0.0, True, False, 1e6, bytes(32), b"s")
HERE = PositionAnnouncement(
    run=bytes(32), scope="run", round=3, sender=Member("p1"), number=1, since=2, shape=(4, 3), index=(3, 2), holds=2,
    axis=0, stage=TRAINING, complete=False, leaving=False, step_seconds=0.5, follows="", offer=(),
)  # fmt: skip


def announcement(peer: str, number: int = 1, **changes: Any) -> PositionAnnouncement:
    return replace(HERE, sender=Member(peer), number=number, **changes)


def tracker(*announcements: PositionAnnouncement, at: float = 10.0, live: int = 0) -> PeerTracker:
    """A tracker that has these announcements, and sees this many other peers besides."""
    found = PeerTracker(ME)
    members = [ME, *(each.sender for each in announcements), *(Member(f"q{number}") for number in range(live))]
    found.set_sight(members, (), at)
    for each in announcements:
        assert found.take(each, at)
    return found


@pytest.mark.parametrize(
    "changes",
    (
        {"sender": Member("p2")},
        {"shape": (), "index": ()},
        {"shape": (4, 1), "index": (3, 0)},
        {"shape": (32,) * 8, "index": (0,) * 8},
        {"index": (4, 2)},
        {"index": (3,)},
        {"axis": 2},
        {"holds": 0},
        {"holds": 3},
        {"stage": WAITING},
        {"stage": DONE, "offer": (OFFER,)},
        {"stage": WAITING, "offer": (replace(OFFER, member=Member("p2")),)},
    ),
)
def test_invalid_announcement_is_rejected(changes: dict[str, Any]) -> None:
    with pytest.raises(BadPayload):
        check(replace(HERE, **changes), "p1")


def test_key_depends_on_every_component() -> None:
    """Run, scope, round, shape, axis and group; but not the coordinate along the axis, nor the sender."""
    keys = {HERE.key(0).lineage, HERE.key(1).lineage}
    for changes in ({"run": bytes([1] * 32)}, {"scope": "run/x"}, {"round": 4}, {"shape": (5, 3)}, {"index": (3, 1)}):
        keys.add(replace(HERE, **changes).key(0).lineage)
    assert len(keys) == 7
    assert replace(HERE, index=(1, 2), sender=ME, since=9, number=7, stage=DONE).key(0) == HERE.key(0)


def test_stale_announcement_changes_nothing() -> None:
    found = tracker(announcement("p1", 5, round=4))
    assert not found.take(announcement("p1", 5, round=9), 11.0)
    assert not found.take(announcement("p1", 4, round=9), 11.0)
    assert found.announcement_of("p1") == announcement("p1", 5, round=4)
    later = replace(announcement("p1", 1, round=0), sender=Member("p1", 1))
    assert found.take(later, 12.0), "a later incarnation counts anew"
    assert found.announcement_of("p1") is None, "it does not count before the peer is in sight"
    found.set_sight([ME, Member("p1", 1)], (), 13.0)
    assert found.announcement_of("p1") == later


def test_peer_out_of_view_is_forgotten() -> None:
    found = tracker(announcement("p1"), announcement("p2"))
    found.set_sight([ME, Member("p2")], (), 20.0)
    assert [each.sender.peer for each in found.announcements()] == ["p2"]
    found.set_sight([ME], ("p2",), 21.0)
    assert [each.sender.peer for each in found.announcements()] == ["p2"], "a peer found in the directory is in sight"


def test_brief_absence_keeps_announcements() -> None:
    """Peers do not repeat them to the same incarnation."""
    found = tracker(announcement("p1"), announcement("p2"))
    found.set_sight([ME], (), 20.0)
    assert not found.announcements()
    found.set_sight([ME, Member("p1"), Member("p2", 1)], (), 20.5)
    assert [each.sender.peer for each in found.announcements()] == ["p1"], "the other peer has another incarnation"


def test_brief_absence_keeps_the_exclusion_record() -> None:
    found, member = tracker(announcement("p1")), Member("p1")
    for round in range(3):
        found.withheld(member, round)
    found.set_sight([ME], (), 20.0)
    found.set_sight([ME, member], (), 21.0)
    mine = replace(HERE, sender=ME)
    assert not found.line(mine, 0) and "p1" in tracker(announcement("p1")).line(mine, 0)


def test_announcements_of_departed_peers_are_bounded() -> None:
    found = tracker(*(announcement(f"p{number}") for number in range(1, MAX_GONE + 10)))
    found.set_sight([ME], (), 20.0)
    assert len(found._latest) == len(found._reliability) == MAX_GONE


def test_present_peers_are_recent_or_newly_joined() -> None:
    """Peers of this round or the one before, and new ones without an announcement, but not long-silent ones."""
    found = tracker(
        announcement("p1", round=3),
        announcement("p2", round=2),
        announcement("p3", round=1),
        announcement("p4", round=9),
        live=1,
    )
    assert found.present(3, 10.0) == ["p0", "p1", "p2", "p4", "q0"]
    assert found.present(3, 10.0 + UNHEARD_SECONDS) == ["p0", "p1", "p2", "p4"]


def test_one_liar_does_not_advance_the_round() -> None:
    liar = announcement("p9", round=1 << 40)
    assert tracker().ahead(3) == 3
    assert tracker(announcement("p1", round=5)).ahead(3) == 5
    assert tracker(*(announcement(f"p{n}", round=3) for n in range(1, 5)), liar).ahead(3) == 3
    assert tracker(*(announcement(f"p{n}", round=6) for n in range(1, 5)), liar).ahead(3) == 6
    assert tracker(announcement("p1", round=3), announcement("p2", round=3), liar).ahead(3) == 3
    assert tracker(announcement("p1", round=3), liar).ahead(3) == 3, "of two others, one is no majority"
    assert tracker(announcement("p1", round=1), announcement("p2", round=2)).ahead(3) == 3, "the round does not go back"


def test_first_speaker_does_not_vouch_for_silent_peers() -> None:
    """At the start of a run, or after all peers were out of sight for a moment."""
    liar = announcement("p9", round=1 << 40)
    assert tracker(liar, live=1).ahead(3) == tracker(liar, live=4).ahead(3) == 3
    assert tracker(announcement("p1", round=5), announcement("p2", round=5), live=3).ahead(3) == 5
    assert tracker(announcement("p1", round=5), liar, live=3).ahead(3) == 5, "both have reached it"
    assert not tracker(live=2).leads(3), "silent peers are not waited for"


@pytest.mark.parametrize("others", range(8))
def test_lagging_peers_follow_or_leading_peers_wait(others: int) -> None:
    """However many peers are ahead, either those behind follow them, or they wait for those behind."""
    for ahead in range(1, others + 1):  # of the others; this peer is behind in the one and ahead in the other
        behind = tracker(*(announcement(f"p{n}", round=9 if n <= ahead else 3) for n in range(1, others + 1)))
        before = tracker(*(announcement(f"p{n}", round=9 if n < ahead else 3) for n in range(1, others + 1)))
        assert (behind.ahead(3) == 9) != before.leads(9)
    assert not tracker(*(announcement(f"p{n}", round=3) for n in range(1, others + 1))).leads(3)


def test_leading_peer_trains_until_others_catch_up() -> None:
    mine = replace(HERE, sender=ME, round=9, complete=True)
    behind = [announcement(f"p{n}", complete=True) for n in (1, 2)]
    assert tracker(*behind).due(mine, 10.0, 0.0, True, 10.0) is None
    assert tracker(announcement("p1", round=9, complete=True), behind[1]).due(mine, 10.0, 0.0, True, 10.0) == 0.0
    assert tracker(*behind).due(replace(mine, leaving=True), 10.0, 0.0, True, 10.0) == 0.0


def test_training_stops_when_enough_peers_are_ready() -> None:
    """As when a coordinator calls a round: all are ready, or two thirds are and a little more time has passed."""
    mine = replace(HERE, sender=ME)
    others = [announcement(f"p{n}", complete=True) for n in (1, 2)]
    assert tracker(*others).due(mine, 10.0, began=0.0, worked=True, now=10.0) == 0.0
    slow = [*others, announcement("p3"), announcement("p4")]
    assert tracker(*slow).due(mine, math.inf, 0.0, True, 10.0) == pytest.approx(15.0)
    assert tracker(*slow).due(mine, 10.0, 0.0, True, 10.0) == pytest.approx(15.0)
    assert tracker(*slow[:-1]).due(mine, 10.0, 0.0, True, 10.0) == pytest.approx(11.0)
    assert tracker(announcement("p1"), announcement("p2"), announcement("p3")).due(mine, 10.0, 0.0, True, 10.0) is None
    waiting = announcement("p1", stage=WAITING, offer=(OFFER,))
    assert tracker(waiting).due(mine, 10.0, 0.0, True, 10.0) == 0.0, "a peer that was cut is done, too"


def test_leaver_is_not_kept_waiting() -> None:
    mine, leaver = replace(HERE, sender=ME), announcement("p1", leaving=True)
    assert tracker(leaver, announcement("p2")).due(mine, math.inf, 7.0, worked=True, now=10.0) == 7.0
    assert tracker(leaver, announcement("p2")).due(mine, math.inf, 7.0, worked=False, now=10.0) == 9.0
    assert tracker(announcement("p2")).due(replace(mine, leaving=True), math.inf, 7.0, True, 10.0) == 7.0


def test_leaver_ends_only_one_round() -> None:
    """A round that a leaver ends has one step. A peer that announces in every round that it leaves ends only one."""
    found = tracker(announcement("p1", leaving=True), announcement("p2"))
    mine = replace(HERE, sender=ME)
    assert [found.due(mine, math.inf, 7.0, True, 10.0) for _ in range(2)] == [7.0, 7.0]
    found.take(announcement("p1", 2, round=4, leaving=True), 20.0)
    found.take(announcement("p2", 2, round=4), 20.0)
    assert found.due(replace(mine, round=4), math.inf, 20.0, True, 21.0) is None
    found.set_sight([ME, Member("p1", 1), Member("p2")], (), 22.0)
    found.take(replace(announcement("p1", round=4, leaving=True), sender=Member("p1", 1)), 22.0)
    assert found.due(replace(mine, round=4), math.inf, 20.0, True, 23.0) == 20.0, "in another incarnation it may again"
    ahead = tracker(announcement("p1", round=9, leaving=True), announcement("p2"))
    assert ahead.due(mine, math.inf, 7.0, True, 10.0) is None, "it does not hurry peers in other rounds"
    assert ahead.due(replace(mine, round=9), math.inf, 7.0, True, 10.0) == 7.0


def test_only_peers_of_the_same_group_are_candidates() -> None:
    """Peers of the same round and grid whose cell is in the group, and that are not past it."""
    mine = replace(HERE, sender=ME, index=(0, 2))
    on = [announcement("p1", index=(1, 2)), announcement("p2", index=(2, 2), stage=WAITING, offer=(OFFER,))]
    off = [
        announcement("p3", index=(1, 1)),
        announcement("p4", index=(1, 2), stage=DONE),
        announcement("p5", index=(1, 2), axis=1),
        announcement("p6", index=(1, 2), round=4),
        announcement("p7", index=(1, 2), shape=(5, 3)),
    ]
    assert set(tracker(*on, *off).line(mine, 0)) == {"p1", "p2"}
    assert set(
        tracker(*on, announcement("p8", index=(0, 1), holds=1), announcement("p9", index=(0, 0))).line(mine, 1)
    ) == {"p9"}


def test_withholding_peer_is_excluded_with_backoff() -> None:
    """For one round, then two, then four; less after each part that it gives; not in another incarnation."""
    mine, other = replace(HERE, sender=ME, index=(0, 2)), announcement("p1", index=(1, 2))
    found = tracker(other)

    def excluded_rounds(after: int) -> int:
        rounds = 0
        while "p1" not in found.line(replace(mine, round=after + 1 + rounds), 0):
            rounds += 1
            found.take(replace(other, number=100 * after + rounds, round=after + 1 + rounds), 10.0)
        return rounds

    for after, times in ((3, 1), (10, 2), (20, 4)):
        found.take(replace(other, number=100 * after, round=after + 1), 10.0)
        found.withheld(Member("p1"), after)
        assert excluded_rounds(after) == times
    found.delivered(Member("p1"))
    found.take(replace(other, number=4000, round=41), 10.0)
    found.withheld(Member("p1"), 40)
    assert excluded_rounds(40) == 4
    found.set_sight([ME, Member("p1", 1)], (), 50.0)
    found.take(replace(other, sender=Member("p1", 1), number=1, round=41), 50.0)
    assert "p1" in found.line(replace(mine, round=41), 0)


def test_patience_follows_observed_times() -> None:
    """One and a half times the slowest peer's time, bounded by the training time; less for peers that did not come."""
    slow = announcement("p1", step_seconds=8.0)
    found = tracker(slow)
    assert found.patience_seconds([], 2.0, 10.0) == 3.0
    assert found.patience_seconds([slow], 2.0, 10.0) == 12.0
    assert found.patience_seconds([replace(slow, step_seconds=1e6)], 2.0, 10.0) == 15.0
    found.missed(["p1"])
    assert found.patience_seconds([slow], 2.0, 10.0) == 6.0
    found.came("p1", 4.0)
    assert found.patience_seconds([replace(slow, axis=1)], 2.0, 10.0) == 6.0
