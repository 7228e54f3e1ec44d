"""A parameter server without a barrier: it applies what comes in when it comes in, and hands out what it has then.

A worker sends by how much its own outer step lowered the parameters that its round began with, and goes on from those
that it gets back. So it works on parameters that others have moved meanwhile, as in Hogwild (Niu et al. 2011); but
whole, one worker after the other, and once: a displacement that fails on its way is lost, and never sent again. What
arrivals do is in `protocols.baselines.delayed_nesterov`; with a momentum there the peers' own outer step must have
none.

The server is one of the peers: the first by its id when they begin, and while it lives whoever the others go to. One
that comes later asks one of them who that is, so that nobody takes the others over with what it happens to hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from protocols import wire
from protocols.aio import peer_timeout, run_with_helper, set_at, until_gone
from protocols.allreduce.parts import PartLayout
from protocols.base import (
    AveragingResult,
    BadPayload,
    Contribution,
    Deadline,
    Head,
    Header,
    Host,
    LocalProgress,
    Outcome,
    PeerError,
    PeerGone,
    PeerId,
    PeerSilent,
    Settings,
    Stream,
    Vector,
)
from protocols.baselines.delayed_nesterov import DelayedNesterov
from protocols.chunks import receive_vector, send_vector
from protocols.codec import codec
from protocols.endpoint import ProtocolEndpoint, SessionTable
from protocols.vectors import VectorView, norm
from protocols.wire import digest, flag, peer_id, register, text, uint

METHOD = "starling/parameter-server-async/1"
STALL_SECONDS = 30.0
"""No worker holds the server up for longer, nor is one that is only asked a question waited for."""
REFERRALS = 2
_ANSWER_LIMIT = 256


@dataclass(frozen=True, slots=True)
class PushUpdate(Header):
    """A worker comes with a displacement; or it only `asks` who the server is."""

    run: bytes = digest()
    scope: str = text(64)
    codec: str = text(16)
    elements: int = uint(1 << 48)
    asks: bool = flag()


@dataclass(frozen=True, slots=True)
class ServerReply(Header):
    """`here`: it is the worker's turn; the parameters follow its displacement, as float32. Else: go to `server`."""

    here: bool = flag()
    server: str = peer_id()


register(120, (PushUpdate, ServerReply))


