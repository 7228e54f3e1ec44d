"""A peer detects and reports that its machine slept, changed its address or shows a wrong time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from node.membership.host_monitor import SuspendDetector, TimeJump, skew
from protocols.base import Deadline, PeerId
from tests.support.membership_swarm import MembershipSwarm
from tests.support.simulated import on_virtual_time
from tests.support.waiting import until


def gap(now: float, wall: float) -> TimeJump | None:
    """After a tick at 100 s whose wall clock showed 1,000 s; the next was due a quarter of a second later."""
    ticks = SuspendDetector()
    assert ticks.tick(100.0, 1000.0, 0.25) is None
    found = ticks.tick(now, wall, 0.25)
    assert ticks.tick(now + 0.25, wall + 0.25, 0.25) is None, "it is reported once"
    return found


@pytest.mark.parametrize("late", [0.0, 0.5, 1.9])
def test_nearly_punctual_tick_is_no_gap(late: float) -> None:
    assert gap(100.25 + late, 1000.25 + late) is None
    assert gap(100.25 + late, 1000.25 + late + 4.0) is None, "a clock that is set right by little"


@pytest.mark.parametrize(
    "now, wall, seconds, words",
    [
        (103.25, 1003.25, 3.0, ""),
        (120.25, 1020.25, 20.0, "was stopped for 20 s"),
        (100.25, 4600.25, 3600.0, "slept for 60 min"),
        (100.25, 400.25, 600.0, "set back by 10 min"),
    ],
)
def test_stop_sleep_and_set_clock_are_told_apart(now: float, wall: float, seconds: float, words: str) -> None:
    found = gap(now, wall)
    assert found is not None and words in found.line and bool(words) == bool(found.line)
    assert found.seconds == seconds


@pytest.mark.parametrize(
    "offsets, says",
    [
        ([], ""),
        ([3.0, -4.0, 2.0], ""),
        ([0.0, 0.1, 900.0], ""),  # the other's clock is wrong
        ([90.0, 91.0, 89.5], "is 90 s behind that of 3 of 3 other peers; set it"),
        ([-600.0, -601.0, 0.0], "is 10 min ahead of that of 2 of 3 other peers; set it"),
        ([30.0], "30 s behind the only other peer's, and one of the two is wrong"),
        ([60.0, -500.0, 800.0], "60 s behind the other peers', which do not agree either"),
        ([7200.0, 7200.0], "2.0 h behind that of 2 of 2 other peers, too far to be made up for"),
    ],
)
def test_skewed_clock_is_attributed_where_possible(offsets: list[float], says: str) -> None:
    line = skew(offsets, 600.0)
    assert says in line and bool(says) == bool(line)


async def versions_when_quiet(swarm: MembershipSwarm, names: str) -> dict[str, int]:
    """Let these peers meet; the version of each one's membership once nothing changes any more."""
    await swarm.meet(names)
    await asyncio.sleep(3.0)
    swarm.reached.clear()
    return {name: swarm.members[name].version for name in names}


@pytest.mark.parametrize("jump_seconds", [30.0, 3600.0, -3600.0])
@on_virtual_time
async def test_wakeup_regreets_all_without_suspicion(swarm: MembershipSwarm, jump_seconds: float) -> None:
    versions = await versions_when_quiet(swarm, "abc")
    greeted = {each.peer: each.handshake_at for each in swarm.members["b"].contacts()}
    swarm.clocks["b"].skew_seconds += jump_seconds
    await asyncio.sleep(2.0)
    assert {name: swarm.members[name].version for name in "abc"} == versions
    assert all((each.handshake_at or 0) > (greeted[each.peer] or 0) for each in swarm.members["b"].contacts())
    assert swarm.members["b"].offset_seconds() == pytest.approx(max(-600, min(600, -jump_seconds)), abs=0.1)
    [(peer, line)] = swarm.said
    assert peer == "b" and ("slept" if jump_seconds > 0 else "set back") in line
    assert swarm.members["b"].host_monitor.announce_again.is_set() and not swarm.dropped, "the old connections are good"


@pytest.mark.parametrize("is_mended", [True, False])
@on_virtual_time
async def test_connection_dead_after_sleep_is_dropped_and_redialled(swarm: MembershipSwarm, is_mended: bool) -> None:
    versions = await versions_when_quiet(swarm, "ab")
    transport = swarm.members["b"]._transport
    opened = transport.open

    def dead(peer: PeerId, method: str, deadline: Deadline) -> Any:
        if swarm.dropped and is_mended:
            return opened(peer, method, deadline)
        return opened("absent", method, deadline)

    swarm.network.block("b", "absent")
    transport.open = dead  # type: ignore[method-assign]
    swarm.clocks["b"].skew_seconds += 100.0
    if is_mended:
        await asyncio.sleep(6.0)
        assert swarm.members["b"].version == versions["b"] and swarm.sees("b") == ["a", "b"]
    else:
        await until(lambda: swarm.sees("b") == ["b"], 10.0)
    assert swarm.dropped == ["a"] and swarm.reached[0] == ("a", swarm.addresses["a"])


