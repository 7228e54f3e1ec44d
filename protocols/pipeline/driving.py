"""A peer of stage 0: it draws microbatches, and calls one replica of each other stage itself, forwards and backwards.

Up to W microbatches are in flight, each in a lane: a task with streams of its own. A forward that fails is repeated at
another replica. A backward runs where its forward ran, in the same weights, or not at all: at a replica that has
drifted its gradient would be wrong. What may have been counted is never sent again. Evaluation and text take the same
way without leases, with the outer parameters of each replica, and may be repeated anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from protocols.aio import loop_time, peer_timeout, raise_when_gone, run_with_helper, task_group
from protocols.base import BadPayload, Buffer, Deadline, Member, PeerError, PeerGone, PeerId
from protocols.pipeline.admission import Lease, StepAdmission
from protocols.pipeline.calls import Abandoned, Call, CallStreams, NotCounted, StageIsBusy
from protocols.pipeline.chained import ChainedMicrobatch
from protocols.pipeline.fan_out import FanOut
from protocols.pipeline.held_out import HeldOutLoss
from protocols.pipeline.job import JobKind, JobResult, LeaseLost, Payload, StageJob, StageWork, VersionPassed
from protocols.pipeline.messages import (
    CHAIN_METHOD,
    HEADER_LIMIT,
    METHOD,
    OUTER_METHOD,
    JobInput,
    JobOutput,
    LeaseVoid,
    OuterOutput,
)
from protocols.pipeline.routing import ReplicaRouter
from protocols.pipeline.settings import (
    CALL_FLOOR_SECONDS,
    CALL_LIMIT_SECONDS,
    CALL_MULTIPLE,
    MAX_FAILURES,
    MAX_REQUESTS,
    MICROBATCH_SECONDS,
    PipelineEvent,
    PipelineSettings,
    ignore_event,
)
from protocols.pipeline.stages import StageDirectory, by_stage
from protocols.pipeline.ways import BrokenPairs, Chains, Load, LoadMeter, Way, chosen_way
from protocols.streams.endpoint import ProtocolEndpoint
from protocols.wire import expect

T = TypeVar("T")

LOOK_SECONDS = 1.0  # how often a driver that cannot call any replica looks again
OUTER_RETRY_SECONDS = 0.25
"""How long a replica is left alone that could not compute with its outer parameters, or was busy."""


class PipelineDriver:
    """Drives the microbatches of one peer of stage 0, and evaluates through the pipeline.

    `check` raises `BadPayload` if what a replica gave does not decode: else the next stage would blame the driver.
    `upload` is that of this peer's line in bytes/s, `job_seconds` the time that this stage computes for a microbatch; 0
    if they are not known. With `Chains.AUTO` they choose the way of a round's microbatches; `on_way` is told of the
    first choice, and of each change.
    """

    def __init__(
        self,
        endpoint: ProtocolEndpoint,
        settings: PipelineSettings,
        *,
        work: StageWork,
        directory: StageDirectory,
        check: Callable[[Buffer, Payload], None] = lambda data, payload: None,
        chains: Chains = Chains.NEVER,
        upload: Callable[[], float] = lambda: 0.0,
        job_seconds: Callable[[], float] = lambda: 0.0,
        on_way: Callable[[Way], None] = lambda way: None,
        watch: Callable[[PipelineEvent], None] = ignore_event,
    ) -> None:
        self.endpoint, self.settings, self.work, self.check = endpoint, settings, work, check
        self._directory, self.watch = directory, watch
        self.admission = StepAdmission(settings.batches, self.report, settings.lookahead)
        rng, later = endpoint.host.rng("pipeline router"), range(1, settings.stages)
        self.routers = {stage: ReplicaRouter(rng) for stage in later}
        outer_rng = endpoint.host.rng("pipeline outer")  # what a replica refuses here, it may well do in training
        self.outer_routers = {stage: ReplicaRouter(outer_rng, OUTER_RETRY_SECONDS) for stage in later}
        self._fan_outs = {stage: FanOut(endpoint.me.peer) for stage in later}
        self._number = 0
        self.way, self.meter, self.pairs = Way(False, ""), LoadMeter(), BrokenPairs()
        self._chains, self._upload, self._job_seconds, self._on_way = chains, upload, job_seconds, on_way

    @property
    def without_replicas(self) -> tuple[int, ...]:
        """Stages that no live member is in: nothing is started meanwhile."""
        return tuple(stage for stage, members in self._replicas().items() if stage and not members)

    async def run(self) -> None:
        """Keep the window full until cancelled. Then all streams are reset, and all leases end."""
        drivers = len(self._replicas()[0])
        self._choose_way()
        self.meter.begin(loop_time())
        try:
            async with task_group() as group:
                for _ in range(self.settings.window(drivers)):
                    group.create_task(_Lane(self).run())
        finally:
            self.meter.end(loop_time())

    def _choose_way(self) -> None:
        meter, computing_seconds = self.meter, self.settings.stages * self._job_seconds()
        load = Load(meter.rate, self._upload(), meter.trip_seconds, computing_seconds)
        before = self.way
        self.way = chosen_way(self.settings, self._chains, load, before.is_chain)
        if self.way.why and (not before.why or before.is_chain != self.way.is_chain):
            self._on_way(self.way)

    @property
    def is_chained(self) -> bool:
        """Whether the next microbatch goes in a chain. It does not while a replica that it uses serves none."""
        if not self.way.is_chain:
            return False
        me, now = self.endpoint.me, loop_time()
        replicas = self._replicas()
        used = [
            member
            for stage, router in self.routers.items()
            for member in self._used(stage, replicas[stage], router).values()
        ]
        return not any(self.pairs.has(me, member, now) for member in used)

    # -- evaluation and text ------------------------------------------------------------------------------------------

    async def evaluate(self, found: HeldOutLoss, deadline: Deadline) -> None:
        """Fill `found` with losses of held-out microbatches; what it has when this is cancelled or fails is valid.

        Each is of the version that `found` names, at all stages. `VersionPassed` if one has gone on to another;
        `LeaseLost`. `TimeoutError` at the deadline, for instance because a stage is empty, or the parameters give no
        finite loss.
        """

        async def evaluate() -> None:
            async with _Lane(self, found.trained) as lane:
                while (index := found.next()) is not None:
                    sample = await self.work.run(StageJob(JobKind.OUTER_SAMPLE, number=index))
                    _require_version(sample, found.trained, 0)
                    found.exist = sample.number
                    if not sample.payloads:
                        found.skip()
                        continue
                    x, targets = sample.payloads
                    result = await lane.through(x, JobKind.OUTER_LOSS, targets, deadline=deadline, exactly=True)
                    found.add(index, result.loss)

        async with asyncio.timeout_at(deadline), task_group() as group:
            for _ in range(MAX_REQUESTS):
                group.create_task(evaluate())
        found.is_whole = True

    async def logits(self, tokens: Buffer, position: int, trained: int, deadline: Deadline) -> bytes:
        """Of one position, from 1, of a microbatch (uint8, rows * positions): float32 (rows, classes).

        Raises `ValueError` without such a position or logits; `TimeoutError`.
        """
        if position < 1 or not self.settings.sizes.logit_bytes:
            raise ValueError(f"no logits of position {position} in this run")
        async with asyncio.timeout_at(deadline), _Lane(self, trained) as lane:
            (x,) = (await self.work.run(StageJob(JobKind.OUTER_FIRST, (tokens,)))).payloads
            (found,) = (await lane.through(x, JobKind.OUTER_LOGITS, number=position, deadline=deadline)).payloads
            return bytes(found)

    # -- what the lanes use -------------------------------------------------------------------------------------------

    async def start(self) -> Lease:
        me = self.endpoint.me
        while True:
            ready = await self.admission.changed.reached(
                lambda: self.admission.may_grant(me, 1, loop_time()), loop_time() + LOOK_SECONDS
            )
            if ready and not self.without_replicas:
                self._number += 1
                return self.admission.grant(me, self._number, loop_time())
            if ready:
                members = self.endpoint.host.members
                await members.changed(members.version, loop_time() + LOOK_SECONDS)

    async def route(self, stage: int, router: ReplicaRouter, deadline: Deadline) -> Member:
        """The replica to call next. Raises `Abandoned` if none can be called before the deadline."""
        members = self.endpoint.host.members
        while loop_time() < deadline:
            version = members.version
            used = self._used(stage, self._replicas()[stage], router)
            peer = router.choose(tuple(used), loop_time())
            if peer is not None:
                return used[peer]
            # not until the end of a ban in one go: a probe that succeeds ends it sooner
            retry_at = min(deadline, router.retry_at(tuple(used)) or deadline, loop_time() + LOOK_SECONDS)
            await members.changed(version, retry_at)
        raise Abandoned(f"no replica of stage {stage}")

    def _used(self, stage: int, replicas: Sequence[Member], router: ReplicaRouter) -> dict[PeerId, Member]:
        """Those of a stage's live replicas that this driver uses."""
        live, now = {member.peer: member for member in replicas}, loop_time()
        used = self._fan_outs[stage].of(tuple(live), lambda peer: router.is_given_up(peer, now))
        return {peer: live[peer] for peer in used}

    def tell(self, kind: str, lease: Lease | None, stage: int, replica: Member) -> None:
        """Of what this driver does with a replica of another stage."""
        if lease:
            self.watch(PipelineEvent(kind, lease.driver, lease.number, stage, replica, lease.epoch))

    def report(self, kind: str, lease: Lease, why: str = "") -> None:
        self.watch(PipelineEvent(kind, lease.driver, lease.number, 0, self.endpoint.me, lease.epoch, why))

    def _replicas(self) -> dict[int, tuple[Member, ...]]:
        live = self.endpoint.host.members.live()
        return dict(by_stage(live, self._directory, self.settings.stages))