class AsyncParameterServer:
    """`protocols.base.LooseAverager`.

    Attributes:
        turn: held by the one that changes or reads the parameters that this peer serves.
        confirmed: we have been to a server, or have been told that it is us.
    """

    shares_anchor = False

    def __init__(self, host: Host, settings: Settings, momentum: float = 0.0) -> None:
        """`momentum` is the server's, and delayed."""
        self.host, self.settings, self.endpoint = host, settings, ProtocolEndpoint(host, settings)
        self.me, self.accounting = self.endpoint.me, self.endpoint.accounting
        self.turn = asyncio.Lock()
        self.confirmed = False
        self._momentum = momentum
        self._chosen: PeerId = ""
        self._session: AsyncSession | None = None
        # What this peer serves, under its own id, once it is the server.
        self._served = SessionTable[PeerId, DelayedNesterov]()
        self.endpoint.serve(METHOD, PushUpdate, self._serve)

    @asynccontextmanager
    async def enter(self, head: Head, deadline: Deadline) -> AsyncIterator[AsyncSession]:
        session = self._session = AsyncSession(self, head, deadline)
        self.endpoint.bind(head.key)
        async with set_at(session.cut, deadline):
            yield session

    def choose(self) -> PeerId:
        """Whom to go to, as far as we know: the one we went to last, while it lives; else the first by its id."""
        live = [member.peer for member in self.host.members.live()]
        return self._chosen if self._chosen in live else live[0]

    def remain_at(self, server: PeerId) -> None:
        """Go there from now on."""
        self._chosen, self.confirmed = server, True
        self._served.wake()

    async def serve_from(self, start: Vector) -> None:
        """Serve from now on; if we do not yet, beginning with these parameters."""
        if not self._served.get(self.me.peer):
            copied = await self.host.compute.run(start.clone, 8 * len(start))
            if not self._served.get(self.me.peer):
                self._served.open(self.me.peer, DelayedNesterov(copied, self._momentum))

    async def count(self, displacement: Vector) -> DelayedNesterov:
        """Apply one, ours or a worker's, in its turn."""
        served, count = self._served.get(self.me.peer), len(self.host.members.live())
        assert served is not None
        await self.host.compute.run(partial(served.apply, displacement, count), 12 * len(displacement))
        return served

    def shape(self, name: str) -> PartLayout:
        """How a whole vector travels in that codec."""
        return PartLayout(codec(name), 0, self.settings.elements[0], self.settings.chunk_elements)

    async def _serve(self, stream: Stream, push: PushUpdate) -> None:
        chosen = self.choose()
        if push.asks or chosen != self.me.peer:
            return await stream.send(ServerReply(False, chosen))
        if (push.codec, push.elements) != (self.settings.codec, self.settings.elements[0]):
            raise BadPayload(f"{push.elements} elements in {push.codec}")
        if not await self._served.wait_for(self.me.peer, stream, lambda: self.choose() != chosen):
            return await stream.send(ServerReply(False, self.choose()))
        try:
            async with asyncio.timeout_at(stream.deadline), self.turn:
                await self._serve_one(stream.peer, stream)
        except TimeoutError:
            raise PeerSilent(stream.peer, "its turn did not come before its deadline") from None

    async def _serve_one(self, peer: PeerId, stream: Stream) -> None:
        """Take a displacement, whole or not at all, and give the parameters."""
        brought, compute = torch.empty(self.settings.elements[0]), self.host.compute
        async with peer_timeout(STALL_SECONDS, peer, "it was served"):
            await stream.send(ServerReply(True, self.me.peer))
            await receive_vector(stream, self.shape(self.settings.codec), VectorView([brought]), compute)
            parameters = (await self.count(brought)).parameters
            try:
                await send_vector(stream, self.shape("fp32"), VectorView([parameters]), compute)
            except (PeerError, asyncio.CancelledError):
                if self._session:
                    self._session.half(brought, parameters)
                raise


