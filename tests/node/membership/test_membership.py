"""Membership on virtual time: which peers are live for a peer, and when that changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.membership.failure_detector import (
    CEILING_SECONDS,
    GRACE_SECONDS,
    PULSE_SECONDS,
    FailureDetector,
)
from node.membership.handshake import LocalStage
from node.membership.hello import (
    HELLO,
    STAYS,
    UNPLACED,
    VERSION,
    Heartbeat,
    Hello,
    HelloRejected,
    PeerAddress,
    StageTeam,
    Welcome,
)
from node.membership.peer_record import MAX_FAILURES
from node.membership.seats import Seats
from node.outer.activity import Activity
from node.outer.sketch import sketch
from protocols import wire
from protocols.base import Member
from tests.sim.host import SimSigner
from tests.support.membership_swarm import RUN, MembershipSwarm, greeting
from tests.support.simulated import on_virtual_time
from tests.support.waiting import until

SKETCH = sketch(torch.ones(8), bytes(32))


@on_virtual_time
async def test_peers_knowing_one_contact_meet_all(swarm: MembershipSwarm) -> None:
    await swarm.meet("abcd")
    contact = swarm.contacts("c")["b"]
    assert contact.hello and contact.hello.nickname == "nick-b"
    assert contact.addresses == ("/ip4/10.0.0.1/tcp/2",)
    assert contact.said.round == 0 or contact.said.round == 7


@on_virtual_time
async def test_handshake_may_outlast_a_tick(swarm: MembershipSwarm) -> None:
    swarm.network.latency_seconds = 0.5
    await asyncio.sleep(60)
    await swarm.meet("abc", 10.0)


@on_virtual_time
async def test_killed_peer_is_gone_and_rejoins_after_restart(swarm: MembershipSwarm) -> None:
    await swarm.meet("abc")
    version = swarm.members["a"].version
    swarm.network.kill("c")
    assert await until(lambda: swarm.sees("a") == ["a", "b"], 3.0) < 1.0
    assert await swarm.members["a"].changed(version, asyncio.get_running_loop().time()) > version
    swarm.start("c")
    await until(lambda: Member("c", 1) in swarm.members["a"].live(), 12.0)
    assert Member("c", 0) not in swarm.members["a"].live()


@on_virtual_time
async def test_dead_peers_are_retried_without_holding_tasks(swarm: MembershipSwarm) -> None:
    await swarm.meet("abc")
    tasks = swarm.network.nodes["a"].process.tasks
    before = len(tasks)
    swarm.network.kill("c")
    contact = swarm.contacts("a")["c"]
    await until(lambda: contact.failures > MAX_FAILURES, 200.0)
    await until(lambda: contact.task is None, 1.0)
    assert len(tasks) < before
    swarm.start("c")
    assert await until(lambda: "c" in swarm.sees("a"), 5.0) < 2.0


@on_virtual_time
async def test_silent_peer_is_suspected_within_six_seconds(swarm: MembershipSwarm) -> None:
    await swarm.meet("abc")
    await asyncio.sleep(20.0)
    assert await swarm.members["a"].answers("c", 0.1)
    for other in "ab":
        swarm.network.block("c", other)
    assert not await swarm.members["a"].answers("c", 0.5) and "c" in swarm.sees("a")
    assert 1.0 <= await until(lambda: swarm.sees("a") == ["a", "b"], 30.0) <= 6.0
    await until(lambda: swarm.sees("c") == ["c"], 6.0)  # its heartbeats are not answered: contact is two-way
    for other in "ab":
        swarm.network.heal("c", other)
    assert await until(lambda: all(len(swarm.sees(name)) == 3 for name in "abc"), 30.0) <= 12.0


@on_virtual_time
async def test_heartbeats_of_a_larger_run_are_fewer_and_show_a_silent_peer_all_the_same(swarm: MembershipSwarm) -> None:
    names = [f"p{number:02}" for number in range(25)]
    await swarm.meet(names, 20.0)
    await asyncio.sleep(10.0)
    handshake, version = swarm.members["p01"]._handshake, swarm.members["p01"].version
    before = handshake._number
    await asyncio.sleep(20.0)
    assert 11.0 <= (handshake._number - before) / 20.0 <= 13.0, "24 others: one heartbeat in two seconds for each"
    assert swarm.members["p01"].version == version
    for other in names[:-1]:
        swarm.network.block("p24", other)
    assert 1.0 <= await until(lambda: swarm.sees("p01") == names[:-1], 30.0) <= 6.0


@on_virtual_time
async def test_reset_streams_do_not_mark_peer_dead(swarm: MembershipSwarm) -> None:
    await swarm.meet("ab")
    version = swarm.members["a"].version
    swarm.network.reset_streams("b")
    await asyncio.sleep(10.0)
    assert swarm.members["a"].version == version


@on_virtual_time
async def test_invalid_greetings_are_rejected_and_counted(swarm: MembershipSwarm) -> None:
    members = swarm.start("a")
    stranger = swarm.network.join("x")

    async def say(hello: Hello) -> str:
        async with stranger.open("a", HELLO, asyncio.get_running_loop().time() + 5.0) as stream:
            await stream.send(hello)
            return wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), HelloRejected).why

    assert "is in another run (ffff" in await say(greeting("x", run=b"\xff" * 32))
    assert "update the older" in await say(greeting("x", version=VERSION + 1))
    assert "in the name of a" in await say(greeting("a", 9))
    assert "without a signature" in await say(replace(greeting("x"), nickname="not what it signed"))
    assert sum(members.refused.values()) == 4
    assert swarm.sees("a") == ["a"]


@on_virtual_time
async def test_peer_that_is_away_counts_as_absent(swarm: MembershipSwarm) -> None:
    """At once, and until it says otherwise. One that rests is there, and neither counts as dead."""
    await swarm.meet("ab")
    a, b = swarm.members["a"], swarm.members["b"]
    b.compare(SKETCH)
    await until(lambda: set(a.compare(SKETCH)) == {"b"}, 3.0)
    for activity, here in (
        (Activity.AWAY, False),
        (Activity.REST, True),
        (Activity.AWAY, False),
        (Activity.WORK, True),
    ):
        version = a.version
        b.announce_activity(activity)
        await asyncio.sleep(0.2)
        assert ("b" in swarm.sees("a"), "b" in a.rounds()) == (here, here) and a.version > version
        assert a.rests("b") is (activity is not Activity.WORK)
        assert [contact.live for contact in a.contacts()] == [True] and a.peers() == ["b"]
        assert not a.compare(SKETCH), "an old sketch would raise everybody's spread"


def seated(name: str, stage: int, founder: str, number: int = 0) -> LocalStage:
    """The first member of a stage, by a seat that the founder has signed."""
    manifest: Any = SimpleNamespace(stages=(None,) * 3, run_id=RUN.hex(), founder=Member(founder))
    seat = replace(Seats(manifest, SimSigner(founder, 0)).make(stage, Member(name)), number=number)
    seat = replace(seat, signature=SimSigner(founder, 0).sign(Seats(manifest, SimSigner(name, 0))._signed(seat)))
    seats = Seats(manifest, SimSigner(name, 0))
    seats.add([seat])
    return LocalStage((seat,), seats)


@on_virtual_time
async def test_stages_rounds_and_rates_reach_the_others(swarm: MembershipSwarm) -> None:
    """Rounds at once, since stage 0 is the clock of all others; rates with a heartbeat."""
    stages = {name: seated(name, stage, "a") for stage, name in ((0, "a"), (2, "b"), (1, "c"))}
    swarm.stages = stages
    await swarm.meet("abc")
    a, b, c = (swarm.members[name] for name in "abc")
    assert [c.stage_of(name) for name in "abc"] == [0, 2, 1] and c.stage_of("nobody") is None
    assert a.peers() == b.peers() == [], "a state is fetched from peers of the own stage only"
    hello = swarm.contacts("c")["b"].hello
    assert hello and hello.seats[0].member == Member("b")
    await asyncio.sleep(0.5)
    a.announce_rounds(7)
    a.announce_rounds(5)
    b.announce_rate(12.5)
    b.announce_team(StageTeam(20, 50.0))
    b.announce_placement(moving=1, arrived=6)
    await until(lambda: b.rounds_of("a") == c.rounds_of("a") == 7, 0.2)
    await until(lambda: swarm.contacts("a")["b"].said.rate == 12.5, 2.0)
    assert a.rounds_of("a") == 7 and b.rounds_of("nobody") == 0
    await until(lambda: swarm.contacts("a")["b"].team == StageTeam(20, 50.0), 4.0)
    assert swarm.contacts("a")["c"].team is None
    said, since = swarm.contacts("a")["b"], swarm.contacts("a")["b"].moving_since
    assert (said.moving, said.placement.arrived) == (1, 6)
    await asyncio.sleep(2.0)
    assert said.moving_since == since > 0.0, "the time of the first heartbeat that said so"
    b.announce_placement(moving=STAYS)
    await until(lambda: said.moving is None, 0.2)


@pytest.mark.parametrize("lie", [{"moving": 3}, {"holds": 1 << 3}])
@on_virtual_time
async def test_stage_that_the_run_does_not_have_is_refused_in_heartbeats(swarm: MembershipSwarm, lie: Any) -> None:
    swarm.stages = {name: seated(name, stage, "a") for stage, name in ((0, "a"), (2, "b"), (1, "c"))}
    await swarm.meet("abc")
    swarm.stages["b"].placement = replace(UNPLACED, **lie)
    await until(lambda: swarm.sees("a") == swarm.sees("c") == ["a", "c"], 3.0)
    assert any("none of the run's 3" in why for why in swarm.members["a"].refused) and not swarm.network.bugs


@on_virtual_time
async def test_peer_whose_seat_another_has_is_dropped_and_told(swarm: MembershipSwarm) -> None:
    """It was live, before any round. The other shows a later seat of the stage; the two cannot reach each other."""
    swarm.round = 0
    swarm.stages = {name: seated(name, stage, "a") for stage, name in ((0, "a"), (2, "b"))}
    await swarm.meet("ab")
    swarm.network.join("c")
    swarm.network.kill("c")
    swarm.cut("b", "c")
    swarm.stages["c"] = seated("c", 2, "a", number=1)
    swarm.start("c")
    await until(lambda: swarm.sees("a") == ["a", "c"], 12.0)
    b = swarm.stages["b"]
    await until(lambda: not b.seats.counts(b.seat), 12.0)
    assert b.seats.known[2].member == Member("c") and not swarm.network.bugs


@on_virtual_time
async def test_peer_that_cannot_be_dialled_is_not_live(swarm: MembershipSwarm) -> None:
    swarm.start("a")
    mute = swarm.network.join("x")  # serves nothing
    async with mute.open("a", HELLO, asyncio.get_running_loop().time() + 60.0) as stream:
        await stream.send(greeting("x"))
        assert isinstance(await stream.receive(wire.MAX_HEADER_BYTES), Welcome)
        for number in range(5):
            await stream.send(Heartbeat(number, 0.0, 0, False, b"", 0, 0.0, 0))
            assert wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), Heartbeat).number == number
            await asyncio.sleep(1.0)
        assert swarm.sees("a") == ["a"]


@on_virtual_time
async def test_duplicate_identity_is_reported_but_restart_is_not(swarm: MembershipSwarm) -> None:
    await swarm.meet("abc")
    swarm.network.kill("c")
    swarm.start("c")
    await until(lambda: Member("c", 1) in swarm.members["a"].live(), 12.0)
    assert swarm.duplicates == []
    swarm.network.kill("c")
    swarm.start("c", incarnation=1)  # a copy of its directory, started elsewhere
    await until(lambda: bool(swarm.duplicates), 12.0)
    assert swarm.duplicates[0][0] == "c" and "identity" in swarm.duplicates[0][1]


@on_virtual_time
async def test_resumed_peer_does_not_suspect_others(swarm: MembershipSwarm) -> None:
    await swarm.meet("ab")
    contact = swarm.members["a"].contacts()[0]
    contact.detector = FailureDetector(asyncio.get_running_loop().time() - 30.0)  # as after a sleep
    contact.detector.slept(asyncio.get_running_loop().time())
    await asyncio.sleep(1.0)
    assert swarm.sees("a") == ["a", "b"]


@on_virtual_time
async def test_peer_that_left_is_told_from_one_that_was_lost(
    swarm: MembershipSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "node.membership.membership")
    await swarm.meet("ab")
    swarm.members["b"].goodbye()
    (b,) = swarm.members["a"].contacts()
    assert await until(lambda: b.said.leaving, 5.0) < 0.2 and not b.left
    swarm.network.kill("b")
    await until(lambda: b.left, 12.0)
    swarm.start("b")
    await until(lambda: b.live, 12.0)
    assert not b.left
    swarm.network.kill("b")
    await until(lambda: not b.live, 12.0)
    assert not b.left
    told = [record.message.partition(":")[0] for record in caplog.records if record.message.startswith("b ")]
    assert told == ["b is here", "b has left", "b is here", "b is lost"]


@on_virtual_time
async def test_sketches_travel_with_heartbeats_and_invalid_are_dropped(swarm: MembershipSwarm) -> None:
    await swarm.meet("abc")
    sketch = tuple(float(number) for number in range(64))
    assert swarm.members["a"].compare(sketch) == {}
    swarm.members["c"]._handshake.sketch = b"\xff" * 256  # not numbers
    await asyncio.sleep(2.0)
    assert swarm.members["b"].compare(sketch) == {"a": sketch}
    swarm.network.kill("a")
    await asyncio.sleep(10.0)
    assert swarm.members["b"].compare(sketch) == {}


def test_failure_detector_patience_stays_within_bounds() -> None:
    quick, slow = FailureDetector(0.0), FailureDetector(0.0)
    for number in range(1, 60):
        quick.hear(float(number))
        slow.hear(float(number) * 4 + (number % 2) * 3)
    least = PULSE_SECONDS + GRACE_SECONDS
    assert quick.patience_seconds == least
    assert least < slow.patience_seconds <= CEILING_SECONDS
    assert quick.due() == 59.0 + least


@on_virtual_time
async def test_repeated_restarts_leak_nothing(swarm: MembershipSwarm) -> None:
    await swarm.meet("abc")
    for _ in range(10):
        swarm.network.kill("c")
        await asyncio.sleep(0.3)
        swarm.start("c")
        await asyncio.sleep(0.7)
    await until(swarm.settled, 30.0)
    assert Member("c", 10) in swarm.members["a"].live() and swarm.duplicates == []
    assert len(swarm.network.nodes["a"].process.tasks) < 30


@on_virtual_time
async def test_introductions_begin_with_where_a_peer_was_seen(swarm: MembershipSwarm) -> None:
    """Behind a router that forwards all, a peer does not know its public address."""
    swarm.seen["c"] = "/ip4/8.8.8.8/tcp/4001"
    await swarm.meet("abc")
    (introduced,) = swarm.members["a"]._known("b")
    assert introduced == PeerAddress("c", ("/ip4/8.8.8.8/tcp/4001", *swarm.addresses["c"]))
