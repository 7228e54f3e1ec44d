"""A peer of stage 0: it draws microbatches, and calls one replica of each other stage itself, forwards and backwards.

Up to W microbatches are in flight, each in a lane: a task with streams of its own. A forward that fails is repeated at
another replica, since it counts nothing. A backward runs where its forward ran, in the same weights, or not at all: at
a replica that has drifted its gradient would be wrong. What may have been counted is never sent again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from protocols.aio import Notifier, loop_time, peer_timeout, task_group
from protocols.base import BadPayload, Buffer, Deadline, Member, PeerError, PeerSilent, Stream, stage_scope
from protocols.pipeline.admission import Lease, StepAdmission
from protocols.pipeline.messages import (
    HEADER_LIMIT,
    METHOD,
    BackwardRequest,
    ForwardOutput,
    Granted,
    InputGradient,
    LeaseVoid,
    LossResult,
    MicrobatchInput,
    MicrobatchRequest,
    MicrobatchTargets,
    StageBusy,
)
from protocols.pipeline.routing import ReplicaRouter
from protocols.pipeline.settings import (
    CALL_FLOOR_SECONDS,
    CALL_LIMIT_SECONDS,
    CALL_MULTIPLE,
    DRIVER_IDLE_SECONDS,
    GRANT_SECONDS,
    MAX_FAILURES,
    MICROBATCH_SECONDS,
    STREAM_SECONDS,
    PipelineEvent,
    PipelineSettings,
    ignore_event,
)
from protocols.pipeline.stages import StageDirectory, by_stage
from protocols.pipeline.work import FirstStageWork, LeaseLost
from protocols.streams.endpoint import ProtocolEndpoint
from protocols.wire import HeaderType, expect

T = TypeVar("T")

ANSWER_SECONDS = 5.0
"""Time to open a stream; and beyond a replica's own limit, for its answer to travel."""

LOOK_SECONDS = 1.0
"""How often a driver that cannot call anybody looks again."""


class Abandoned(Exception):
    """A microbatch is given up. What its earlier backwards have counted stays counted."""


class NotCounted(Exception):
    """A call has failed, and certainly counted nothing: it may be made again elsewhere."""


class StageIsBusy(Exception):
    """A replica has no place for the microbatch now."""

    def __init__(self, retry_seconds: float) -> None:
        super().__init__(f"busy for {retry_seconds:g} s")
        self.retry_seconds = retry_seconds


@dataclass(slots=True)
class _Call:
    """A stream to a replica, idle or in the middle of a microbatch."""

    member: Member
    stage: int
    stream: Stream
    context: AbstractAsyncContextManager[Stream]
    used_at: float


class PipelineDriver:
    """Drives the microbatches of one peer of stage 0.

    Attributes:
        admission: which microbatches this peer's own step consists of.
        routers: for each other stage, how its replicas are chosen.
        watch: is passed every event.
    """

    def __init__(
        self,
        endpoint: ProtocolEndpoint,
        settings: PipelineSettings,
        work: FirstStageWork,
        directory: StageDirectory,
        watch: Callable[[PipelineEvent], None] = ignore_event,
    ) -> None:
        self.endpoint, self.settings, self.work = endpoint, settings, work
        self._directory, self.watch = directory, watch
        self._notifier = Notifier()
        self.admission = StepAdmission(settings.batches, self._notifier.notify, self._tell)
        rng = endpoint.host.rng("pipeline router")
        self.routers = {stage: ReplicaRouter(rng) for stage in range(1, settings.stages)}
        self._number = 0

    @property
    def without_replicas(self) -> tuple[int, ...]:
        """Stages that no live member is in: nothing is started meanwhile."""
        return tuple(stage for stage, members in self._replicas().items() if stage and not members)

    async def until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until the condition, which is asked whenever the admission changes, holds; whether it does in time."""
        return await self._notifier.reached(condition, deadline)

    async def run(self) -> None:
        """Keep the window full until cancelled. Then all streams are reset, and all leases end."""
        drivers = len(self._replicas()[0])
        async with task_group() as group:
            for _ in range(self.settings.window(drivers)):
                group.create_task(_Lane(self).run())

    # -- what the lanes use -------------------------------------------------------------------------------------------

    async def start(self) -> Lease:
        """Wait for a place in this peer's own step and for a replica of every stage; then begin a microbatch."""
        me = self.endpoint.me
        while True:
            ready = await self._notifier.reached(
                lambda: self.admission.may_grant(me, 1, loop_time()), loop_time() + LOOK_SECONDS
            )
            if ready and not self.without_replicas:
                self._number += 1
                return self.admission.grant(me, self._number, loop_time())
            if ready:
                members = self.endpoint.host.members
                await members.changed(members.version, loop_time() + LOOK_SECONDS)

    async def route(self, stage: int, deadline: Deadline) -> Member:
        """The replica to call next.

        Raises:
            Abandoned: none can be called before the deadline.
        """
        members, router = self.endpoint.host.members, self.routers[stage]
        while loop_time() < deadline:
            version = members.version
            live = {member.peer: member for member in self._replicas()[stage]}
            peer = router.choose(tuple(live), loop_time())
            if peer is not None:
                return live[peer]
            # not until the end of a ban in one go: a probe that succeeds ends it sooner
            retry_at = min(deadline, router.retry_at(tuple(live)) or deadline, loop_time() + LOOK_SECONDS)
            await members.changed(version, retry_at)
        raise Abandoned(f"no replica of stage {stage}")

    def report(self, kind: str, lease: Lease, why: str = "") -> None:
        """Report what became of a microbatch."""
        self.watch(PipelineEvent(kind, lease.driver, lease.number, 0, self.endpoint.me, lease.epoch, why))

    def _replicas(self) -> dict[int, tuple[Member, ...]]:
        live = self.endpoint.host.members.live()
        return dict(by_stage(live, self._directory, self.settings.stages))

    def _tell(self, kind: str, lease: Lease) -> None:
        self.report(kind, lease)


