"""A replica's part in a chain: it gets its input from the stage before, and hands its output to the next stage.

As in a star, a lease is a frame on the stack of its control stream's handler, and ends with it. What the driver says
and what neighbours send comes through one inbox, so a microbatch waits for one thing at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from protocols.aio import peer_timeout, raise_when_gone, run_with_helper, task_group
from protocols.base import BadPayload, Buffer, Header, Member, PeerError, PeerGone, Stream, stage_scope
from protocols.pipeline.admission import Lease
from protocols.pipeline.hops import CheckPayload, HandedInput, HopReceiver, HopStreams, HopTicket
from protocols.pipeline.job import JobKind, LeaseLost, Payload, StageJob, StageWork
from protocols.pipeline.leases import LeaseQueue
from protocols.pipeline.messages import (
    CHAIN_METHOD,
    HEADER_LIMIT,
    ChainGranted,
    HopFailed,
    HopInput,
    JobDone,
    JobInput,
    JobOutput,
    LeaseVoid,
    NextHop,
    StageBusy,
    StageRequest,
)
from protocols.pipeline.settings import (
    CALL_LIMIT_SECONDS,
    RETRY_SECONDS,
    SERVER_IDLE_SECONDS,
    PipelineSettings,
)
from protocols.streams.endpoint import ProtocolEndpoint

FRAMES = 4  # of a driver, that wait to be looked at: it has no reason to send more
COMES_WITH = {
    JobKind.FORWARD.value: Payload.ACTIVATION,
    JobKind.LOSS.value: Payload.TARGETS,
    JobKind.BACKWARD.value: Payload.GRADIENT,
}
"""What follows a `JobInput` in a chain."""


@dataclass(frozen=True, slots=True)
class _HopEnd:
    ticket: bytes
    gradient: Buffer | None
    reached: bool
    why: str


_Item: TypeAlias = "tuple[Header, Buffer] | HandedInput | BadPayload | _HopEnd"


class _Inbox:
    """What has come for the present microbatch of one control stream: frames of the driver, the hop, its own hop's end.

    Frames of the driver wait on the stream while `FRAMES` of them are here.
    """

    def __init__(self, stream: Stream, settings: PipelineSettings) -> None:
        self._stream, self._settings = stream, settings
        self._items: asyncio.Queue[_Item] = asyncio.Queue()
        self._room = asyncio.Semaphore(FRAMES)

    def put(self, item: HandedInput | BadPayload | _HopEnd) -> None:
        self._items.put_nowait(item)

    async def get(self) -> _Item:
        item = await self._items.get()
        if isinstance(item, tuple):
            self._room.release()
        return item

    async def read(self) -> None:
        """Read frames until the stream ends, which raises PeerError."""
        stream = self._stream
        while True:
            header, payload = await stream.receive(HEADER_LIMIT), bytearray()
            if isinstance(header, JobInput):
                if header.kind not in COMES_WITH:
                    raise BadPayload(f"a job {header.kind!r} that no chain has")
                payload = bytearray(self._settings.sizes.of(COMES_WITH[header.kind]))
                async with peer_timeout(CALL_LIMIT_SECONDS, stream.peer, "sending a microbatch"):
                    await stream.receive_into(memoryview(payload))
            elif not isinstance(header, NextHop | LeaseVoid | StageRequest):
                raise BadPayload(f"{type(header).__name__} from a driver")
            await self._room.acquire()
            self._items.put_nowait((header, payload))

    async def next_request(self) -> StageRequest:
        """What came too late for the last microbatch is left out."""
        async with peer_timeout(SERVER_IDLE_SECONDS, self._stream.peer, "waiting for its next request"):
            while True:
                item = await self.get()
                if isinstance(item, tuple) and isinstance(item[0], StageRequest):
                    return item[0]


class ChainServer:
    """Serves chains at one replica. `check` is for what other replicas send: they are named if it does not decode.

    `tell` is told of forwards and of hops, with their senders.
    """

    def __init__(
        self,
        endpoint: ProtocolEndpoint,
        settings: PipelineSettings,
        *,
        stage: int,
        work: StageWork,
        leases: LeaseQueue,
        check_request: Callable[[Member, StageRequest], None],
        check: CheckPayload,
        tell: Callable[[str, Lease, Member | None], None],
    ) -> None:
        self.endpoint, self.settings, self.stage, self.work = endpoint, settings, stage, work
        self.leases, self.tell = leases, tell
        self.streams = HopStreams(endpoint, settings, check)
        self.hops = HopReceiver(endpoint, settings, stage, check, endpoint.host.rng("pipeline tickets"))
        self._check_request = check_request
        endpoint.serve(CHAIN_METHOD, StageRequest, self._serve)

    async def _serve(self, stream: Stream, request: StageRequest) -> None:
        watch = raise_when_gone(self.endpoint.host.members, request.sender, stream.deadline)
        inbox = _Inbox(stream, self.settings)

        async def serve() -> None:
            await run_with_helper(self._serve_all(stream, request, inbox), inbox.read())

        async with self.streams.used():
            await run_with_helper(serve(), watch)

    async def _serve_all(self, stream: Stream, request: StageRequest, inbox: _Inbox) -> None:
        driver = request.sender
        while True:
            self._check_request(driver, request)
            lease = await self.leases.granted(request)
            if lease is None:
                await stream.send(StageBusy(RETRY_SECONDS))
            else:
                try:
                    await self._leased(stream, lease, inbox)
                finally:
                    lease.end()
            request = await inbox.next_request()

    async def _leased(self, stream: Stream, lease: Lease, inbox: _Inbox) -> None:
        with self.hops.ticket(lease, inbox.put) as ticket:
            await stream.send(ChainGranted(ticket.name))
            try:
                await _Microbatch(self, stream, lease, inbox, ticket).run()
            except LeaseLost as lost:
                await stream.send(LeaseVoid(str(lost)[:120]))
                return
        self.leases.returned(lease)


class _Microbatch:
    """One microbatch at this replica, from its lease to its count."""

    def __init__(self, server: ChainServer, stream: Stream, lease: Lease, inbox: _Inbox, ticket: HopTicket) -> None:
        self._server, self._stream, self._lease, self._inbox, self._ticket = server, stream, lease, inbox, ticket
        self._is_last = server.stage == server.settings.last
        self._next: NextHop | None = None
        self._hop: HandedInput | None = None

    async def run(self) -> None:
        work, lease = self._server.work, self._lease
        x, targets = await self._inputs()
        if self._is_last:
            last = await work.run(StageJob(JobKind.LOSS, (x, targets)), lease)
            await self._give_back(last.payloads[0], JobKind.LOSS, last.loss)
            return
        (y,) = (await work.run(StageJob(JobKind.FORWARD, (x,)), lease)).payloads
        self._server.tell("forwarded", lease, None)
        await self._stream.send(JobDone(JobKind.FORWARD.value, 0.0))
        gradient = await self._passed_on(y)
        result = await work.run(StageJob(JobKind.BACKWARD, (x, gradient)), lease)
        await self._give_back(result.payloads[0], JobKind.BACKWARD, 0.0)

    async def _inputs(self) -> tuple[Buffer, Buffer]:
        """The activation, from the driver or the stage before; in the last stage the targets, too."""
        x: Buffer | None = None
        targets: Buffer | None = None if self._is_last else b""
        while x is None or targets is None:
            match await self._item():
                case (JobInput(JobKind.FORWARD.value), payload) if x is None:
                    x = payload
                    self._server.hops.end(self._ticket)
                case (JobInput(JobKind.LOSS.value), payload) if targets is None:
                    targets = payload
                case (NextHop() as hop, _) if not self._is_last:
                    self._next = hop
                case HandedInput() as hop if x is None:
                    x, self._hop = hop.x, hop
                    if not self._lease.is_void:
                        self._server.tell("handed", self._lease, hop.sender)
                case HandedInput() | (JobInput(JobKind.FORWARD.value), _):
                    pass  # it has come both ways: its sender had told the driver that it had not sent it
                case (LeaseVoid(why), _) if self._is_last:
                    raise LeaseLost(why)
                case BadPayload() as error:
                    await self._stream.send(HopFailed(self._ticket.name, True, str(error)[:120]))
                case item:
                    raise _unexpected(item)
        return x, targets

    async def _passed_on(self, y: Buffer) -> Buffer:
        """The gradient of the output, from whom the driver names."""
        hopping: asyncio.Task[None] | None = None
        item: _Item = (self._next, b"") if self._next else await self._item()
        async with task_group() as group:
            while True:
                match item:
                    case (NextHop() as hop, _):
                        if hopping:
                            hopping.cancel()
                        self._next, hopping = hop, None
                        if hop.ticket:
                            hopping = group.create_task(self._pass_on(hop, y))
                        else:
                            await self._stream.send(JobOutput(0.0), y)
                    case (JobInput(JobKind.BACKWARD.value), payload) if self._next and not self._next.ticket:
                        return payload
                    case _HopEnd(ticket, gradient, reached, why):
                        if self._next is None or ticket != self._next.ticket:
                            pass  # it has been replaced
                        elif gradient is not None:
                            return gradient
                        else:
                            await self._stream.send(HopFailed(ticket, reached, why))
                    case HandedInput() | BadPayload() | (JobInput(JobKind.FORWARD.value), _):
                        pass  # the input has come both ways
                    case _:
                        raise _unexpected(item)
                item = await self._item()

    async def _pass_on(self, hop: NextHop, y: Buffer) -> None:
        server, lease, gradient, reached, why = self._server, self._lease, None, True, ""
        scope = stage_scope(server.stage + 1)
        me = server.endpoint.me
        header = HopInput(server.settings.run, scope, me, hop.to, lease.driver, lease.number, hop.ticket)
        try:
            gradient = await server.streams.pass_on(header, y)
        except PeerGone as error:
            reached, why = False, str(error)
        except (PeerError, BadPayload, LeaseLost) as error:
            why = str(error)
        self._inbox.put(_HopEnd(hop.ticket, gradient, reached, why[:120]))

    async def _give_back(self, gradient: Buffer, kind: JobKind, loss: float) -> None:
        if self._hop is None:
            await self._stream.send(JobOutput(loss), gradient)
            return
        with suppress(asyncio.InvalidStateError):  # its sender may be gone
            self._hop.gradient.set_result(gradient)
        await self._stream.send(JobDone(kind.value, loss))

    async def _item(self) -> _Item:
        """What comes next, within the lease. Raises `LeaseLost` as soon as it is void: the driver need not wait."""
        over = self._server.leases.until_expired(self._lease, self._stream.peer, until_void=True)
        return await run_with_helper(self._inbox.get(), over)


def _unexpected(item: object) -> BadPayload:
    what = item[0] if isinstance(item, tuple) else item
    return BadPayload(f"{type(what).__name__} where a chain has none")
