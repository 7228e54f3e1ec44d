"""Membership on virtual time: who is believed alive, when that changes, and what cannot be smuggled in."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from node.membership.failure_detector import CEILING_SECONDS, FLOOR_SECONDS, FailureDetector
from node.membership.handshake import IDLE_SECONDS, LocalPeer
from node.membership.hello import (
    HELLO,
    MAX_INTRODUCED,
    VERSION,
    Heartbeat,
    Hello,
    HelloRejected,
    PeerAddress,
    Welcome,
    signed_part,
)
from node.membership.membership import DialPolicy, Membership, MembershipCallbacks
from node.membership.peer_record import MAX_FAILURES, PeerRecord
from node.membership.peer_table import MAX_CONTACTS, MAX_TOLD_OF
from protocols import wire
from protocols.base import Deadline, Header, Member, PeerError, PeerGone, PeerId, Stream, Transport
from tests.sim import loop as simloop
from tests.sim.host import SimClock, SimSigner
from tests.sim.network import SimNetwork, Trace

RUN = bytes(range(32))


def greeting(
    name: PeerId,
    incarnation: int = 0,
    life: int = 77,
    version: int = VERSION,
    run: bytes = RUN,
    addresses: tuple[str, ...] = (),
) -> Hello:
    """Signed by whom it names."""
    hello = Hello(version, run, Member(name, incarnation), life, "mallory", addresses, b"")
    return replace(hello, signature=SimSigner(name, 0).sign(signed_part(hello)))


class Swarm:
    """Peers with nothing but a membership each; each is told of the first one only."""

    def __init__(self) -> None:
        self.network = SimNetwork(Trace(), latency_seconds=0.02)
        self.members: dict[PeerId, Membership] = {}
        self.duplicates: list[tuple[PeerId, str]] = []
        self.addresses: dict[PeerId, tuple[str, ...]] = {}
        self.clocks: dict[PeerId, SimClock] = {}
        self.said: list[tuple[PeerId, str]] = []
        self.dropped: list[PeerId] = []
        self.reached: list[tuple[PeerId, tuple[str, ...]]] = []
        self._lives = 0

    async def reach(self, peer: PeerId, addresses: Sequence[str], deadline: Deadline) -> None:
        self.reached.append((peer, tuple(addresses)))

    async def drop(self, peer: PeerId, deadline: Deadline) -> None:
        self.dropped.append(peer)

    def start(
        self, peer: PeerId, run: bytes = RUN, incarnation: int | None = None, skew_seconds: float = 0.0
    ) -> Membership:
        known = peer in self.network.nodes
        transport = self.network.restart(peer) if known else self.network.join(peer)
        self._lives += 1
        life = self._lives
        me = Member(peer, transport.node.incarnation if incarnation is None else incarnation)
        token = simloop.PROCESS.set(transport.node.process)
        members = self._membership(transport, me, run, life, skew_seconds)
        if self.members and peer != (first := next(iter(self.members))):
            members.hint(first)
        self.members[peer] = members
        asyncio.get_running_loop().create_task(members.run())
        simloop.PROCESS.reset(token)
        return members

    def _membership(self, transport: Transport, me: Member, run: bytes, life: int, skew_seconds: float) -> Membership:
        self.addresses[me.peer] = (f"/ip4/10.0.0.1/tcp/{life}",)
        self.clocks[me.peer] = SimClock(skew_seconds)
        dialing = DialPolicy(lambda: [peer for peer in self.members if peer != me.peer], self.reach, self.drop)
        callbacks = MembershipCallbacks(
            lambda line: self.duplicates.append((me.peer, line)), lambda line: self.said.append((me.peer, line))
        )
        return Membership(
            transport,
            self.clocks[me.peer],
            SimSigner(me.peer, 0),
            LocalPeer(me, run, life, f"nick-{me.peer}", lambda: self.addresses[me.peer], lambda: 7),
            dialing,
            callbacks,
        )

    def sees(self, peer: PeerId) -> list[PeerId]:
        return [member.peer for member in self.members[peer].live()]


def play(body: Callable[[Swarm], Awaitable[None]]) -> None:
    async def main() -> None:
        await body(Swarm())

    simloop.run(main())


async def until(condition: Callable[[], bool], seconds: float) -> float:
    """Wait for it; the virtual seconds that it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return loop.time() - began