class AsyncSession:
    """`protocols.base.LooseSession`: nothing is lent; the state is as it was when it is taken back."""

    group = ""

    def __init__(self, averager: AsyncParameterServer, head: Head, deadline: Deadline) -> None:
        self.head, self.deadline, self.round = head, deadline, head.key.round
        self.cut = asyncio.Event()
        self.half_exchanges, self.mass_drift = 0, 0.0
        self._averager, self._host = averager, averager.host
        self._lent = self._origin = torch.empty(0)
        self._with = ""
        self._brought = False

    # -- the contract -------------------------------------------------------------------------------------------------

    def offer(self, work: LocalProgress) -> None:
        if work.complete or work.leaving:
            self.cut.set()

    def waiting_for(self) -> tuple[PeerId, ...]:
        return (self._with,) if self._with else ()

    def share(self, state: Sequence[Vector]) -> None:
        self._lent = state[0]

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        """Keep what the round began with: the outer step is about to move it."""
        self._origin = await self._host.compute.run(self._lent.clone, 8 * len(self._lent))
        if self._averager.choose() == self._host.me and self._averager.confirmed:
            await self._averager.serve_from(self._origin)
        return {}

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        averager, outcome = self._averager, Outcome.SKIPPED
        subtract = partial(torch.sub, self._origin, mine[0], out=into[0])
        await self._host.compute.run(subtract, 12 * len(mine[0]))
        try:
            async with asyncio.timeout_at(self.deadline):
                averager.remain_at(await self._trade(into[0]))
            into[1].copy_(mine[1])
            outcome = Outcome.COMMITTED
        except BadPayload:
            pass  # named where it was counted
        except PeerError as error:
            averager.accounting.name(error.peer, error.why)
        except TimeoutError:
            averager.accounting.name(self._with or self._host.me, "no parameters from there by the deadline")
        if self._brought:  # it may have been counted
            self.half(subtract(), mine[0])
        blamed, sent, received = averager.accounting.take()
        name = f"{averager.me.peer}/{averager.me.incarnation}/{self.round}"
        held = {averager.me.peer: Contribution(1, 1, (name,))} if outcome is Outcome.COMMITTED else {}
        return AveragingResult(outcome, contributions=held, blamed=blamed, bytes_sent=sent, bytes_received=received)

    def half(self, displacement: Vector, parameters: Vector) -> None:
        """One end has counted this, and the other may not know."""
        self.half_exchanges += 1
        self.mass_drift += norm([displacement]) / max(norm([parameters]), 1e-30)

    # -- one exchange -------------------------------------------------------------------------------------------------

    async def _trade(self, vector: Vector) -> PeerId:
        """Bring a displacement to the server, and have its parameters in the same place; returns who it was.

        Raises:
            BadPayload, PeerError, TimeoutError: it did not come to that.
        """
        averager, me = self._averager, self._host.me
        server = averager.choose()
        others = [member.peer for member in self._host.members.live() if member.peer != me]
        if server == me and others and not averager.confirmed:
            server = await self._with_peer(others[0], self._ask(others[0]))
        for _ in range(REFERRALS):
            if server == me:
                await averager.serve_from(self._origin)
                async with averager.turn:
                    vector.copy_((await averager.count(vector)).parameters)
                return me
            elsewhere = await self._with_peer(server, self._push(server, vector))
            if not elsewhere:
                return server
            server = elsewhere
        raise PeerGone(server, "nobody says that it serves")

    async def _with_peer(self, peer: PeerId, exchange: Coroutine[Any, Any, PeerId]) -> PeerId:
        """What comes of it, while that peer lives."""
        self._with = peer
        return await run_with_helper(exchange, self._watch(peer))

    async def _watch(self, peer: PeerId) -> None:
        members = self._host.members
        await until_gone(members, [member for member in members.live() if member.peer == peer], self.deadline)
        raise PeerSilent(peer, "died in an exchange, or did not end it by the deadline")

    @asynccontextmanager
    async def _opened(self, peer: PeerId, asks: bool) -> AsyncIterator[Stream]:
        key, averager = self.head.key, self._averager
        shape = averager.shape(averager.settings.codec)
        async with averager.endpoint.open(peer, METHOD, self.deadline) as stream:
            await stream.send(PushUpdate(key.run, key.scope, shape.codec.name, shape.high, asks))
            yield stream

    async def _ask(self, peer: PeerId) -> PeerId:
        """Who the server is, as that peer knows."""
        async with self._opened(peer, asks=True) as stream, peer_timeout(STALL_SECONDS, peer, "asked who serves"):
            return (await _told(stream)).server

    async def _push(self, peer: PeerId, vector: Vector) -> PeerId:
        """Trade with a peer, or learn from it who the server is; empty if it was that one."""
        averager, flat, compute = self._averager, VectorView([vector]), self._host.compute
        async with self._opened(peer, asks=False) as stream:
            told = await _told(stream)
            if not told.here:
                return told.server
            self._brought = True
            await send_vector(stream, averager.shape(averager.settings.codec), flat, compute)
            await receive_vector(stream, averager.shape("fp32"), flat, compute)
            self._brought = False
            return ""


async def _told(stream: Stream) -> ServerReply:
    """
    Raises:
        BadPayload: no such answer, or one that names nobody.
    """
    told = wire.expect(await stream.receive(_ANSWER_LIMIT), ServerReply)
    if not told.server:
        raise BadPayload("names nobody who serves")
    return told