class _Lane:
    """One microbatch after the other, over streams that no other lane uses."""

    def __init__(self, driver: PipelineDriver) -> None:
        self._driver, self._settings, self._work = driver, driver.settings, driver.work
        self._streams = _Streams(driver)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                lease = await self._driver.start()
                try:
                    await self._microbatch(lease)
                finally:
                    lease.end()
        finally:
            await self._streams.reset_all()

    async def _microbatch(self, lease: Lease) -> None:
        deadline = loop_time() + MICROBATCH_SECONDS
        held: list[_Call] = []
        try:
            x: Buffer
            batch, x, targets = await self._work.draw(lease)
            for stage in range(1, self._settings.last):
                call, x = await self._call(stage, lease, partial(self._forward, x), deadline)
                held.append(call)
            _, (loss, gradient) = await self._call(
                self._settings.last, lease, partial(self._loss, x, targets), deadline
            )
            while held:
                gradient = await self._backward(held[-1], gradient, deadline)
                held.pop()
            await self._work.finish(batch, gradient, loss, lease)
        except (Abandoned, LeaseLost, BadPayload) as error:
            self._driver.report("abandoned", lease, str(error))
        else:
            self._driver.report("done", lease)
        finally:
            for call in held:  # their replicas wait for a backward that will not come
                await self._streams.reset(call)

    # -- calls --------------------------------------------------------------------------------------------------------

    async def _call(
        self, stage: int, lease: Lease, ask: Callable[[_Call], Awaitable[T]], deadline: Deadline
    ) -> tuple[_Call, T]:
        """Ask one replica after the other, until one answers.

        Raises:
            Abandoned: too many failed, one may have counted the microbatch, or the deadline has come.
        """
        router = self._driver.routers[stage]
        for _ in range(MAX_FAILURES):
            call, began = await self._granted(stage, lease, deadline)
            try:
                async with self._in_time(call, deadline):
                    answer = await ask(call)
            except NotCounted:
                continue
            except (PeerError, BadPayload) as error:
                router.failed(call.member.peer, loop_time(), loop_time() - began)
                await self._streams.reset(call, error)
                if stage == self._settings.last:
                    raise Abandoned(f"stage {stage} may have counted it: {error}") from error
            else:
                router.succeeded(call.member.peer, loop_time() - began)
                return call, answer
        raise Abandoned(f"{MAX_FAILURES} calls to stage {stage} failed")

    async def _granted(self, stage: int, lease: Lease, deadline: Deadline) -> tuple[_Call, float]:
        """A replica that has a place for the microbatch, and when it was asked. Nothing has been sent to it yet.

        Raises:
            Abandoned: too many cannot be reached, or the deadline has come.
        """
        failures, router = 0, self._driver.routers[stage]
        while failures < MAX_FAILURES:
            member, began = await self._driver.route(stage, deadline), loop_time()
            self._driver.watch(PipelineEvent("asked", lease.driver, lease.number, stage, member, lease.epoch))
            try:
                call = await self._streams.request(stage, member, lease.number)
            except StageIsBusy as busy:
                router.busy(member.peer, loop_time(), busy.retry_seconds)
            except (PeerError, BadPayload):
                router.failed(member.peer, loop_time())
                failures += 1
            else:
                router.granted(member.peer)
                return call, began
        raise Abandoned(f"{MAX_FAILURES} replicas of stage {stage} cannot be reached")

    async def _forward(self, x: Buffer, call: _Call) -> bytearray:
        await call.stream.send(MicrobatchInput(), x)
        await _answer(call, ForwardOutput)
        return await self._payload(call)

    async def _loss(self, x: Buffer, targets: Buffer, call: _Call) -> tuple[float, bytearray]:
        await call.stream.send(MicrobatchInput(), x)
        await call.stream.send(MicrobatchTargets(), targets)
        result = await _answer(call, LossResult)
        return result.loss, await self._payload(call)

    async def _backward(self, call: _Call, gradient: Buffer, deadline: Deadline) -> bytearray:
        """The gradient of the stage's input.

        Raises:
            Abandoned: it failed, or the replica's weights have changed.
        """
        try:
            async with self._in_time(call, deadline):
                await call.stream.send(BackwardRequest(), gradient)
                await _answer(call, InputGradient)
                return await self._payload(call)
        except NotCounted as error:
            raise Abandoned(str(error)) from error
        except (PeerError, BadPayload) as error:
            self._driver.routers[call.stage].failed(call.member.peer, loop_time())
            await self._streams.reset(call, error)
            raise Abandoned(f"its backward failed: {error}") from error

    def _in_time(self, call: _Call, deadline: Deadline) -> AbstractAsyncContextManager[None]:
        usual = self._driver.routers[call.stage].usual_seconds(call.member.peer)
        seconds = min(max(CALL_FLOOR_SECONDS, CALL_MULTIPLE * usual), CALL_LIMIT_SECONDS, deadline - loop_time())
        return peer_timeout(seconds, call.member.peer, "computing a microbatch")

    async def _payload(self, call: _Call) -> bytearray:
        payload = bytearray(self._settings.activation_bytes)
        await call.stream.receive_into(memoryview(payload))
        self._work.check(payload)
        return payload