def test_peers_knowing_one_contact_meet_all() -> None:
    async def body(swarm: Swarm) -> None:
        names = ["a", "b", "c", "d"]
        for name in names:
            swarm.start(name)
        await until(lambda: all(swarm.sees(name) == names for name in names), 5.0)
        contact = {each.peer: each for each in swarm.members["c"].contacts()}["b"]
        assert contact.hello and contact.hello.nickname == "nick-b"
        assert contact.addresses == ("/ip4/10.0.0.1/tcp/2",)
        assert contact.round == 0 or contact.round == 7

    play(body)


def test_handshake_may_outlast_a_tick() -> None:
    async def body(swarm: Swarm) -> None:
        swarm.network.latency_seconds = 0.5
        await asyncio.sleep(60)
        for name in "abc":
            swarm.start(name)
        await until(lambda: all(swarm.sees(name) == ["a", "b", "c"] for name in "abc"), 10.0)

    play(body)


def test_killed_peer_is_gone_and_rejoins_after_restart() -> None:
    async def body(swarm: Swarm) -> None:
        for name in "abc":
            swarm.start(name)
        await until(lambda: len(swarm.sees("a")) == 3 and len(swarm.sees("b")) == 3, 5.0)
        version = swarm.members["a"].version
        swarm.network.kill("c")
        assert await until(lambda: swarm.sees("a") == ["a", "b"], 3.0) < 1.0
        assert await swarm.members["a"].changed(version, asyncio.get_running_loop().time()) > version
        swarm.start("c")
        await until(lambda: Member("c", 1) in swarm.members["a"].live(), 12.0)
        assert Member("c", 0) not in swarm.members["a"].live()

    play(body)


def test_dead_peers_are_retried_without_holding_tasks() -> None:
    async def body(swarm: Swarm) -> None:
        for name in ("a", "b", "c"):
            swarm.start(name)
        await until(lambda: len(swarm.sees("a")) == 3, 5.0)
        tasks = swarm.network.nodes["a"].process.tasks
        before = len(tasks)
        swarm.network.kill("c")
        contact = {each.peer: each for each in swarm.members["a"].contacts()}["c"]
        await until(lambda: contact.failures > MAX_FAILURES, 200.0)
        await until(lambda: contact.task is None, 1.0)
        assert len(tasks) < before
        swarm.start("c")
        assert await until(lambda: "c" in swarm.sees("a"), 5.0) < 2.0

    play(body)


def test_silent_peer_is_suspected_within_six_seconds() -> None:
    async def body(swarm: Swarm) -> None:
        for name in "abc":
            swarm.start(name)
        await until(lambda: all(len(swarm.sees(name)) == 3 for name in "abc"), 5.0)
        await asyncio.sleep(20.0)
        for other in "ab":
            swarm.network.block("c", other)
        assert 1.0 <= await until(lambda: swarm.sees("a") == ["a", "b"], 30.0) <= 6.0
        await until(lambda: swarm.sees("c") == ["c"], 6.0)  # its pulses are not answered: contact is two-way
        for other in "ab":
            swarm.network.heal("c", other)
        assert await until(lambda: all(len(swarm.sees(name)) == 3 for name in "abc"), 30.0) <= 12.0

    play(body)


def test_reset_streams_do_not_mark_peer_dead() -> None:
    async def body(swarm: Swarm) -> None:
        for name in "ab":
            swarm.start(name)
        await until(lambda: len(swarm.sees("a")) == 2, 5.0)
        version = swarm.members["a"].version
        swarm.network.reset_streams("b")
        await asyncio.sleep(10.0)
        assert swarm.members["a"].version == version  # nobody was taken for dead

    play(body)


def test_invalid_greetings_are_rejected_and_counted() -> None:
    async def body(swarm: Swarm) -> None:
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

    play(body)


