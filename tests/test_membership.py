"""Membership on virtual time: who is believed alive, when that changes, and what cannot be smuggled in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from node.greeter import Self
from node.hello import HELLO, VERSION, Hello, Pulse, Refusal, Welcome
from node.membership import Membership
from node.suspicion import CEILING_SECONDS, FLOOR_SECONDS, Suspicion
from protocols import wire
from protocols.base import Member, PeerId, Transport
from tests.sim import loop as simloop
from tests.sim.host import SimClock
from tests.sim.network import SimNetwork, Trace

RUN = bytes(range(32))


class Swarm:
    """Peers with nothing but a membership each; each is told of the first one only."""

    def __init__(self) -> None:
        self.network = SimNetwork(Trace(), latency_seconds=0.02)
        self.members: dict[PeerId, Membership] = {}
        self.twins: list[tuple[PeerId, str]] = []
        self._lives = 0

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
        members = Membership(
            transport,
            SimClock(skew_seconds),
            Self(me, run, life, f"nick-{me.peer}", lambda: (f"/ip4/10.0.0.1/tcp/{life}",), lambda: 7),
            wanted=lambda: [peer for peer in self.members if peer != me.peer],
        )
        members.on_twin = lambda why: self.twins.append((me.peer, why))
        return members

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


def test_peers_that_know_one_meet_all() -> None:
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


def test_a_handshake_may_take_longer_than_a_tick() -> None:
    async def body(swarm: Swarm) -> None:
        swarm.network.latency_seconds = 0.5
        await asyncio.sleep(60)
        for name in "abc":
            swarm.start(name)
        await until(lambda: all(swarm.sees(name) == ["a", "b", "c"] for name in "abc"), 10.0)

    play(body)


def test_a_killed_peer_is_gone_at_once_and_back_in_its_next_life() -> None:
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


def test_silence_makes_suspect_within_six_seconds_and_healing_brings_back() -> None:
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


def test_a_peer_whose_streams_all_break_is_still_there() -> None:
    async def body(swarm: Swarm) -> None:
        for name in "ab":
            swarm.start(name)
        await until(lambda: len(swarm.sees("a")) == 2, 5.0)
        version = swarm.members["a"].version
        swarm.network.reset_streams("b")
        await asyncio.sleep(10.0)
        assert swarm.members["a"].version == version  # nobody was taken for dead

    play(body)


def test_another_run_another_version_and_a_borrowed_name_are_refused_and_counted() -> None:
    async def body(swarm: Swarm) -> None:
        members = swarm.start("a")
        stranger = swarm.network.join("x")

        async def say(hello: Hello) -> str:
            async with stranger.open("a", HELLO, asyncio.get_running_loop().time() + 5.0) as stream:
                await stream.send(hello)
                return wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), Refusal).why

        assert "is in another run (ffff" in await say(Hello(VERSION, b"\xff" * 32, Member("x"), 1, "", ()))
        assert "update the older" in await say(Hello(VERSION + 1, RUN, Member("x"), 1, "", ()))
        assert "in the name of a" in await say(Hello(VERSION, RUN, Member("a", 9), 1, "", ()))
        assert sum(members.refused.values()) == 3
        assert swarm.sees("a") == ["a"]

    play(body)


def test_who_dials_but_cannot_be_dialled_back_is_not_live() -> None:
    async def body(swarm: Swarm) -> None:
        swarm.start("a")
        mute = swarm.network.join("x")  # serves nothing

        async with mute.open("a", HELLO, asyncio.get_running_loop().time() + 60.0) as stream:
            await stream.send(Hello(VERSION, RUN, Member("x"), 1, "", ()))
            assert isinstance(await stream.receive(wire.MAX_HEADER_BYTES), Welcome)
            for number in range(5):
                await stream.send(Pulse(number, 0.0, 0, False))
                assert wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), Pulse).number == number
                await asyncio.sleep(1.0)
            assert swarm.sees("a") == ["a"]

    play(body)


def test_a_twin_is_told_and_a_restart_is_not_taken_for_one() -> None:
    async def body(swarm: Swarm) -> None:
        for name in "abc":
            swarm.start(name)
        await until(lambda: all(len(swarm.sees(name)) == 3 for name in "abc"), 5.0)
        swarm.network.kill("c")
        swarm.start("c")
        await until(lambda: Member("c", 1) in swarm.members["a"].live(), 12.0)
        assert swarm.twins == []
        swarm.network.kill("c")
        swarm.start("c", incarnation=1)  # a copy of its directory, started elsewhere
        await until(lambda: bool(swarm.twins), 12.0)
        assert swarm.twins[0][0] == "c" and "identity" in swarm.twins[0][1]

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


def test_a_peer_that_was_stopped_itself_suspects_nobody_for_it() -> None:
    async def body(swarm: Swarm) -> None:
        for name in "ab":
            swarm.start(name)
        await until(lambda: len(swarm.sees("a")) == 2, 5.0)
        contact = swarm.members["a"].contacts()[0]
        contact.suspicion = Suspicion(asyncio.get_running_loop().time() - 30.0)  # as after a sleep
        contact.suspicion.slept(asyncio.get_running_loop().time())
        await asyncio.sleep(1.0)
        assert swarm.sees("a") == ["a", "b"]

    play(body)


def test_a_goodbye_is_heard_at_once() -> None:
    async def body(swarm: Swarm) -> None:
        for name in "ab":
            swarm.start(name)
        await until(lambda: len(swarm.sees("a")) == 2 and len(swarm.sees("b")) == 2, 5.0)
        swarm.members["b"].goodbye()
        assert await until(lambda: swarm.members["a"].contacts()[0].leaving, 5.0) < 0.2

    play(body)


def test_patience_adapts_between_its_bounds() -> None:
    quick, slow = Suspicion(0.0), Suspicion(0.0)
    for pulse in range(1, 60):
        quick.hear(float(pulse))
        slow.hear(float(pulse) * 4 + (pulse % 2) * 3)
    assert quick.patience_seconds == FLOOR_SECONDS
    assert FLOOR_SECONDS < slow.patience_seconds <= CEILING_SECONDS
    assert quick.due() == 59.0 + FLOOR_SECONDS