async def _answer(call: _Call, kind: type[HeaderType]) -> HeaderType:
    """The replica's answer.

    Raises:
        NotCounted: it says that it has not counted the microbatch.
        BadPayload: it is none of both.
    """
    header = await call.stream.receive(HEADER_LIMIT)
    if isinstance(header, LeaseVoid):
        raise NotCounted(header.why)
    return expect(header, kind)


class _Streams:
    """A lane's streams: one at most to each replica, kept while it is in use."""

    def __init__(self, driver: PipelineDriver) -> None:
        self._endpoint, self._settings = driver.endpoint, driver.settings
        self._open: dict[Member, _Call] = {}

    async def request(self, stage: int, member: Member, number: int) -> _Call:
        """Ask a replica to admit a microbatch.

        Raises:
            StageIsBusy: it has no place for it now.
            PeerError, BadPayload: it cannot be reached, or does not answer as it should. Nothing was sent to it.
        """
        call = self._open.get(member)
        if call and self._is_usable(call):
            try:
                return await self._ask(call, number)
            except PeerError:
                await self.reset(call)  # it may have closed a stream that was idle for long: try on a new one
        elif call:
            await self._close(call)
        return await self._ask(await self._connect(stage, member), number)

    async def reset(self, call: _Call, why: Exception | None = None) -> None:
        """Break a stream off, which ends its lease at the replica.

        Args:
            why: what the replica has done; it is named if it broke a rule.
        """
        if self._open.get(call.member) is call:
            del self._open[call.member]
            error = why or PeerSilent(call.member.peer, "the microbatch was given up")
            await call.context.__aexit__(type(error), error, None)

    async def reset_all(self) -> None:
        for call in tuple(self._open.values()):
            await self.reset(call)

    async def _ask(self, call: _Call, number: int) -> _Call:
        request = MicrobatchRequest(self._settings.run, stage_scope(call.stage), self._endpoint.me, call.member, number)
        try:
            async with peer_timeout(GRANT_SECONDS + ANSWER_SECONDS, call.member.peer, "admitting a microbatch"):
                await call.stream.send(request)
                answer = await call.stream.receive(HEADER_LIMIT)
                if not isinstance(answer, StageBusy):
                    expect(answer, Granted)
        except (PeerError, BadPayload) as error:
            await self.reset(call, error)
            raise
        except BaseException:
            await self.reset(call)
            raise
        call.used_at = loop_time()
        if isinstance(answer, StageBusy):
            raise StageIsBusy(answer.retry_seconds)
        return call

    async def _connect(self, stage: int, member: Member) -> _Call:
        deadline = loop_time() + STREAM_SECONDS
        context = self._endpoint.open(member.peer, METHOD, deadline)
        async with peer_timeout(ANSWER_SECONDS, member.peer, "opening a stream"):
            stream = await context.__aenter__()
        call = self._open[member] = _Call(member, stage, stream, context, loop_time())
        return call

    def _is_usable(self, call: _Call) -> bool:
        now = loop_time()
        return now - call.used_at < DRIVER_IDLE_SECONDS and call.stream.deadline - now > MICROBATCH_SECONDS

    async def _close(self, call: _Call) -> None:
        del self._open[call.member]
        with suppress(PeerError):
            await call.context.__aexit__(None, None, None)