def test_peer_that_cannot_be_dialled_is_not_live() -> None:
    async def body(swarm: Swarm) -> None:
        swarm.start("a")
        mute = swarm.network.join("x")  # serves nothing

        async with mute.open("a", HELLO, asyncio.get_running_loop().time() + 60.0) as stream:
            await stream.send(greeting("x"))
            assert isinstance(await stream.receive(wire.MAX_HEADER_BYTES), Welcome)
            for number in range(5):
                await stream.send(Heartbeat(number, 0.0, 0, False, b""))
                assert wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), Heartbeat).number == number
                await asyncio.sleep(1.0)
            assert swarm.sees("a") == ["a"]

    play(body)


def test_duplicate_identity_is_reported_but_restart_is_not() -> None:
    async def body(swarm: Swarm) -> None:
        for name in "abc":
            swarm.start(name)
        await until(lambda: all(len(swarm.sees(name)) == 3 for name in "abc"), 5.0)
        swarm.network.kill("c")
        swarm.start("c")
        await until(lambda: Member("c", 1) in swarm.members["a"].live(), 12.0)
        assert swarm.duplicates == []
        swarm.network.kill("c")
        swarm.start("c", incarnation=1)  # a copy of its directory, started elsewhere
        await until(lambda: bool(swarm.duplicates), 12.0)
        assert swarm.duplicates[0][0] == "c" and "identity" in swarm.duplicates[0][1]

    play(body)


def test_clocks_are_compared() -> None:
    async def body(swarm: Swarm) -> None:
        swarm.start("a", skew_seconds=90.0)
        for name in "bc":
            swarm.start(name)
        await until(lambda: all(len(swarm.sees(name)) == 3 for name in "abc"), 5.0)
        await asyncio.sleep(2.0)
        assert swarm.members["a"].offset_seconds() == pytest.approx(-90.0, abs=0.1)
        assert swarm.members["b"].offset_seconds() == pytest.approx(45.0, abs=45.1)

    play(body)


def test_resumed_peer_does_not_suspect_others() -> None:
    async def body(swarm: Swarm) -> None:
        for name in "ab":
            swarm.start(name)
        await until(lambda: len(swarm.sees("a")) == 2, 5.0)
        contact = swarm.members["a"].contacts()[0]
        contact.suspicion = FailureDetector(asyncio.get_running_loop().time() - 30.0)  # as after a sleep
        contact.suspicion.slept(asyncio.get_running_loop().time())
        await asyncio.sleep(1.0)
        assert swarm.sees("a") == ["a", "b"]

    play(body)


def test_goodbye_takes_effect_at_once() -> None:
    async def body(swarm: Swarm) -> None:
        for name in "ab":
            swarm.start(name)
        await until(lambda: len(swarm.sees("a")) == 2 and len(swarm.sees("b")) == 2, 5.0)
        swarm.members["b"].goodbye()
        assert await until(lambda: swarm.members["a"].contacts()[0].leaving, 5.0) < 0.2

    play(body)


def test_sketches_travel_with_heartbeats_and_invalid_are_dropped() -> None:
    async def body(swarm: Swarm) -> None:
        for name in "abc":
            swarm.start(name)
        await until(lambda: all(len(swarm.sees(name)) == 3 for name in "abc"), 5.0)
        told = tuple(float(number) for number in range(64))
        assert swarm.members["a"].compare(told) == {}
        swarm.members["c"]._handshake.sketch = b"\xff" * 256  # not numbers
        await asyncio.sleep(2.0)
        assert swarm.members["b"].compare(told) == {"a": told}
        swarm.network.kill("a")
        await asyncio.sleep(10.0)
        assert swarm.members["b"].compare(told) == {}

    play(body)


def test_failure_detector_patience_stays_within_bounds() -> None:
    quick, slow = FailureDetector(0.0), FailureDetector(0.0)
    for pulse in range(1, 60):
        quick.hear(float(pulse))
        slow.hear(float(pulse) * 4 + (pulse % 2) * 3)
    assert quick.patience_seconds == FLOOR_SECONDS
    assert FLOOR_SECONDS < slow.patience_seconds <= CEILING_SECONDS
    assert quick.due() == 59.0 + FLOOR_SECONDS


