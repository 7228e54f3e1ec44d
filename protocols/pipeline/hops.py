"""Hops of a chain: a replica of stage k sends its output to one of stage k + 1, and gets the gradient of it back.

A hop is taken only with the ticket of a lease that the receiver holds, and once. What breaks that rule is the sender's
fault, never the driver's: the sender is named. A hop whose lease has ended meanwhile is refused without blame.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeAlias

from protocols.aio import loop_time, peer_timeout, raise_when_gone, run_with_helper
from protocols.base import BadPayload, Buffer, Member, PeerError, PeerGone, PeerSilent, Stream, stage_scope
from protocols.pipeline.admission import Lease
from protocols.pipeline.job import LeaseLost, Payload
from protocols.pipeline.messages import HEADER_LIMIT, HOP_METHOD, TICKET_BYTES, HopInput, JobOutput, LeaseVoid
from protocols.pipeline.settings import (
    CALL_LIMIT_SECONDS,
    DRIVER_IDLE_SECONDS,
    MICROBATCH_SECONDS,
    SERVER_IDLE_SECONDS,
    STREAM_SECONDS,
    PipelineSettings,
)
from protocols.streams.endpoint import ProtocolEndpoint
from protocols.wire import expect

CheckPayload: TypeAlias = Callable[[Buffer, Payload], None]

OPEN_SECONDS = 5.0
ENDED_TICKETS = 4096  # those remembered: a hop that comes late breaks no rule


@dataclass(slots=True, eq=False)
class HandedInput:
    """An input that has come from the stage before. `gradient` is of it; None: the lease has ended without one."""

    x: Buffer
    sender: Member
    gradient: asyncio.Future[Buffer | None]


@dataclass(slots=True, eq=False)
class HopTicket:
    """Of one lease, for one hop. `take` is given the hop, or why it was refused."""

    name: bytes
    lease: Lease
    take: Callable[[HandedInput | BadPayload], None]
    hop: HandedInput | None = None


class HopReceiver:
    """Takes the hops to one replica."""

    def __init__(
        self,
        endpoint: ProtocolEndpoint,
        settings: PipelineSettings,
        stage: int,
        check: CheckPayload,
        rng: random.Random,
    ) -> None:
        self._endpoint, self._settings, self._scope = endpoint, settings, stage_scope(stage)
        self._check_payload, self._rng = check, rng
        self._tickets: dict[bytes, HopTicket] = {}
        self._ended: deque[bytes] = deque(maxlen=ENDED_TICKETS)
        endpoint.serve(HOP_METHOD, HopInput, self._serve)

    @contextmanager
    def ticket(self, lease: Lease, take: Callable[[HandedInput | BadPayload], None]) -> Iterator[HopTicket]:
        ticket = HopTicket(self._rng.randbytes(TICKET_BYTES), lease, take)
        self._tickets[ticket.name] = ticket
        try:
            yield ticket
        finally:
            self.end(ticket)
            if ticket.hop and not ticket.hop.gradient.done():
                ticket.hop.gradient.set_result(None)

    def end(self, ticket: HopTicket) -> None:
        """Take no hop with it any more."""
        if self._tickets.pop(ticket.name, None):
            self._ended.append(ticket.name)

    async def _serve(self, stream: Stream, asked: HopInput) -> None:
        """One hop after the other, until the sender is gone, closes the stream or leaves it idle."""
        watch = raise_when_gone(self._endpoint.host.members, asked.sender, stream.deadline)
        await run_with_helper(self._serve_all(stream, asked), watch)

    async def _serve_all(self, stream: Stream, asked: HopInput) -> None:
        sender = asked.sender
        while True:
            if (asked.run, asked.scope) != (self._settings.run, self._scope):
                raise BadPayload("a hop of another run or stage")
            if (asked.sender, asked.to) != (sender, self._endpoint.me):
                raise BadPayload("a hop in another name than the stream's first one")
            hop = await self._taken(stream, asked)
            async with peer_timeout(MICROBATCH_SECONDS, stream.peer, "its microbatch was under way"):
                gradient = await hop.gradient
            if gradient is None:
                await stream.send(LeaseVoid("the next stage's lease has ended"))
            else:
                await stream.send(JobOutput(0.0), gradient)
            async with peer_timeout(SERVER_IDLE_SECONDS, stream.peer, "waiting for its next hop"):
                asked = expect(await stream.receive(HEADER_LIMIT), HopInput)

    async def _taken(self, stream: Stream, asked: HopInput) -> HandedInput:
        self._valid(asked)
        x = bytearray(self._settings.sizes.of(Payload.ACTIVATION))
        async with peer_timeout(CALL_LIMIT_SECONDS, stream.peer, "sending a hop"):
            await stream.receive_into(memoryview(x))
        ticket = self._valid(asked)  # the lease may have ended meanwhile
        try:
            self._check_payload(x, Payload.ACTIVATION)
        except BadPayload as error:
            ticket.take(error)
            raise
        del self._tickets[ticket.name]
        ticket.hop = HandedInput(x, asked.sender, asyncio.get_running_loop().create_future())
        ticket.take(ticket.hop)
        return ticket.hop

    def _valid(self, asked: HopInput) -> HopTicket:
        ticket = self._tickets.get(asked.ticket)
        if ticket and (ticket.lease.driver, ticket.lease.number) == (asked.driver, asked.number):
            return ticket
        if ticket is None and asked.ticket in self._ended:
            raise PeerSilent(asked.sender.peer, "its hop came after the lease had ended")
        raise BadPayload("a hop without a ticket of this replica, or with one that was used")


@dataclass(slots=True)
class _HopStream:
    stream: Stream
    context: AbstractAsyncContextManager[Stream]
    used_at: float

    async def end(self, error: BaseException | None = None) -> None:
        with suppress(PeerError):
            await self.context.__aexit__(type(error) if error else None, error, None)


class HopStreams:
    """Streams of one replica to those of the next stage. They stay open while drivers have streams to this one."""

    def __init__(self, endpoint: ProtocolEndpoint, settings: PipelineSettings, check: CheckPayload) -> None:
        self._endpoint, self._settings, self._check_payload = endpoint, settings, check
        self._idle: dict[Member, list[_HopStream]] = {}
        self._users = 0

    @asynccontextmanager
    async def used(self) -> AsyncIterator[None]:
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                await self._drop(lambda member, each: True)

    async def pass_on(self, hop: HopInput, y: Buffer) -> Buffer:
        """Send an output; returns its gradient.

        Raises PeerGone if the next replica cannot have got it; `LeaseLost` if its lease ended; PeerError, BadPayload.
        """
        used = await self._sent(hop, y)
        try:
            watch = raise_when_gone(self._endpoint.host.members, hop.to, loop_time() + MICROBATCH_SECONDS)
            gradient = await run_with_helper(self._answer(used.stream), watch)
        except LeaseLost:
            self._keep(hop.to, used)
            raise
        except BaseException as error:
            await used.end(error)
            raise
        self._keep(hop.to, used)
        return gradient

    async def _sent(self, hop: HopInput, y: Buffer) -> _HopStream:
        await self._drop(lambda member, each: not self._is_usable(each))
        idle = self._idle.get(hop.to)
        if idle:
            with suppress(PeerError):  # it may have closed a stream that was idle for long: send on a new one
                return await self._send(idle.pop(), hop, y)
        return await self._send(await self._opened(hop.to), hop, y)

    async def _send(self, used: _HopStream, hop: HopInput, y: Buffer) -> _HopStream:
        try:
            watch = raise_when_gone(self._endpoint.host.members, hop.to, loop_time() + CALL_LIMIT_SECONDS)
            await run_with_helper(used.stream.send(hop, y), watch)
        except BaseException as error:
            await used.end(error)
            raise
        return used

    async def _opened(self, member: Member) -> _HopStream:
        context = self._endpoint.open(member.peer, HOP_METHOD, loop_time() + STREAM_SECONDS)
        try:
            async with peer_timeout(OPEN_SECONDS, member.peer, "opening a stream"):
                return _HopStream(await context.__aenter__(), context, loop_time())
        except PeerError as error:
            raise PeerGone(member.peer, f"no stream to it: {error}") from error

    async def _answer(self, stream: Stream) -> Buffer:
        header = await stream.receive(HEADER_LIMIT)
        if isinstance(header, LeaseVoid):
            raise LeaseLost(header.why)
        expect(header, JobOutput)
        gradient = bytearray(self._settings.sizes.of(Payload.GRADIENT))
        await stream.receive_into(memoryview(gradient))
        self._check_payload(gradient, Payload.GRADIENT)
        return gradient

    def _keep(self, member: Member, used: _HopStream) -> None:
        used.used_at = loop_time()
        self._idle.setdefault(member, []).append(used)

    def _is_usable(self, each: _HopStream) -> bool:
        now = loop_time()
        return now - each.used_at < DRIVER_IDLE_SECONDS and each.stream.deadline - now > MICROBATCH_SECONDS

    async def _drop(self, is_due: Callable[[Member, _HopStream], bool]) -> None:
        due = [(member, each) for member, idle in self._idle.items() for each in idle if is_due(member, each)]
        for member, each in due:
            self._idle[member].remove(each)
            if not self._idle[member]:
                del self._idle[member]
        for _, each in due:
            await each.end()