@on_virtual_time
async def test_new_address_spreads_and_replaces_the_old(swarm: MembershipSwarm) -> None:
    versions = await versions_when_quiet(swarm, "abc")
    swarm.members["a"].add_candidate("b", ("/ip4/10.0.0.1/tcp/2", "/dns/b.example/tcp/1"))
    swarm.addresses["b"] = ()  # p2pd is down for a moment
    await asyncio.sleep(3.0)
    assert not swarm.said
    swarm.addresses["b"] = ("/ip4/192.0.2.7/tcp/2",)

    def known(name: str) -> tuple[str, ...]:
        return next(each.addresses for each in swarm.members[name].contacts() if each.peer == "b")

    await until(lambda: known("a") == ("/ip4/192.0.2.7/tcp/2", "/dns/b.example/tcp/1"), 3.0)
    await until(lambda: known("c") == ("/ip4/192.0.2.7/tcp/2",), 3.0)
    assert {name: swarm.members[name].version for name in "abc"} == versions
    assert swarm.members["b"].host_monitor.announce_again.is_set() and "192.0.2.7" in swarm.said[0][1]


@on_virtual_time
async def test_peer_that_none_can_dial_says_so_once(swarm: MembershipSwarm) -> None:
    await versions_when_quiet(swarm, "ab")
    private = swarm.addresses["b"]
    behind = (*private, "/ip4/8.8.8.8/tcp/1/p2p/12D3KooWRelay/p2p-circuit")

    def known() -> tuple[str, ...]:
        return next(each.addresses for each in swarm.members["a"].contacts())

    for addresses in (behind, private, behind):  # the relay is away for a while
        swarm.addresses["b"] = addresses
        await asyncio.sleep(5.0)
        assert known() == addresses
    [(peer, line)] = swarm.said
    assert peer == "b" and line.startswith("no peer outside can dial this one") and "through …WRelay" in line
    swarm.addresses["b"] = ("/ip4/10.9.9.9/tcp/1", behind[-1])
    await until(lambda: len(swarm.said) == 2, 5.0)
    assert "addresses have changed" in swarm.said[1][1]


@on_virtual_time
async def test_place_at_a_relay_does_not_close_the_connection_to_it(swarm: MembershipSwarm) -> None:
    """The relay's p2pd runs, its node not yet. Without the connection the place is lost, for an hour."""
    await versions_when_quiet(swarm, "ab")
    private = swarm.addresses["b"]
    swarm.network.block("a", "b")
    await until(lambda: swarm.sees("a") == ["a"] and swarm.sees("b") == ["b"], 60.0)
    await asyncio.sleep(60.0)
    swarm.dropped.clear()
    swarm.addresses["b"] = (*private, "/ip4/8.8.8.8/tcp/1/p2p/12D3KooWRelay/p2p-circuit")
    await asyncio.sleep(30.0)
    assert not swarm.dropped
    swarm.network.heal("a", "b")
    await until(lambda: swarm.sees("a") == swarm.sees("b") == ["a", "b"], 30.0)
    await asyncio.sleep(3.0)
    assert not swarm.dropped and swarm.contacts("a")["b"].addresses == swarm.addresses["b"]


@on_virtual_time
async def test_unresponsive_connection_is_dropped_once_per_outage(swarm: MembershipSwarm) -> None:
    await versions_when_quiet(swarm, "ab")
    swarm.network.block("a", "b")
    await asyncio.sleep(60.0)
    assert swarm.dropped.count("b") == 1, "it is closed once in an outage, not again and again"


@on_virtual_time
async def test_skewed_clock_is_reported_once_where_it_is(swarm: MembershipSwarm) -> None:
    for name in "abcd":
        swarm.start(name, skew_seconds=90.0 if name == "c" else 0.3)
    await asyncio.sleep(60.0)
    [(peer, line)] = swarm.said
    assert peer == "c" and "90 s ahead of that of 3 of 3 other peers" in line
    assert [swarm.members[name].host_monitor.clock == "" for name in "abcd"] == [True, True, False, True]
    swarm.clocks["c"].skew_seconds = 0.0
    await asyncio.sleep(60.0)
    assert [line for peer, line in swarm.said if peer == "c"][-1].endswith("back in sync with the others'")
    assert swarm.members["c"].host_monitor.clock == ""