# -- hostile contacts -------------------------------------------------------------------------------------------------


class Hostile:
    """A peer of the run that does as it likes: what it says are its attributes."""

    def __init__(self, swarm: Swarm, name: PeerId = "x") -> None:
        self.transport, self.name = swarm.network.join(name), name
        self.dials: list[float] = []
        self.known: tuple[PeerAddress, ...] = ()
        self.echo: Callable[[Heartbeat], Sequence[Header]] = lambda pulse: [pulse]
        self.refusal: HelloRejected | None = None
        self.addresses: tuple[str, ...] = ()
        self.transport.serve(HELLO, self._serve)

    def hello(self, incarnation: int = 0, life: int = 77) -> Hello:
        return greeting(self.name, incarnation, life, addresses=self.addresses)

    async def _serve(self, peer: PeerId, stream: Stream) -> None:
        self.dials.append(asyncio.get_running_loop().time())
        await stream.receive(wire.MAX_HEADER_BYTES)
        if self.refusal:
            return await stream.send(self.refusal)
        await stream.send(Welcome(self.hello(), self.known))
        while True:
            pulse = wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), Heartbeat)
            answers = self.echo(pulse)
            if not answers:
                return
            for each in answers:
                await stream.send(each)

    async def greet(self, peer: PeerId, seconds: float, pulses_each_second: float = 0.0) -> int:
        """Greet a peer and send pulses; returns how many it answered."""
        loop = asyncio.get_running_loop()
        until, answered = loop.time() + seconds, 0
        with suppress(PeerError):
            async with self.transport.open(peer, HELLO, until) as stream:
                await stream.send(self.hello())
                await stream.receive(wire.MAX_HEADER_BYTES)
                while pulses_each_second and loop.time() < until:
                    await stream.send(Heartbeat(answered, 0.0, 1 << 40, False, b""))
                    await stream.receive(wire.MAX_HEADER_BYTES)
                    answered += 1
                    await asyncio.sleep(1 / pulses_each_second)
                await asyncio.sleep(until - loop.time())
        return answered


def wrong(pulse: Heartbeat) -> list[Heartbeat]:
    return [replace(pulse, number=pulse.number + 1)]


def contact_of(swarm: Swarm, peer: PeerId, other: PeerId) -> PeerRecord | None:
    return next((each for each in swarm.members[peer].contacts() if each.peer == other), None)


async def trio(swarm: Swarm) -> None:
    for name in "abc":
        swarm.start(name)
    await until(lambda: all(len(swarm.sees(name)) == 3 for name in "abc"), 5.0)


def settled(swarm: Swarm) -> bool:
    """The honest see each other, and none of their handlers failed."""
    return not swarm.network.bugs and all({"a", "b", "c"} <= set(swarm.sees(name)) for name in "abc")


@pytest.mark.parametrize("echo", [wrong, lambda pulse: [], lambda pulse: [HelloRejected("no")]])
def test_peer_failing_after_greeting_is_dialled_less_often(echo: Any) -> None:
    """Whether it also calls us, or not."""

    async def body(swarm: Swarm) -> None:
        await trio(swarm)
        hostile = Hostile(swarm)
        hostile.echo = echo
        swarm.members["a"].hint("x")
        calls = asyncio.create_task(hostile.greet("a", 55.0, pulses_each_second=1.0))
        await asyncio.sleep(60.0)
        assert swarm.sees("a") == ["a", "b", "c"]
        early, late = [at for at in hostile.dials if at < 15.0], [at for at in hostile.dials if at >= 45.0]
        assert 1 <= len(early) <= 12 and len(late) <= 3, hostile.dials
        assert settled(swarm)
        await calls

    play(body)


