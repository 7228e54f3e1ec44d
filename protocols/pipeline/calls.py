"""Calls of a driver: the streams to replicas of other stages, and how a place at one is asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass

from protocols.aio import loop_time, peer_timeout
from protocols.base import BadPayload, Member, PeerError, PeerSilent, Stream, stage_scope
from protocols.pipeline.messages import CHAIN_METHOD, HEADER_LIMIT, ChainGranted, Granted, StageBusy, StageRequest
from protocols.pipeline.settings import (
    DRIVER_IDLE_SECONDS,
    GRANT_SECONDS,
    MICROBATCH_SECONDS,
    STREAM_SECONDS,
    PipelineSettings,
)
from protocols.streams.endpoint import ProtocolEndpoint
from protocols.wire import expect

ANSWER_SECONDS = 5.0  # Time to open a stream; and beyond a replica's own limit, for its answer to travel.


class Abandoned(Exception):
    """A microbatch is given up. What its earlier backwards have counted stays counted."""


class NotCounted(Exception):
    """A call has failed, and certainly counted nothing: it may be made again elsewhere."""


class StageIsBusy(Exception):
    """A replica has no place for the request now, or its outer parameters are behind."""

    def __init__(self, retry_seconds: float) -> None:
        super().__init__(f"busy for {retry_seconds:g} s")
        self.retry_seconds = retry_seconds


@dataclass(slots=True)
class Call:
    member: Member
    stage: int
    stream: Stream
    context: AbstractAsyncContextManager[Stream]
    used_at: float
    ticket: bytes = b""  # of its present lease, if it is of a chain


class CallStreams:
    """A stream to each replica that is called, of one method. `on_opened` is told how long a new one took to open."""

    def __init__(
        self,
        endpoint: ProtocolEndpoint,
        settings: PipelineSettings,
        method: str,
        on_opened: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._endpoint, self._settings, self._method, self._on_opened = endpoint, settings, method, on_opened
        self._granted = ChainGranted if method == CHAIN_METHOD else Granted
        self._open: dict[Member, Call] = {}

    async def request(self, stage: int, member: Member, number: int, trained: int) -> Call:
        """Ask a replica to admit a microbatch or, without a number, a job with its outer parameters.

        Raises `StageIsBusy`, PeerError, BadPayload; no input was sent to it then.
        """
        request = StageRequest(self._settings.run, stage_scope(stage), self._endpoint.me, member, number, trained)
        call = self._open.get(member)
        if call and self._is_usable(call):
            try:
                return await self._ask(call, request)
            except PeerError:
                await self.reset(call)  # it may have closed a stream that was idle for long: try on a new one
        elif call:
            await self._close(call)
        return await self._ask(await self._connect(stage, member), request)

    async def reaches(self, stage: int, member: Member) -> bool:
        """Whether a replica serves the method."""
        try:
            if member not in self._open:
                await self._connect(stage, member)
        except PeerError:
            return False
        return True

    async def reset(self, call: Call, why: Exception | None = None) -> None:
        """Break a stream off, which ends its lease at the replica, and names the replica if `why` is a broken rule."""
        if self._open.get(call.member) is call:
            del self._open[call.member]
            error = why or PeerSilent(call.member.peer, "the microbatch was given up")
            await call.context.__aexit__(type(error), error, None)

    async def end(self, well: bool) -> None:
        for call in tuple(self._open.values()):
            await (self._close(call) if well else self.reset(call))

    async def _ask(self, call: Call, request: StageRequest) -> Call:
        seconds = ANSWER_SECONDS + (GRANT_SECONDS if request.number else 0.0)
        try:
            async with peer_timeout(seconds, call.member.peer, "admitting a microbatch"):
                await call.stream.send(request)
                answer = await call.stream.receive(HEADER_LIMIT)
                if not isinstance(answer, StageBusy):
                    expect(answer, self._granted)
        except (PeerError, BadPayload) as error:
            await self.reset(call, error)
            raise
        except BaseException:
            await self.reset(call)
            raise
        call.used_at = loop_time()
        if isinstance(answer, StageBusy):
            raise StageIsBusy(answer.retry_seconds)
        call.ticket = answer.ticket if isinstance(answer, ChainGranted) else b""
        return call

    async def _connect(self, stage: int, member: Member) -> Call:
        began = loop_time()
        context = self._endpoint.open(member.peer, self._method, began + STREAM_SECONDS)
        async with peer_timeout(ANSWER_SECONDS, member.peer, "opening a stream"):
            stream = await context.__aenter__()
        call = self._open[member] = Call(member, stage, stream, context, loop_time())
        self._on_opened(call.used_at - began)
        return call

    def _is_usable(self, call: Call) -> bool:
        now = loop_time()
        return now - call.used_at < DRIVER_IDLE_SECONDS and call.stream.deadline - now > MICROBATCH_SECONDS

    async def _close(self, call: Call) -> None:
        del self._open[call.member]
        with suppress(PeerError):
            await call.context.__aexit__(None, None, None)
