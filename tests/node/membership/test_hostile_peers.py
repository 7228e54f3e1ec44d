"""Membership on virtual time against peers that break its rules."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from node.membership.handshake import IDLE_SECONDS
from node.membership.hello import HELLO, MAX_INTRODUCED, Heartbeat, Hello, HelloRejected, PeerAddress
from node.membership.peer_record import MAX_CONTACTS, MAX_FAILURES, MAX_INTRODUCED_BY_ONE, MAX_UNMET
from protocols import wire
from protocols.base import Deadline, Member, PeerError, PeerGone, PeerId
from tests.support.membership_swarm import HostilePeer, MembershipSwarm, greeting
from tests.support.simulated import on_virtual_time
from tests.support.waiting import until


def wrong(heartbeat: Heartbeat) -> list[Heartbeat]:
    return [replace(heartbeat, number=heartbeat.number + 1)]


@pytest.mark.parametrize(
    "echo", [wrong, lambda heartbeat: [], lambda heartbeat: [HelloRejected("no")]], ids=["wrong", "none", "rejection"]
)
@on_virtual_time
async def test_peer_failing_after_greeting_is_dialled_less_often(swarm: MembershipSwarm, echo: Any) -> None:
    await swarm.meet("abc")
    hostile = HostilePeer(swarm)
    hostile.echo = echo
    swarm.members["a"].add_candidate("x")
    calls = asyncio.create_task(hostile.greet("a", 55.0, heartbeats_per_second=1.0))
    await asyncio.sleep(60.0)
    assert swarm.sees("a") == ["a", "b", "c"]
    early, late = [at for at in hostile.dials if at < 15.0], [at for at in hostile.dials if at >= 45.0]
    assert 1 <= len(early) <= 12 and len(late) <= 3, hostile.dials
    assert swarm.settled()
    await calls


@on_virtual_time
async def test_violator_is_removed_until_its_next_incarnation(swarm: MembershipSwarm) -> None:
    await swarm.meet("abc")
    hostile = HostilePeer(swarm)
    swarm.members["a"].add_candidate("x")
    await until(lambda: "x" in swarm.sees("a"), 5.0)
    await asyncio.sleep(10.0)
    hostile.echo = wrong
    await until(lambda: "x" not in swarm.sees("a"), 2.0)
    version = swarm.members["a"].version
    await asyncio.sleep(20.0)
    assert swarm.members["a"].version == version, "it does not come and go"
    assert any("not sent" in why for why in swarm.members["a"].refused)
    hostile.echo = lambda heartbeat: [heartbeat]
    hostile.incarnation, hostile.nonce = 1, 78
    asyncio.get_running_loop().create_task(hostile.greet("a", 30.0, 1.0))
    await until(lambda: Member("x", 1) in swarm.members["a"].live(), 5.0)


@on_virtual_time
async def test_heartbeat_flood_is_throttled(swarm: MembershipSwarm) -> None:
    await swarm.meet("abc")
    hostile = HostilePeer(swarm)
    swarm.network.link("x", "a").latency_seconds = swarm.network.link("a", "x").latency_seconds = 1e-4
    version = swarm.members["b"].version
    answered = await hostile.greet("a", 30.0, heartbeats_per_second=1e5)
    assert answered <= 30.0 * 21
    assert swarm.members["b"].version == version or "x" in swarm.sees("b")
    assert swarm.settled()


@on_virtual_time
async def test_peer_without_heartbeats_is_disconnected(swarm: MembershipSwarm) -> None:
    await swarm.meet("abc")
    mute = swarm.network.join("x")
    with pytest.raises(PeerError):
        async with mute.open("a", HELLO, asyncio.get_running_loop().time() + 500.0) as stream:
            await stream.send(greeting("x"))
            await stream.receive(wire.MAX_HEADER_BYTES)
            await stream.receive(wire.MAX_HEADER_BYTES)
    assert IDLE_SECONDS <= asyncio.get_running_loop().time() <= IDLE_SECONDS + 5.0
    assert swarm.settled() and swarm.sees("a") == ["a", "b", "c"]


OLDER = greeting("a", incarnation=0, nonce=76)
PROVEN = greeting("a", incarnation=9)


@pytest.mark.parametrize(
    "other",
    [
        PROVEN,
        OLDER,
        greeting("a", incarnation=9, run=bytes(32)),
        greeting("b", incarnation=9),
        replace(PROVEN, signature=bytes(32)),
        replace(OLDER, member=Member("a", 9)),
    ],
    ids=["proven", "older", "another run", "another peer", "wrong signature", "changed member"],
)
@on_virtual_time
async def test_duplicate_is_believed_only_with_own_signature(swarm: MembershipSwarm, other: Hello) -> None:
    liar = HostilePeer(swarm)
    liar.refusal = HelloRejected("another incarnation of it is known here", (other,))
    swarm.start("a", incarnation=1)
    swarm.members["a"].add_candidate("x")
    await asyncio.sleep(60.0)
    if other is PROVEN:
        assert swarm.duplicates[0][0] == "a" and "identity" in swarm.duplicates[0][1]
    else:
        assert swarm.duplicates == [] and swarm.sees("a") == ["a"]
        assert any("cannot prove" in why for why in swarm.members["a"].refused)


@on_virtual_time
async def test_one_contact_cannot_trigger_unbounded_dials(swarm: MembershipSwarm) -> None:
    await swarm.meet("abc")
    dialled: list[PeerId] = []
    members = swarm.members["a"]

    async def reach(peer: PeerId, addresses: Sequence[str], deadline: Deadline) -> None:
        dialled.extend([peer] * len(addresses))
        await asyncio.sleep(0.05)
        if peer.startswith("ghost"):
            raise PeerGone(peer, "unreachable")

    members._reach = reach
    hostile, count = HostilePeer(swarm), itertools.count()

    def introduce() -> tuple[PeerAddress, ...]:
        addresses = tuple(f"/ip4/10.1.1.{each}/tcp/1" for each in range(16))
        return tuple(PeerAddress(f"ghost{next(count)}", addresses) for _ in range(MAX_INTRODUCED))

    for _ in range(300):
        hostile.known = introduce()
        members.add_candidate("x")
        await asyncio.sleep(1.0)
        swarm.network.reset_streams("x")
    assert len(dialled) < 300 * 4 * 16 and swarm.settled()
    assert len(members.contacts()) <= 3 + MAX_INTRODUCED_BY_ONE


@on_virtual_time
async def test_full_contact_table_reserves_room_for_roster(swarm: MembershipSwarm) -> None:
    swarm.start("a")
    members = swarm.members["a"]
    for number in range(MAX_CONTACTS):
        contact = members.add_candidate(f"stranger{number}")
        if contact:
            contact.live, contact.hello = True, greeting(contact.peer)
    assert len(members.contacts()) == MAX_CONTACTS
    swarm.start("b")
    version = members.version
    members.add_candidate("b")
    assert members.version > version, "a live peer has made way"
    await until(lambda: "b" in swarm.sees("a"), 20.0)


@on_virtual_time
async def test_invalid_introductions_are_not_passed_on(swarm: MembershipSwarm) -> None:
    await swarm.meet("abc")
    hostile = HostilePeer(swarm)
    hostile.known = (
        PeerAddress("ghost", ("no address", "/ip4/\x1b[2J", "/dns/é", "", "x" * 256)),
        PeerAddress("", ()),
        PeerAddress("é", ()),
        PeerAddress("a", ("/ip4/6.6.6.6/tcp/6",)),
        PeerAddress("b", ("/ip4/6.6.6.6/tcp/6",)),
    )
    swarm.members["a"].add_candidate("x")
    swarm.members["a"].add_candidate("y" * 65, ("/ip4/6.6.6.6/tcp/6",))
    await until(lambda: "x" in swarm.sees("a"), 5.0)
    assert swarm.contacts("a")["ghost"].addresses == ("no address", "")
    known = set(swarm.contacts("a"))
    assert known == {"b", "c", "x", "ghost", ""}
    assert swarm.contacts("a")["b"].addresses[0].startswith("/ip4/10.0.0.1")
    await asyncio.sleep(600.0)
    assert "ghost" not in swarm.contacts("a") and swarm.settled()


@on_virtual_time
async def test_hostile_addresses_do_not_spoil_greetings(swarm: MembershipSwarm) -> None:
    """Newcomers understand greetings with as many, as long and as odd addresses as the checks let through."""
    await swarm.meet("abc")
    for number in range(40):
        hostile = HostilePeer(swarm, f"x{number}")
        hostile.addresses = tuple(f"{each:02}" + "\U0001f600" * 254 for each in range(8))
        hostile.addresses += tuple(f"{each:02}" + "y" * 254 for each in range(8))
        swarm.members["a"].add_candidate(hostile.name, ("z" * 4000, "\ud800"))
    await until(lambda: len(swarm.sees("a")) == 43, 30.0)
    swarm.start("d")  # it knows only "a"
    await until(lambda: {"a", "b", "c"} <= set(swarm.sees("d")), 20.0)
    assert swarm.settled() and not swarm.members["d"].refused


@on_virtual_time
async def test_hint_flood_is_bounded_and_keeps_live_peers(swarm: MembershipSwarm) -> None:
    await swarm.meet("abc")
    swarm.network.kill("c")
    await until(lambda: "c" not in swarm.sees("a"), 20.0)
    most = 0
    for number in range(5 * MAX_UNMET):
        swarm.members["a"].add_candidate(f"ghost{number}", ("/ip4/10.9.9.9/tcp/1",))
        most = max(most, len(swarm.members["a"].contacts()))
        if number % 100 == 0:
            await asyncio.sleep(0.05)
    assert most == MAX_UNMET + 2
    assert {"b", "c"} <= set(swarm.contacts("a"))
    assert swarm.sees("a") == ["a", "b"]
    swarm.start("c")
    await until(lambda: Member("c", 1) in swarm.members["a"].live(), 30.0)
    process = swarm.network.nodes["a"].process
    await asyncio.sleep(600.0)
    assert len(swarm.members["a"].contacts()) == 2 and len(process.tasks) < 20


@on_virtual_time
async def test_peer_introducing_many_to_full_table_is_met(swarm: MembershipSwarm) -> None:
    await swarm.meet("abc")
    for number in range(MAX_UNMET):
        swarm.members["a"].add_candidate(f"ghost{number}")
    friend = HostilePeer(swarm)
    friend.known = tuple(PeerAddress(f"more{number}", ()) for number in range(MAX_INTRODUCED))
    swarm.members["a"].add_candidate("x")
    contact = swarm.contacts("a")["x"]
    contact.failures = MAX_FAILURES - 1
    await until(lambda: "x" in swarm.sees("a"), 60.0)
    await asyncio.sleep(60.0)
    assert "x" in swarm.sees("a") and swarm.settled()


@on_virtual_time
async def test_forgotten_peer_that_remembers_is_met_again(swarm: MembershipSwarm) -> None:
    await swarm.meet("abc")
    swarm.start("d")
    await until(lambda: "d" in swarm.sees("a") and "a" in swarm.sees("d"), 10.0)
    contact = swarm.contacts("a")["d"]
    swarm.members["a"]._set_live(contact, False, "as if")
    swarm.members["a"]._wanted = tuple
    swarm.members["a"]._contacts.forget(contact)
    await until(lambda: "d" in swarm.sees("a"), 10.0)
    assert "a" in swarm.sees("d")


@on_virtual_time
async def test_heartbeat_of_former_incarnation_is_rejected(swarm: MembershipSwarm) -> None:
    await swarm.meet("abc")
    hostile = HostilePeer(swarm)
    old = asyncio.create_task(hostile.greet("a", 60.0, heartbeats_per_second=2.0))
    await until(lambda: "x" in swarm.sees("a"), 10.0)
    hostile.incarnation, hostile.nonce = 1, 78
    asyncio.get_running_loop().create_task(hostile.greet("a", 60.0, 1.0))
    await until(lambda: Member("x", 1) in swarm.members["a"].live(), 10.0)
    await asyncio.wait_for(old, 5.0)  # its heartbeat was refused, and the stream closed
    hostile.incarnation, hostile.nonce = 0, 77
    version = swarm.members["a"].version
    assert await hostile.greet("a", 5.0, 2.0) == 0
    assert Member("x", 1) in swarm.members["a"].live() and swarm.members["a"].version <= version + 2