def test_violator_is_removed_until_its_next_incarnation() -> None:
    async def body(swarm: Swarm) -> None:
        await trio(swarm)
        hostile = Hostile(swarm)
        swarm.members["a"].hint("x")
        await until(lambda: "x" in swarm.sees("a"), 5.0)
        await asyncio.sleep(10.0)
        hostile.echo = wrong
        await until(lambda: "x" not in swarm.sees("a"), 2.0)
        version = swarm.members["a"].version
        await asyncio.sleep(20.0)
        assert swarm.members["a"].version == version, "it comes and goes"
        assert any("not sent" in why for why in swarm.members["a"].refused)
        hostile.echo = lambda pulse: [pulse]
        honest = hostile.hello
        hostile.hello = lambda *_: honest(1, 78)  # type: ignore[method-assign]
        asyncio.get_running_loop().create_task(hostile.greet("a", 30.0, 1.0))
        await until(lambda: Member("x", 1) in swarm.members["a"].live(), 5.0)

    play(body)


def test_heartbeat_flood_is_throttled() -> None:
    async def body(swarm: Swarm) -> None:
        await trio(swarm)
        hostile = Hostile(swarm)
        swarm.network.link("x", "a").latency_seconds = swarm.network.link("a", "x").latency_seconds = 1e-4
        version = swarm.members["b"].version
        answered = await hostile.greet("a", 30.0, pulses_each_second=1e5)
        assert answered <= 30.0 * 21
        assert swarm.members["b"].version == version or "x" in swarm.sees("b")
        assert settled(swarm)

    play(body)


def test_peer_without_heartbeats_is_disconnected() -> None:
    async def body(swarm: Swarm) -> None:
        await trio(swarm)
        mute = swarm.network.join("x")
        with pytest.raises(PeerError):
            async with mute.open("a", HELLO, asyncio.get_running_loop().time() + 500.0) as stream:
                await stream.send(greeting("x"))
                await stream.receive(wire.MAX_HEADER_BYTES)
                await stream.receive(wire.MAX_HEADER_BYTES)
        assert IDLE_SECONDS <= asyncio.get_running_loop().time() <= IDLE_SECONDS + 5.0
        assert settled(swarm) and swarm.sees("a") == ["a", "b", "c"]

    play(body)


OLDER = greeting("a", incarnation=0, life=76)
PROVEN = greeting("a", incarnation=9)


@pytest.mark.parametrize(
    "other",
    [
        OLDER,
        greeting("a", incarnation=9, run=bytes(32)),
        greeting("b", incarnation=9),
        replace(PROVEN, signature=bytes(32)),
        replace(OLDER, member=Member("a", 9)),
    ],
)
def test_unproven_duplicate_claim_is_ignored(other: Hello) -> None:
    async def body(swarm: Swarm) -> None:
        liars = [Hostile(swarm, name) for name in "uvwx"]
        for liar in liars:
            liar.refusal = HelloRejected("another life of it is known here", (other,))
        swarm.start("a", incarnation=1)
        for liar in liars:
            swarm.members["a"].hint(liar.name)
        await asyncio.sleep(120.0)
        assert swarm.duplicates == [] and swarm.sees("a") == ["a"]
        assert any("cannot prove" in why for why in swarm.members["a"].refused)

    play(body)


def test_duplicate_claim_with_own_signature_is_believed() -> None:
    async def body(swarm: Swarm) -> None:
        other = Hostile(swarm, "x")
        other.refusal = HelloRejected("another life of it is known here", (PROVEN,))
        swarm.start("a")
        swarm.members["a"].hint("x")
        await until(lambda: bool(swarm.duplicates), 20.0)
        assert swarm.duplicates[0][0] == "a" and "identity" in swarm.duplicates[0][1]

    play(body)


