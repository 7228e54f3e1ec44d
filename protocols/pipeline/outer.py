"""Evaluation and text through the pipeline, with the outer parameters of each stage's replicas: no lease, no count.

A peer of stage 0 asks one replica of every other stage itself, as a driver does. One request is one stream. Nothing
that is computed here changes a replica, so any call may be made again, at the same replica or at another.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from statistics import fmean
from typing import TypeVar

from protocols.aio import loop_time, peer_timeout, run_with_helper, task_group, until_gone
from protocols.base import (
    BadPayload,
    Buffer,
    Deadline,
    Header,
    Member,
    Members,
    PeerError,
    PeerSilent,
    Stream,
    stage_scope,
)
from protocols.pipeline.messages import (
    HEADER_LIMIT,
    OUTER_METHOD,
    Granted,
    MicrobatchInput,
    MicrobatchTargets,
    OuterLoss,
    OuterOutput,
    OuterRequest,
    StageBusy,
)
from protocols.pipeline.settings import CALL_LIMIT_SECONDS, MAX_FAILURES, PipelineSettings
from protocols.pipeline.stages import StageDirectory, by_stage
from protocols.pipeline.work import FirstOuterWork, LeaseLost, OuterWork
from protocols.streams.endpoint import ProtocolEndpoint
from protocols.wire import expect

T = TypeVar("T")

MAX_REQUESTS = 2
"""Requests that a replica computes at once, and held-out microbatches that a client has in flight."""
ANSWER_SECONDS = 5.0
"""Time to open a stream and to grant a request; a replica does not keep one waiting."""
RETRY_SECONDS = 0.25
"""Pause after a failure, and after "busy"."""
LOOK_SECONDS = 1.0
"""How often a client looks for a replica of a stage that is empty."""


class OuterServer:
    """Serves, at one replica, what is computed with its outer parameters.

    A request lasts at most `CALL_LIMIT_SECONDS`, so a peer that sends no payload keeps its place no longer.
    """

    def __init__(
        self,
        endpoint: ProtocolEndpoint,
        settings: PipelineSettings,
        stage: int,
        work: OuterWork,
        trained: Callable[[], int],
    ) -> None:
        """
        Args:
            endpoint: of the whole run's members, bound to no round: it checks the sender and the receiver.
            trained: training rounds whose result this replica's outer parameters have.
        """
        self._endpoint, self._settings, self._stage, self._work = endpoint, settings, stage, work
        self._trained, self._running = trained, 0
        endpoint.serve(OUTER_METHOD, OuterRequest, self._serve)

    async def _serve(self, stream: Stream, request: OuterRequest) -> None:
        self._check(request)
        if self._running >= MAX_REQUESTS or self._trained() < request.trained:
            async with peer_timeout(ANSWER_SECONDS, stream.peer, "being refused a request"):
                await stream.send(StageBusy(RETRY_SECONDS))
            return
        self._running += 1
        try:
            async with peer_timeout(CALL_LIMIT_SECONDS, stream.peer, "asking for outer parameters"):
                watch = _raise_when_gone(self._endpoint.host.members, request.sender, stream.deadline)
                with suppress(LeaseLost):  # the worker died: the stream ends without an answer
                    await run_with_helper(self._answer(stream, request), watch)
        finally:
            self._running -= 1

    def _check(self, request: OuterRequest) -> None:
        """The endpoint has checked sender and receiver.

        Raises:
            BadPayload: it is for another stage, or asks for logits that this replica cannot give.
        """
        if (request.run, request.scope) != (self._settings.run, stage_scope(self._stage)):
            raise BadPayload("a request of another run or stage")
        if request.position and not (self._stage == self._settings.last and self._settings.logit_bytes):
            raise BadPayload("a request for logits that this replica does not give")

    async def _answer(self, stream: Stream, request: OuterRequest) -> None:
        settings, work = self._settings, self._work
        await stream.send(Granted())
        x = await _receive(stream, MicrobatchInput, settings.activation_bytes)
        if self._stage != settings.last:
            await stream.send(OuterOutput(), await work.outer_forward(x))
        elif request.position:
            await stream.send(OuterOutput(), await work.outer_logits(x, request.position))
        else:
            targets = await _receive(stream, MicrobatchTargets, settings.target_bytes)
            await stream.send(OuterLoss(await work.outer_loss(x, targets)))


class OuterClient:
    """Evaluates the outer parameters, and computes logits with them, at a peer of stage 0.

    `trained` is the number of training rounds whose result every stage must have. A stage may be further: if a round
    ends during an evaluation, its later microbatches meet newer parameters.
    """

    def __init__(
        self, endpoint: ProtocolEndpoint, settings: PipelineSettings, work: FirstOuterWork, directory: StageDirectory
    ) -> None:
        self._endpoint, self._settings, self._work, self._directory = endpoint, settings, work, directory
        self._rng = endpoint.host.rng("pipeline outer")

    async def evaluate(self, trained: int, deadline: Deadline, stride: int = 1) -> float:
        """Mean loss over the held-out microbatches, in nats per token; nan if there are none.

        Args:
            stride: take every `stride`-th microbatch only.

        Raises:
            TimeoutError: it is not complete at the deadline, for instance because a stage is empty, or because the
                parameters give no finite loss.
        """
        indices, losses = itertools.count(0, stride), dict[int, float]()

        async def lane() -> None:
            for index in indices:
                sample = await self._work.outer_sample(index)
                if sample is None:
                    return
                x, targets = sample
                losses[index] = await self._through(x, trained, 0, partial(_ask_loss, targets))

        async with asyncio.timeout_at(deadline), task_group() as group:
            for _ in range(MAX_REQUESTS):
                group.create_task(lane())
        return fmean(losses[index] for index in sorted(losses)) if losses else math.nan

    async def logits(self, tokens: Buffer, position: int, trained: int, deadline: Deadline) -> bytes:
        """The logits of one position, float32 (rows, classes).

        Args:
            tokens: inputs of one microbatch, uint8 (rows * positions).
            position: counted from 1.

        Raises:
            ValueError: no such position, or the run gives no logits.
            TimeoutError: no answer at the deadline.
        """
        if position < 1 or not self._settings.logit_bytes:
            raise ValueError(f"no logits of position {position} in this run")
        async with asyncio.timeout_at(deadline):
            x = await self._work.outer_first(tokens)
            ask = partial(_ask_output, self._settings.logit_bytes)
            return bytes(await self._through(x, trained, position, ask))

    async def _through(
        self, x: Buffer, trained: int, position: int, ask_last: Callable[[Buffer, Stream], Awaitable[T]]
    ) -> T:
        """Send an activation through all later stages, again and again until it succeeds.

        If a stage keeps failing, the path starts anew: what the stage before has sent may be to blame.
        """
        settings = self._settings
        while True:
            try:
                y = x
                for stage in range(1, settings.last):
                    ask = partial(_ask_output, settings.activation_bytes, y)
                    y = await self._call(stage, trained, 0, ask)
                return await self._call(settings.last, trained, position, partial(ask_last, y))
            except _StageFailed:
                continue

    async def _call(self, stage: int, trained: int, position: int, ask: Callable[[Stream], Awaitable[T]]) -> T:
        """Ask one replica after the other, until one answers.

        Raises:
            _StageFailed: `MAX_FAILURES` calls failed. "Busy" is no failure.
        """
        failures, last = 0, None
        while failures < MAX_FAILURES:
            member = last = await self._choose(stage, last)
            request = OuterRequest(self._settings.run, stage_scope(stage), self._endpoint.me, member, trained, position)
            watch = _raise_when_gone(self._endpoint.host.members, member, loop_time() + CALL_LIMIT_SECONDS)
            try:
                return await run_with_helper(self._ask(request, ask), watch)
            except _Busy:
                pass
            except (PeerError, BadPayload):
                failures += 1
            await asyncio.sleep(RETRY_SECONDS * self._rng.uniform(0.5, 1.5))
        raise _StageFailed

    async def _choose(self, stage: int, last: Member | None) -> Member:
        """A live replica of a stage, if possible another than the last one. Waits while there is none."""
        members = self._endpoint.host.members
        while True:
            version = members.version
            live = by_stage(members.live(), self._directory, self._settings.stages)[stage]
            if live:
                return self._rng.choice([each for each in live if each != last] or live)
            await members.changed(version, loop_time() + LOOK_SECONDS)

    async def _ask(self, request: OuterRequest, ask: Callable[[Stream], Awaitable[T]]) -> T:
        """One call over a stream of its own.

        Raises:
            _Busy: the replica has no place, or is behind.
            PeerError, BadPayload: it failed.
        """
        peer = request.to.peer
        async with AsyncExitStack() as stack:
            async with peer_timeout(ANSWER_SECONDS, peer, "granting a request"):
                opening = self._endpoint.open(peer, OUTER_METHOD, loop_time() + CALL_LIMIT_SECONDS)
                stream = await stack.enter_async_context(opening)
                await stream.send(request)
                answer = await stream.receive(HEADER_LIMIT)
            if isinstance(answer, StageBusy):
                raise _Busy
            expect(answer, Granted)
            return await ask(stream)


class _Busy(Exception):
    """A replica has no place, or its outer parameters are behind."""


class _StageFailed(Exception):
    """Several calls to a stage failed, one after the other."""


async def _ask_output(size: int, x: Buffer, stream: Stream) -> bytearray:
    """`size` bytes: an activation, or logits."""
    await stream.send(MicrobatchInput(), x)
    return await _receive(stream, OuterOutput, size)


async def _ask_loss(targets: Buffer, x: Buffer, stream: Stream) -> float:
    await stream.send(MicrobatchInput(), x)
    await stream.send(MicrobatchTargets(), targets)
    return expect(await stream.receive(HEADER_LIMIT), OuterLoss).loss


async def _receive(stream: Stream, kind: type[Header], size: int) -> bytearray:
    expect(await stream.receive(HEADER_LIMIT), kind)
    payload = bytearray(size)
    await stream.receive_into(memoryview(payload))
    return payload


async def _raise_when_gone(members: Members, member: Member, deadline: Deadline) -> None:
    """
    Raises:
        PeerSilent: the member is no longer live. Else this returns at the deadline.
    """
    if await until_gone(members, [member], deadline):
        raise PeerSilent(member.peer, "is gone")
