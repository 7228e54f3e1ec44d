"""A user's pause and the machine's wishes together: which goes first, what `resume` does, what survives a restart."""

from __future__ import annotations

from pathlib import Path

from node.machine.rules import WORK, Mode, Wish
from node.outer.activity import Activity
from node.session.pausing import OVERRIDE_SECONDS, REST_ROUNDS, PauseController

BATTERY, MEMORY = Wish(Mode.AWAY, "on battery"), Wish(Mode.AWAY, "short of memory", is_firm=True)
INPUT = Wish(Mode.REST, "you are using the computer")


class Controlled:
    """A controller, its clock and what it had the outer loop do."""

    def __init__(self, directory: Path, wall: float = 1e9) -> None:
        self.now, self.done = wall, [Activity.WORK]
        self.pauses = PauseController(directory, self, lambda line: None)
        self.pauses.attach(self.done.append, lambda: False)

    def wall(self) -> float:
        return self.now

    @property
    def activity(self) -> Activity:
        return self.done[-1]


def test_wish_pauses_until_it_ends(tmp_path: Path) -> None:
    peer = Controlled(tmp_path)
    peer.pauses.wish(BATTERY)
    assert peer.activity is Activity.AWAY and peer.pauses.reason.startswith("on battery since")
    peer.pauses.wish(WORK)
    assert peer.activity is Activity.WORK and peer.pauses.reason == ""
    peer.pauses.wish(INPUT)
    assert peer.activity is Activity.REST
    for _ in range(REST_ROUNDS):
        peer.pauses.round_ended()
    assert peer.activity is Activity.AWAY


def test_resume_overrides_for_an_hour_but_not_firm_wishes(tmp_path: Path) -> None:
    peer = Controlled(tmp_path)
    peer.pauses.wish(BATTERY)
    assert "although: on battery" in peer.pauses.resume() and peer.activity is Activity.WORK
    peer.pauses.wish(MEMORY)
    assert peer.activity is Activity.AWAY
    assert "stays paused" in peer.pauses.resume() and peer.activity is Activity.AWAY
    peer.pauses.wish(BATTERY)
    assert peer.activity is Activity.WORK  # the hour is not over
    peer.now += OVERRIDE_SECONDS + 1
    peer.pauses.wish(WORK)
    peer.pauses.wish(BATTERY)
    assert peer.activity is Activity.AWAY


def test_users_pause_outlasts_wishes_and_restarts(tmp_path: Path) -> None:
    peer = Controlled(tmp_path)
    peer.pauses.wish(INPUT)
    peer.pauses.pause(until=peer.now + 7200)
    peer.pauses.wish(WORK)
    assert peer.activity is Activity.AWAY and "until" in peer.pauses.reason
    restarted = Controlled(tmp_path, peer.now + 60)
    assert restarted.activity is Activity.AWAY
    restarted.pauses.wish(BATTERY)
    assert "until" in restarted.pauses.reason  # the user's pause is the one that is shown
    restarted.pauses.wish(WORK)
    restarted.pauses.resume()
    assert Controlled(tmp_path, peer.now + 61).activity is Activity.WORK