def test_one_contact_cannot_trigger_unbounded_dials() -> None:
    async def body(swarm: Swarm) -> None:
        await trio(swarm)
        dialled: list[PeerId] = []
        members = swarm.members["a"]

        async def reach(peer: PeerId, addresses: Sequence[str], deadline: Deadline) -> None:
            dialled.extend([peer] * len(addresses))
            await asyncio.sleep(0.05)
            if peer.startswith("ghost"):
                raise PeerGone(peer, "nobody there")

        members._dialing = replace(members._dialing, reach=reach)
        hostile, count = Hostile(swarm), itertools.count()

        def introduce() -> tuple[PeerAddress, ...]:
            addresses = tuple(f"/ip4/10.1.1.{each}/tcp/1" for each in range(16))
            return tuple(PeerAddress(f"ghost{next(count)}", addresses) for _ in range(MAX_INTRODUCED))

        for _ in range(300):
            hostile.known = introduce()
            members.hint("x")
            await asyncio.sleep(1.0)
            swarm.network.reset_streams("x")
        assert len(dialled) < 300 * 4 * 16 and settled(swarm)
        assert len(members.contacts()) <= 3 + MAX_TOLD_OF

    play(body)


def test_full_contact_table_reserves_room_for_roster() -> None:
    async def body(swarm: Swarm) -> None:
        swarm.start("a")
        members = swarm.members["a"]
        for number in range(MAX_CONTACTS):
            contact = members.hint(f"stranger{number}")
            if contact:
                contact.live, contact.hello = True, greeting(contact.peer)
        assert sum(each.live for each in members.contacts()) < MAX_CONTACTS
        swarm.start("b")
        await until(lambda: "b" in swarm.sees("a"), 20.0)

    play(body)


def test_invalid_introductions_are_not_passed_on() -> None:
    async def body(swarm: Swarm) -> None:
        await trio(swarm)
        hostile = Hostile(swarm)
        hostile.known = (
            PeerAddress("ghost", ("no address", "/ip4/\x1b[2J", "/dns/é", "", "x" * 256)),
            PeerAddress("", ()),
            PeerAddress("é", ()),
            PeerAddress("a", ("/ip4/6.6.6.6/tcp/6",)),
            PeerAddress("b", ("/ip4/6.6.6.6/tcp/6",)),
        )
        swarm.members["a"].hint("x")
        swarm.members["a"].hint("y" * 65, ("/ip4/6.6.6.6/tcp/6",))
        await until(lambda: "x" in swarm.sees("a"), 5.0)
        ghost = contact_of(swarm, "a", "ghost")
        assert ghost and ghost.addresses == ("no address", "")
        known = {each.peer for each in swarm.members["a"].contacts()}
        assert known == {"b", "c", "x", "ghost", ""}
        b = contact_of(swarm, "a", "b")
        assert b and b.addresses[0].startswith("/ip4/10.0.0.1")
        await asyncio.sleep(600.0)
        assert contact_of(swarm, "a", "ghost") is None and settled(swarm)

    play(body)


def test_hostile_addresses_do_not_spoil_our_greetings() -> None:
    """As many, as long and as odd as a greeting and the directory let through: newcomers must still understand us."""

    async def body(swarm: Swarm) -> None:
        await trio(swarm)
        for number in range(40):
            hostile = Hostile(swarm, f"x{number}")
            hostile.addresses = tuple(f"{each:02}" + "\U0001f600" * 254 for each in range(8))
            hostile.addresses += tuple(f"{each:02}" + "y" * 254 for each in range(8))
            swarm.members["a"].hint(hostile.name, ("z" * 4000, "\ud800"))
        await until(lambda: len(swarm.sees("a")) == 43, 30.0)
        swarm.start("d")  # of all it is told of "a" only
        await until(lambda: {"a", "b", "c"} <= set(swarm.sees("d")), 20.0)
        assert settled(swarm) and not swarm.members["d"].refused

    play(body)


def test_hint_flood_is_bounded_and_keeps_live_peers() -> None:
    async def body(swarm: Swarm) -> None:
        await trio(swarm)
        swarm.network.kill("c")
        await until(lambda: "c" not in swarm.sees("a"), 20.0)
        most = 0
        for number in range(20 * MAX_CONTACTS):
            swarm.members["a"].hint(f"ghost{number}", ("/ip4/10.9.9.9/tcp/1",))
            most = max(most, len(swarm.members["a"].contacts()))
            if number % 100 == 0:
                await asyncio.sleep(0.05)
        assert most == MAX_CONTACTS
        assert {"b", "c"} <= {each.peer for each in swarm.members["a"].contacts()}
        assert swarm.sees("a") == ["a", "b"]
        swarm.start("c")
        await until(lambda: Member("c", 1) in swarm.members["a"].live(), 30.0)
        process = swarm.network.nodes["a"].process
        await asyncio.sleep(600.0)
        assert len(swarm.members["a"].contacts()) == 2 and len(process.tasks) < 20

    play(body)