class _Lane:
    """One microbatch after the other, over streams that no other lane uses; or, as a context, jobs without leases."""

    def __init__(self, driver: PipelineDriver, trained: int | None = None) -> None:
        """`trained` is for jobs without leases: the rounds whose result the outer parameters must have."""
        self._driver, self._settings, self._work, self._trained = driver, driver.settings, driver.work, trained or 0
        self._streams, self._chained = (
            CallStreams(driver.endpoint, driver.settings, method, driver.meter.opened)
            for method in (METHOD if trained is None else OUTER_METHOD, CHAIN_METHOD)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._streams.end(well=error is None)
        await self._chained.end(well=error is None)

    async def run(self) -> None:
        async with self:
            while True:
                lease = await self._driver.start()
                try:
                    await self._microbatch(lease)
                finally:
                    lease.end()

    async def _microbatch(self, lease: Lease) -> None:
        deadline = loop_time() + MICROBATCH_SECONDS
        try:
            drawn = await self._work.run(StageJob(JobKind.DRAW), lease)
            self._driver.report("forwarded", lease)
            await (self._chain if self._driver.is_chained else self._star)(drawn, lease, deadline)
        except (Abandoned, LeaseLost, BadPayload) as error:
            self._driver.report("abandoned", lease, str(error))
        else:
            self._driver.meter.done()
            self._driver.report("done", lease)

    async def _star(self, drawn: JobResult, lease: Lease, deadline: Deadline) -> None:
        held: list[Call] = []
        x, targets = drawn.payloads
        try:
            for stage in range(1, self._settings.last):
                call, result = await self._call(stage, StageJob(JobKind.FORWARD, (x,)), lease, deadline)
                (x,) = result.payloads
                held.append(call)
            _, last = await self._call(self._settings.last, StageJob(JobKind.LOSS, (x, targets)), lease, deadline)
            (gradient,) = last.payloads
            while held:
                gradient = await self._backward(held[-1], gradient, lease, deadline)
                held.pop()
            await self._work.run(StageJob(JobKind.FINISH, (gradient,), drawn.number, last.loss), lease)
        finally:
            for call in held:  # their replicas wait for a backward that will not come
                await self._streams.reset(call)

    async def _chain(self, drawn: JobResult, lease: Lease, deadline: Deadline) -> None:
        chain = ChainedMicrobatch(
            self._driver,
            self._chained,
            granted=lambda stage: self._granted(stage, lease, deadline, self._chained),
            while_live=lambda stage, member, call: self._while_live(stage, member, lease, call),
            deadline=deadline,
        )
        async with chain:
            gradient, loss = await chain.through(*drawn.payloads)
            await self._work.run(StageJob(JobKind.FINISH, (gradient,), drawn.number, loss), lease)

    async def through(
        self, x: Buffer, last: JobKind, *more: Buffer, number: int = 0, deadline: Deadline, exactly: bool = False
    ) -> JobResult:
        """Send an activation through all later stages, from the first one anew until it succeeds.

        `exactly`: with the version that was asked for. Raises `VersionPassed` if a stage has gone on to a later one.
        """
        kinds = dict.fromkeys(range(1, self._settings.last), JobKind.OUTER_FORWARD) | {self._settings.last: last}
        while loop_time() < deadline:
            with suppress(Abandoned):
                y, result = x, JobResult()
                for stage, kind in kinds.items():
                    job = StageJob(kind, (y, *more), number) if kind is last else StageJob(kind, (y,))
                    _, result = await self._call(stage, job, None, deadline)
                    if exactly:
                        _require_version(result, self._trained, stage)
                    y = result.payloads[0] if result.payloads else b""
                return result
        raise TimeoutError

    # -- calls --------------------------------------------------------------------------------------------------------

    async def _call(self, stage: int, job: StageJob, lease: Lease | None, deadline: Deadline) -> tuple[Call, JobResult]:
        """Ask replica after replica. `Abandoned`: too many failures, one that may count, or the deadline has passed."""
        router = self._router(stage, lease)
        for _ in range(MAX_FAILURES):
            call, began = await self._granted(stage, lease, deadline)
            try:
                result = await self._exchange(call, job, lease, deadline)
            except NotCounted:
                if not lease:
                    router.failed(call.member.peer, loop_time(), loop_time() - began)
            except (PeerError, BadPayload) as error:
                router.failed(call.member.peer, loop_time(), loop_time() - began)
                await self._streams.reset(call, error)
                if lease and stage == self._settings.last:
                    raise Abandoned(f"stage {stage} may have counted it: {error}") from error
            else:
                router.succeeded(call.member.peer, loop_time() - began)
                return call, result
        raise Abandoned(f"{MAX_FAILURES} calls to stage {stage} failed")

    async def _granted(
        self, stage: int, lease: Lease | None, deadline: Deadline, streams: CallStreams | None = None
    ) -> tuple[Call, float]:
        """A replica that has a place for the job, and when it was asked. Raises `Abandoned`."""
        failures, router, streams = 0, self._router(stage, lease), streams or self._streams
        while failures < MAX_FAILURES:
            member, began = await self._driver.route(stage, router, deadline), loop_time()
            self._driver.tell("asked", lease, stage, member)
            try:
                request = streams.request(stage, member, lease.number if lease else 0, self._trained)
                call = await self._while_live(stage, member, lease, request)
            except StageIsBusy as busy:
                router.busy(member.peer, loop_time(), busy.retry_seconds)
            except (PeerError, BadPayload) as error:
                is_refused = isinstance(error, PeerGone) and streams is self._chained
                if is_refused and await self._streams.reaches(stage, member):  # it serves no chains
                    self._driver.pairs.add(self._driver.endpoint.me, member, loop_time())
                router.failed(member.peer, loop_time())
                failures += 1
            else:
                router.granted(member.peer)
                return call, began
        raise Abandoned(f"{MAX_FAILURES} replicas of stage {stage} cannot be reached")

    def _router(self, stage: int, lease: Lease | None) -> ReplicaRouter:
        return (self._driver.routers if lease else self._driver.outer_routers)[stage]

    async def _backward(self, call: Call, gradient: Buffer, lease: Lease, deadline: Deadline) -> Buffer:
        """The gradient of the stage's input. Raises `Abandoned` if it failed, or the replica's weights have changed."""
        try:
            result = await self._exchange(call, StageJob(JobKind.BACKWARD, (gradient,)), lease, deadline)
        except NotCounted as error:
            raise Abandoned(str(error)) from error
        except (PeerError, BadPayload) as error:
            self._driver.routers[call.stage].failed(call.member.peer, loop_time())
            await self._streams.reset(call, error)
            raise Abandoned(f"its backward failed: {error}") from error
        return result.payloads[0]

    async def _exchange(self, call: Call, job: StageJob, lease: Lease | None, deadline: Deadline) -> JobResult:
        seconds = CALL_LIMIT_SECONDS  # without a lease there is time until the replica is gone
        if lease:
            usual = self._driver.routers[call.stage].usual_seconds(call.member.peer)
            seconds = min(max(CALL_FLOOR_SECONDS, CALL_MULTIPLE * usual), seconds, deadline - loop_time())
        async with peer_timeout(seconds, call.member.peer, "computing a microbatch"):
            return await self._while_live(call.stage, call.member, lease, self._send_and_receive(call, job))

    async def _while_live(self, stage: int, member: Member, lease: Lease | None, call: Coroutine[Any, Any, T]) -> T:
        """Wait for a replica's answer, no longer than it is live."""
        driver = self._driver
        watch = raise_when_gone(driver.endpoint.host.members, member, loop_time() + CALL_LIMIT_SECONDS)
        driver.tell("waiting", lease, stage, member)
        try:
            return await run_with_helper(call, watch)
        finally:
            driver.tell("answered", lease, stage, member)

    async def _send_and_receive(self, call: Call, job: StageJob) -> JobResult:
        for sent in job.payloads:
            await call.stream.send(JobInput(job.kind.value, job.number), sent)
        received, loss, trained = [], 0.0, 0
        for payload in job.kind.gives or (None,):
            header = await call.stream.receive(HEADER_LIMIT)
            if isinstance(header, LeaseVoid):
                raise NotCounted(header.why)
            if job.kind.is_outer:
                output = expect(header, OuterOutput)
                loss, trained = output.loss, output.trained
                if trained < self._trained:
                    raise BadPayload(f"outer parameters after {trained} rounds where {self._trained} were asked for")
            else:
                loss = expect(header, JobOutput).loss
            if payload:
                received.append(await self._payload(call, payload))
        return JobResult(tuple(received), loss=loss, trained=trained)

    async def _payload(self, call: Call, payload: Payload) -> bytearray:
        data = bytearray(self._settings.sizes.of(payload))
        await call.stream.receive_into(memoryview(data))
        self._driver.check(data, payload)
        return data


def _require_version(result: JobResult, trained: int, stage: int) -> None:
    if result.trained != trained:
        raise VersionPassed(f"stage {stage} has gone on from the parameters after {trained} rounds")
