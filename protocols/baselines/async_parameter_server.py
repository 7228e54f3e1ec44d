"""A parameter server without a barrier: it applies each update when it arrives, and returns its parameters at once.

A worker sends its displacement: the amount by which its own outer step lowered the parameters that its round began
with, and continues from the parameters that it gets back, which others have moved meanwhile (Hogwild, Niu et al. 2011).
The server applies whole displacements, one after the other; one that is lost on its way is not sent again.

The server is one of the peers: at first the one with the first peer id, afterwards the one that the others use, as long
as it is live. A peer that comes later asks another one which it is. Otherwise it could become the server itself, and
replace the others' parameters with its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import torch

from protocols import wire
from protocols.aio import Notifier, peer_timeout, raise_when_gone, run_with_helper, set_at
from protocols.base import (
    AveragingResult,
    BadPayload,
    Contribution,
    Deadline,
    Head,
    Header,
    Host,
    LocalProgress,
    PeerError,
    PeerGone,
    PeerId,
    PeerSilent,
    Settings,
    Stream,
    Vector,
)
from protocols.streams.chunks import PartLayout, receive_vector, send_vector
from protocols.streams.endpoint import ProtocolEndpoint, SessionBase
from protocols.vectors.codec import codec
from protocols.vectors.views import VectorView, norm
from protocols.wire import digest, flag, peer_id, register, text, uint

METHOD = "starling/parameter-server-async/1"
STALL_SECONDS = 30.0
"""The longest time that one worker can occupy the server, and that an answer to a question may take."""
REFERRALS = 2  # how many peers a worker tries in one round: each may name another one as the server
_ANSWER_LIMIT = 256


@dataclass(frozen=True, slots=True)
class PushUpdate(Header):
    """Announces a displacement, which follows once the server says `here`; or only `asks` which peer is the server."""

    run: bytes = digest()
    scope: str = text(64)
    codec: str = text(16)
    elements: int = uint(1 << 48)
    asks: bool = flag()


@dataclass(frozen=True, slots=True)
class ServerReply(Header):
    # The sender is the server, and it is the worker's turn. The parameters come back as float32.
    here: bool = flag()
    server: str = peer_id()  # as far as the sender knows


register(120, (PushUpdate, ServerReply))


class DelayedNesterov:
    """The server's parameters, float32 (n), which each arriving displacement moves by 1/N of its length at once.

    Momentum is delayed (Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling", algorithm 3, c = 0):
    at each arrival, it would take every stale step N times.
    """

    def __init__(self, parameters: Vector, momentum: float = 0.0) -> None:
        """Begin with these parameters, which `apply` changes in place. The momentum is in [0, 1)."""
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {momentum}")
        self.parameters, self._momentum = parameters, momentum
        self._gathered, self._velocity = (torch.zeros(len(parameters) if momentum else 0) for _ in range(2))
        self._arrived = 0

    def apply(self, displacement: Vector, count: int) -> None:
        """Apply what a worker would subtract, and overwrite it: θ ← θ − δ/N, with N = `count` peers.

        After N of them, m ← βm + Σδ/N and θ ← θ − βm.
        """
        self.parameters.sub_(displacement.div_(count))
        if not self._momentum:
            return
        self._gathered.add_(displacement)
        self._arrived += 1
        if self._arrived >= count:
            self._velocity.mul_(self._momentum).add_(self._gathered)
            self.parameters.sub_(torch.mul(self._velocity, self._momentum, out=self._gathered))
            self._gathered.zero_()
            self._arrived = 0


class AsyncParameterServer:
    """`protocols.base.IndependentAverager`. If the server has a (delayed) momentum, outer steps must have none."""

    def __init__(self, host: Host, settings: Settings, momentum: float = 0.0) -> None:
        self.host, self.settings, self.endpoint = host, settings, ProtocolEndpoint(host, settings)
        self.me, self.accounting = self.endpoint.me, self.endpoint.accounting
        self.turn = asyncio.Lock()  # held while the parameters that this peer serves are changed or read
        self.confirmed = False  # this peer has used a server, or another peer has said that this one is the server
        self._momentum = momentum
        self._chosen: PeerId = ""
        self._session: AsyncSession | None = None
        self._served: DelayedNesterov | None = None  # what this peer serves, once it is the server
        self._notifier = Notifier()
        self.endpoint.serve(METHOD, PushUpdate, self._serve)

    @asynccontextmanager
    async def enter(self, head: Head, deadline: Deadline) -> AsyncIterator[AsyncSession]:
        session = self._session = AsyncSession(self, head, deadline)
        self.endpoint.bind(head.key)
        async with set_at(session.cut, deadline):
            yield session

    def choose(self) -> PeerId:
        """The server that this peer used last, if it is live; else the live peer with the first id."""
        live = [member.peer for member in self.host.members.live()]
        return self._chosen if self._chosen in live else live[0]

    def use(self, server: PeerId) -> None:
        self._chosen, self.confirmed = server, True
        self._notifier.notify()

    async def serve_from(self, start: Vector) -> DelayedNesterov:
        if not self._served:
            copied = await self.host.compute.run(start.clone, 8 * len(start))
            self._served = self._served or DelayedNesterov(copied, self._momentum)
            self._notifier.notify()
        return self._served

    def step_down(self) -> None:
        """Rest, and name itself no longer, since two peers that return could wait for each other to serve."""
        self.confirmed, self._chosen = False, ""
        self._served = None

    async def apply(self, served: DelayedNesterov, displacement: Vector) -> Vector:
        """Apply a displacement of this peer or of a worker, and return the parameters. The caller holds `turn`."""
        peers = len(self.host.members.live())
        await self.host.compute.run(partial(served.apply, displacement, peers), 12 * len(displacement))
        return served.parameters

    def layout(self, name: str) -> PartLayout:
        return PartLayout(codec(name), 0, self.settings.elements[0], self.settings.chunk_elements)

    async def _serve(self, stream: Stream, push: PushUpdate) -> None:
        chosen = self.choose()
        if push.asks or chosen != self.me.peer:
            return await stream.send(ServerReply(False, chosen))
        if (push.codec, push.elements) != (self.settings.codec, self.settings.elements[0]):
            raise BadPayload(f"{push.elements} elements in {push.codec}")
        try:
            await self._notifier.until(lambda: bool(self._served) or self.choose() != chosen, stream.deadline)
            async with asyncio.timeout_at(stream.deadline), self.turn:
                if not self._served:  # another peer is the server, or this one has stepped down since
                    return await stream.send(ServerReply(False, self.choose()))
                await self._serve_one(stream.peer, stream, self._served)
        except TimeoutError:
            raise PeerSilent(stream.peer, "its stream's deadline passed before its turn came") from None

    async def _serve_one(self, peer: PeerId, stream: Stream, served: DelayedNesterov) -> None:
        brought, compute = torch.empty(self.settings.elements[0]), self.host.compute
        async with peer_timeout(STALL_SECONDS, peer, "serving it"):
            await stream.send(ServerReply(True, self.me.peer))
            await receive_vector(stream, self.layout(self.settings.codec), VectorView([brought]), compute)
            parameters = await self.apply(served, brought)
            try:
                await send_vector(stream, self.layout("fp32"), VectorView([parameters]), compute)
            except (PeerError, asyncio.CancelledError):
                if self._session:
                    self._session.half(brought, parameters)
                raise


class AsyncSession(SessionBase):
    """`protocols.base.IndependentSession`. The shared state is not averaged with; `average` does all the work."""

    def __init__(self, averager: AsyncParameterServer, head: Head, deadline: Deadline) -> None:
        super().__init__(head, deadline, averager.accounting)
        self._averager, self._host = averager, averager.host
        self._shared = self._origin = torch.empty(0)
        self._partner = ""
        self._unconfirmed = self._rests = False

    # -- the contract -------------------------------------------------------------------------------------------------

    def waiting_for(self) -> tuple[PeerId, ...]:
        return (self._partner,) if self._partner else ()

    def share(self, state: Sequence[Vector]) -> None:
        self._shared = state[0]

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        """Keep the parameters that the round began with, because the outer step is about to change them."""
        self._origin = await self._host.compute.run(self._shared.clone, 8 * len(self._shared))
        if self._averager.choose() == self._host.me and self._averager.confirmed:
            await self._averager.serve_from(self._origin)
        return {}

    def offer(self, work: LocalProgress) -> None:
        super().offer(work)
        self._rests = work.resting

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        averager, committed = self._averager, False
        subtract = partial(torch.sub, self._origin, mine[0], out=into[0])
        await self._host.compute.run(subtract, 12 * len(mine[0]))
        try:
            async with asyncio.timeout_at(self.deadline):
                averager.use(await self._push_update(into[0]))
            into[1].copy_(mine[1])
            committed = True
        except BadPayload:
            pass  # `counting` has named the peer
        except PeerError as error:
            averager.accounting.name(error.peer, error.why)
        except TimeoutError:
            averager.accounting.name(self._partner or self._host.me, "sent no parameters before the round's deadline")
        if self._unconfirmed:  # the server may have applied it
            self.half(subtract(), mine[0])
        if self._rests:
            averager.step_down()
        name = f"{averager.me.peer}/{averager.me.incarnation}/{self.round}"
        return self._result(committed, {averager.me.peer: Contribution(1, 1, (name,))} if committed else {}, {})

    def half(self, displacement: Vector, parameters: Vector) -> None:
        """Count a half exchange: one end has applied the displacement, and the other end may not know."""
        self.count_half(norm([displacement]) / max(norm([parameters]), 1e-30))

    # -- one exchange -------------------------------------------------------------------------------------------------

    async def _push_update(self, vector: Vector) -> PeerId:
        """Bring a displacement to the server, whose parameters then replace it in `vector`. Returns the server."""
        averager, me = self._averager, self._host.me
        server = averager.choose()
        others = [member.peer for member in self._host.members.live() if member.peer != me]
        if server == me and others and not averager.confirmed:
            server = await self._visit(others[0], None)
        for _ in range(REFERRALS):
            if server == me:
                served = await averager.serve_from(self._origin)
                async with averager.turn:
                    vector.copy_(await averager.apply(served, vector))
                return me
            elsewhere = await self._visit(server, vector)
            if not elsewhere:
                return server
            server = elsewhere
        raise PeerGone(server, "named as the server, but does not serve")

    async def _visit(self, peer: PeerId, vector: Vector | None) -> PeerId:
        """Exchange with a peer (`_exchange`) as long as it is live; one that another peer named may not be yet."""
        self._partner, members = peer, self._host.members
        for member in members.live():
            if member.peer == peer:
                watch = raise_when_gone(members, member, self.deadline)
                return await run_with_helper(self._exchange(peer, vector), watch)
        return await self._exchange(peer, vector)

    async def _exchange(self, peer: PeerId, vector: Vector | None) -> PeerId:
        """Push a displacement to a peer, whose parameters replace it; "" if it has applied it, else the server that it
        names. Without a displacement, only ask which peer is the server.
        """
        key, averager, compute = self.head.key, self._averager, self._host.compute
        layout = averager.layout(averager.settings.codec)
        async with averager.endpoint.open(peer, METHOD, self.deadline) as stream:
            await stream.send(PushUpdate(key.run, key.scope, layout.codec.name, layout.high, vector is None))
            if vector is None:
                async with peer_timeout(STALL_SECONDS, peer, "asking which peer is the server"):
                    return (await _reply(stream)).server
            reply, flat = await _reply(stream), VectorView([vector])
            if not reply.here:
                return reply.server
            self._unconfirmed = True
            await send_vector(stream, layout, flat, compute)
            await receive_vector(stream, averager.layout("fp32"), flat, compute)
            self._unconfirmed = False
            return ""


async def _reply(stream: Stream) -> ServerReply:
    reply = wire.expect(await stream.receive(_ANSWER_LIMIT), ServerReply)
    if not reply.server:
        raise BadPayload("an answer that names no server")
    return reply