def test_peer_introducing_many_to_full_table_is_met() -> None:
    async def body(swarm: Swarm) -> None:
        await trio(swarm)
        for number in range(MAX_CONTACTS):
            swarm.members["a"].hint(f"ghost{number}")
        friend = Hostile(swarm)
        friend.known = tuple(PeerAddress(f"more{number}", ()) for number in range(MAX_INTRODUCED))
        swarm.members["a"].hint("x")
        contact = contact_of(swarm, "a", "x")
        assert contact
        contact.failures = MAX_FAILURES - 1
        await until(lambda: "x" in swarm.sees("a"), 60.0)
        await asyncio.sleep(60.0)
        assert "x" in swarm.sees("a") and settled(swarm)

    play(body)


def test_forgotten_peer_that_watches_us_is_met_again() -> None:
    async def body(swarm: Swarm) -> None:
        await trio(swarm)
        swarm.start("d")
        await until(lambda: "d" in swarm.sees("a") and "a" in swarm.sees("d"), 10.0)
        contact = contact_of(swarm, "a", "d")
        assert contact
        swarm.members["a"]._set_live(contact, False, "as if")
        swarm.members["a"]._wanted = tuple
        swarm.members["a"]._contacts.forget(contact)
        await until(lambda: "d" in swarm.sees("a"), 10.0)
        assert "a" in swarm.sees("d")

    play(body)


def test_heartbeat_of_former_incarnation_is_rejected() -> None:
    async def body(swarm: Swarm) -> None:
        await trio(swarm)
        hostile = Hostile(swarm)
        old = asyncio.create_task(hostile.greet("a", 60.0, pulses_each_second=2.0))
        await until(lambda: "x" in swarm.sees("a"), 10.0)
        honest = hostile.hello
        hostile.hello = lambda *_: honest(1, 78)  # type: ignore[method-assign]
        asyncio.get_running_loop().create_task(hostile.greet("a", 60.0, 1.0))
        await until(lambda: Member("x", 1) in swarm.members["a"].live(), 10.0)
        await asyncio.wait_for(old, 5.0)  # its pulse was refused, and the stream closed
        hostile.hello = honest  # type: ignore[method-assign]
        version = swarm.members["a"].version
        assert await hostile.greet("a", 5.0, 2.0) == 0
        assert Member("x", 1) in swarm.members["a"].live() and swarm.members["a"].version <= version + 2

    play(body)


def test_repeated_restarts_leak_nothing() -> None:
    async def body(swarm: Swarm) -> None:
        await trio(swarm)
        for _ in range(10):
            swarm.network.kill("c")
            await asyncio.sleep(0.3)
            swarm.start("c")
            await asyncio.sleep(0.7)
        await until(lambda: settled(swarm), 30.0)
        assert Member("c", 10) in swarm.members["a"].live() and swarm.duplicates == []
        assert len(swarm.network.nodes["a"].process.tasks) < 30

    play(body)


# -- this machine -----------------------------------------------------------------------------------------------------


class Watched(Swarm):
    """Counts the changes of who is here, once all are."""

    async def settled(self, names: str) -> dict[str, int]:
        for name in names:
            self.start(name)
        await until(lambda: all(self.sees(name) == list(names) for name in names), 5.0)
        await asyncio.sleep(3.0)
        self.reached.clear()
        return {name: self.members[name].version for name in names}


def watched(body: Callable[[Watched], Awaitable[None]]) -> None:
    async def main() -> None:
        await body(Watched())

    simloop.run(main())


