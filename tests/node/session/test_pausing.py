"""The pause of a peer, by its user or by the machine's wish: when it begins and ends, and what it becomes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from node.machine.rules import WORK, Mode, Wish
from node.outer.activity import Activity
from node.session.pausing import FILE, OVERRIDE_SECONDS, REST_ROUNDS, REST_SECONDS, PauseController
from tests.sim.host import SimClock
from tests.support.simulated import on_virtual_time

BATTERY, MEMORY = Wish(Mode.AWAY, "on battery"), Wish(Mode.AWAY, "short of memory", is_firm=True)
INPUT = Wish(Mode.REST, "you are using the computer")


class Paused:
    """A controller and what it had an outer loop do."""

    def __init__(self, directory: Path, alone: bool = False) -> None:
        self.asked: list[Activity] = []
        self.said: list[str] = []
        self.clock = SimClock()
        self.controller = PauseController(directory, self.clock, self.said.append)
        self.controller.attach(self.asked.append, lambda: alone)
        self.task = asyncio.create_task(self.controller.run())

    def activity(self) -> Activity:
        return self.asked[-1]

    def after(self, seconds: float) -> float:
        return self.clock.wall() + seconds


@on_virtual_time
async def test_short_pause_rests_and_ends_by_itself(tmp_path: Path) -> None:
    peer = Paused(tmp_path)
    peer.controller.pause("on battery", peer.after(300.0))
    assert peer.controller.reason.startswith("on battery since ") and " until " in peer.controller.reason
    await asyncio.sleep(299.0)
    assert peer.asked == [Activity.WORK, Activity.REST]
    await asyncio.sleep(3.0)
    assert peer.activity() is Activity.WORK and not peer.controller.reason
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("long", ["no end", "an hour", "asked for"])
@on_virtual_time
async def test_long_pause_is_an_absence(tmp_path: Path, long: str) -> None:
    peer = Paused(tmp_path)
    until = {"no end": None, "an hour": peer.after(3600.0), "asked for": peer.after(60.0)}[long]
    peer.controller.pause(until=until, away=True if long == "asked for" else None)
    assert peer.asked == [Activity.WORK, Activity.AWAY]


@on_virtual_time
async def test_rest_becomes_an_absence(tmp_path: Path) -> None:
    """After some rounds, or after some time, as with a cause of which nobody knows how long it lasts."""
    peer = Paused(tmp_path)
    peer.controller.pause(until=peer.after(REST_SECONDS - 1.0))
    for _ in range(REST_ROUNDS):
        assert peer.activity() is Activity.REST
        peer.controller.round_ended()
    assert peer.activity() is Activity.AWAY
    peer.controller.pause("in use", away=False)
    await asyncio.sleep(REST_SECONDS - 1.0)
    assert peer.activity() is Activity.REST
    await asyncio.sleep(3.0)
    assert peer.activity() is Activity.AWAY


@on_virtual_time
async def test_pause_after_round_waits_for_its_end(tmp_path: Path) -> None:
    peer = Paused(tmp_path)
    peer.controller.pause(after_round=True)
    assert peer.asked == [Activity.WORK] and not peer.controller.reason
    peer.controller.round_ended()
    assert peer.activity() is Activity.AWAY and peer.controller.reason
    peer.controller.resume()
    assert peer.activity() is Activity.WORK


@on_virtual_time
async def test_restarted_peer_pauses_until_the_same_time(tmp_path: Path) -> None:
    first = Paused(tmp_path)
    first.controller.pause("on battery", first.after(7200.0))
    first.task.cancel()
    again = Paused(tmp_path, alone=True)
    assert again.asked == [Activity.AWAY] and "the run waits for you" in again.controller.reason
    assert len(again.said) == 1 and "paused: on battery" in again.said[0]
    again.task.cancel()
    await asyncio.sleep(7201.0)
    late = Paused(tmp_path)
    assert late.asked == [Activity.WORK] and not late.said


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"[" * 4000,
        json.dumps({"cause": 1, "since": 0, "until": None, "away": True}).encode(),
    ],
    ids=["empty", "cut", "list", "null", "deep", "number"],
)
@on_virtual_time
async def test_damaged_pause_file_is_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert Paused(tmp_path).asked == [Activity.WORK]


@on_virtual_time
async def test_pause_into_the_past_is_refused(tmp_path: Path) -> None:
    peer = Paused(tmp_path)
    for until in (peer.after(-1.0), float("nan"), 1e300):
        with pytest.raises(ValueError, match="in the future"):
            peer.controller.pause(until=until)
    assert peer.asked == [Activity.WORK]


# -- the machine's wishes ---------------------------------------------------------------------------------------------


@on_virtual_time
async def test_wish_pauses_until_it_ends(tmp_path: Path) -> None:
    peer = Paused(tmp_path)
    peer.controller.wish(BATTERY)
    assert peer.activity() is Activity.AWAY and peer.controller.reason.startswith("on battery since")
    peer.controller.wish(WORK)
    assert peer.activity() is Activity.WORK and peer.controller.reason == ""
    peer.controller.wish(INPUT)
    assert peer.activity() is Activity.REST
    for _ in range(REST_ROUNDS):
        peer.controller.round_ended()
    assert peer.activity() is Activity.AWAY


@on_virtual_time
async def test_resume_overrides_for_an_hour_but_not_firm_wishes(tmp_path: Path) -> None:
    peer = Paused(tmp_path)
    peer.controller.wish(BATTERY)
    assert "although: on battery" in peer.controller.resume() and peer.activity() is Activity.WORK
    peer.controller.wish(MEMORY)
    assert peer.activity() is Activity.AWAY
    assert "stays paused" in peer.controller.resume() and peer.activity() is Activity.AWAY
    peer.controller.wish(BATTERY)
    assert peer.activity() is Activity.WORK, "the hour is not over"
    await asyncio.sleep(OVERRIDE_SECONDS + 1)
    peer.controller.wish(WORK)
    peer.controller.wish(BATTERY)
    assert peer.activity() is Activity.AWAY


@on_virtual_time
async def test_users_pause_outlasts_wishes_and_restarts(tmp_path: Path) -> None:
    peer = Paused(tmp_path)
    peer.controller.wish(INPUT)
    peer.controller.pause(until=peer.after(7200.0))
    peer.controller.wish(WORK)
    assert peer.activity() is Activity.AWAY and "until" in peer.controller.reason
    restarted = Paused(tmp_path)
    assert restarted.asked[-1] is Activity.AWAY
    restarted.controller.wish(BATTERY)
    assert "until" in restarted.controller.reason, "the user's pause is the one that is shown"
    restarted.controller.wish(WORK)
    restarted.controller.resume()
    assert Paused(tmp_path).asked[-1] is Activity.WORK
