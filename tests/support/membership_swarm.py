"""Peers with nothing but a membership each, on the simulated network, and a peer that breaks its rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from node.membership.handshake import LocalPeer, LocalStage
from node.membership.hello import HELLO, VERSION, Heartbeat, Hello, HelloRejected, PeerAddress, Welcome, signed_part
from node.membership.membership import Membership
from node.membership.peer_record import PeerRecord
from protocols import wire
from protocols.base import Deadline, Header, Member, PeerError, PeerId, Stream, Transport
from tests.sim.host import SimClock, SimSigner
from tests.sim.swarm import SimSwarm
from tests.support.waiting import until

RUN = bytes(range(32))


def greeting(
    name: PeerId,
    incarnation: int = 0,
    nonce: int = 77,
    version: int = VERSION,
    run: bytes = RUN,
    addresses: tuple[str, ...] = (),
) -> Hello:
    """Signed by the peer that it names."""
    hello = Hello(version, run, Member(name, incarnation), nonce, "mallory", addresses, 0, (), b"")
    return replace(hello, signature=SimSigner(name, 0).sign(signed_part(hello)))


class MembershipSwarm(SimSwarm):
    """Peers with nothing but a membership each; at first each knows only the peer that was started first."""

    def __init__(self) -> None:
        super().__init__()
        self.members: dict[PeerId, Membership] = {}
        self.duplicates: list[tuple[PeerId, str]] = []
        self.addresses: dict[PeerId, tuple[str, ...]] = {}
        self.clocks: dict[PeerId, SimClock] = {}
        self.said: list[tuple[PeerId, str]] = []
        self.dropped: list[PeerId] = []
        self.seen: dict[PeerId, str] = {}
        self.stages: dict[PeerId, LocalStage] = {}
        self.reached: list[tuple[PeerId, tuple[str, ...]]] = []
        self._starts, self.round = 0, 7

    async def reach(self, peer: PeerId, addresses: Sequence[str], deadline: Deadline) -> None:
        self.reached.append((peer, tuple(addresses)))

    async def drop(self, peer: PeerId, deadline: Deadline) -> None:
        self.dropped.append(peer)

    def start(
        self, peer: PeerId, run: bytes = RUN, incarnation: int | None = None, skew_seconds: float = 0.0
    ) -> Membership:
        known = peer in self.network.nodes
        transport = self.network.restart(peer) if known else self.network.join(peer)
        self._starts += 1
        nonce = self._starts
        me = Member(peer, transport.node.incarnation if incarnation is None else incarnation)
        with transport.node.process.entered():
            members = self._membership(transport, me, run, nonce, skew_seconds)
        if self.members and peer != (first := next(iter(self.members))):
            members.add_candidate(first)
        self.members[peer] = members
        self.spawn(peer, members.run())
        return members

    def _membership(self, transport: Transport, me: Member, run: bytes, nonce: int, skew_seconds: float) -> Membership:
        self.addresses[me.peer] = (f"/ip4/10.0.0.1/tcp/{nonce}",)
        self.clocks[me.peer] = SimClock(skew_seconds)
        nickname, stage = f"nick-{me.peer}", self.stages.get(me.peer)
        return Membership(
            transport,
            LocalPeer(me, run, nonce, nickname, lambda: self.addresses[me.peer], lambda: self.round, stage),
            clock=self.clocks[me.peer],
            signer=SimSigner(me.peer, 0),
            wanted=lambda: [peer for peer in self.members if peer != me.peer],
            reach=self.reach,
            drop=self.drop,
            seen_at=lambda other: self.seen.get(other, ""),
            on_duplicate_identity=lambda line: self.duplicates.append((me.peer, line)),
            say=lambda line: self.said.append((me.peer, line)),
        )

    async def meet(self, names: Iterable[PeerId], seconds: float = 5.0) -> None:
        for name in names:
            self.start(name)
        await until(lambda: all(self.sees(name) == list(names) for name in names), seconds)

    def sees(self, peer: PeerId) -> list[PeerId]:
        return [member.peer for member in self.members[peer].live()]

    def contacts(self, peer: PeerId) -> dict[PeerId, PeerRecord]:
        return {each.peer: each for each in self.members[peer].contacts()}

    def settled(self) -> bool:
        """The peers a, b and c see each other, and none of their handlers failed."""
        return not self.network.bugs and all({"a", "b", "c"} <= set(self.sees(name)) for name in "abc")


class HostilePeer:
    """A peer of the run that breaks the rules; its attributes say what it sends."""

    def __init__(self, swarm: MembershipSwarm, name: PeerId = "x") -> None:
        self.transport, self.name = swarm.network.join(name), name
        self.dials: list[float] = []
        self.known: tuple[PeerAddress, ...] = ()
        self.echo: Callable[[Heartbeat], Sequence[Header]] = lambda pulse: [pulse]
        self.refusal: HelloRejected | None = None
        self.addresses: tuple[str, ...] = ()
        self.incarnation, self.nonce = 0, 77
        self.transport.serve(HELLO, self._serve)

    def hello(self) -> Hello:
        return greeting(self.name, self.incarnation, self.nonce, addresses=self.addresses)

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

    async def greet(self, peer: PeerId, seconds: float, heartbeats_per_second: float = 0.0) -> int:
        """Greet a peer and send heartbeats; the number that the peer answered."""
        loop = asyncio.get_running_loop()
        until, answered = loop.time() + seconds, 0
        with suppress(PeerError):
            async with self.transport.open(peer, HELLO, until) as stream:
                await stream.send(self.hello())
                await stream.receive(wire.MAX_HEADER_BYTES)
                while heartbeats_per_second and loop.time() < until:
                    await stream.send(Heartbeat(answered, 0.0, 1 << 40, False, b"", 0, 0.0, 0))
                    await stream.receive(wire.MAX_HEADER_BYTES)
                    answered += 1
                    await asyncio.sleep(1 / heartbeats_per_second)
                await asyncio.sleep(until - loop.time())
        return answered