@pytest.mark.parametrize("jump_seconds", [30.0, 3600.0, -3600.0])
def test_wakeup_regreets_all_without_suspicion(jump_seconds: float) -> None:
    async def body(swarm: Watched) -> None:
        versions = await swarm.settled("abc")
        greeted = {each.peer: each.greeted for each in swarm.members["b"].contacts()}
        swarm.clocks["b"].skew_seconds += jump_seconds
        await asyncio.sleep(2.0)
        assert {name: swarm.members[name].version for name in "abc"} == versions
        assert all((each.greeted or 0) > (greeted[each.peer] or 0) for each in swarm.members["b"].contacts())
        assert swarm.members["b"].offset_seconds() == pytest.approx(max(-600, min(600, -jump_seconds)), abs=0.1)
        [(who, line)] = swarm.said
        assert who == "b" and ("slept" if jump_seconds > 0 else "set back") in line
        assert swarm.members["b"].host_monitor.upset.is_set() and not swarm.dropped, "the old connections are good"

    watched(body)


@pytest.mark.parametrize("is_mended", [True, False])
def test_connection_dead_after_sleep_is_dropped_and_redialled(is_mended: bool) -> None:
    async def body(swarm: Watched) -> None:
        versions = await swarm.settled("ab")
        transport = swarm.members["b"]._transport
        opened = transport.open

        def dead(peer: PeerId, method: str, deadline: Deadline) -> Any:
            if swarm.dropped and is_mended:
                return opened(peer, method, deadline)
            return opened("nobody there", method, deadline)

        swarm.network.block("b", "nobody there")
        transport.open = dead  # type: ignore[method-assign]
        swarm.clocks["b"].skew_seconds += 100.0
        if is_mended:
            await asyncio.sleep(6.0)
            assert swarm.members["b"].version == versions["b"] and swarm.sees("b") == ["a", "b"]
        else:
            await until(lambda: swarm.sees("b") == ["b"], 10.0)
        assert swarm.dropped == ["a"] and swarm.reached[0] == ("a", swarm.addresses["a"])

    watched(body)


def test_new_address_spreads_and_replaces_the_old() -> None:
    async def body(swarm: Watched) -> None:
        versions = await swarm.settled("abc")
        swarm.members["a"].hint("b", ("/ip4/10.0.0.1/tcp/2", "/dns/b.example/tcp/1"))
        swarm.addresses["b"] = ()  # p2pd is down for a moment
        await asyncio.sleep(3.0)
        assert not swarm.said
        swarm.addresses["b"] = ("/ip4/192.0.2.7/tcp/2",)

        def known(name: str) -> tuple[str, ...]:
            return next(each.addresses for each in swarm.members[name].contacts() if each.peer == "b")

        await until(lambda: known("a") == ("/ip4/192.0.2.7/tcp/2", "/dns/b.example/tcp/1"), 3.0)
        await until(lambda: known("c") == ("/ip4/192.0.2.7/tcp/2",), 3.0)
        assert {name: swarm.members[name].version for name in "abc"} == versions
        assert swarm.members["b"].host_monitor.upset.is_set() and "192.0.2.7" in swarm.said[0][1]

    watched(body)


def test_unresponsive_connection_is_dropped_once_per_outage() -> None:
    async def body(swarm: Watched) -> None:
        await swarm.settled("ab")
        swarm.network.block("a", "b")
        await asyncio.sleep(60.0)
        assert swarm.dropped.count("b") == 1, "it is closed once in an outage, not again and again"

    watched(body)


def test_skewed_clock_is_reported_once_where_it_is() -> None:
    async def body(swarm: Watched) -> None:
        for name in "abcd":
            swarm.start(name, skew_seconds=90.0 if name == "c" else 0.3)
        await asyncio.sleep(60.0)
        [(who, line)] = swarm.said
        assert who == "c" and "90 s ahead of that of 3 of 3 other peers" in line
        assert [swarm.members[name].host_monitor.clock == "" for name in "abcd"] == [True, True, False, True]
        swarm.clocks["c"].skew_seconds = 0.0
        await asyncio.sleep(60.0)
        assert [line for who, line in swarm.said if who == "c"][-1].endswith("the others have again")
        assert swarm.members["c"].host_monitor.clock == ""

    watched(body)
