"""A replica of a stage other than 0: it answers drivers. A lease is one turn of the handler's loop on one stream.

There is no table of ids: when the handler ends, for whatever reason, the lease has ended. The replica keeps the
microbatch's input, as it came, between forward and backward: the backward gets it again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

from protocols.aio import peer_timeout, raise_when_gone, run_with_helper
from protocols.base import BadPayload, Buffer, Header, Member, Stream, stage_scope
from protocols.pipeline.admission import Lease, StepAdmission
from protocols.pipeline.chain_serving import ChainServer
from protocols.pipeline.hops import CheckPayload
from protocols.pipeline.job import JobKind, JobResult, LeaseLost, Place, StageJob, StageWork, VersionPassed
from protocols.pipeline.leases import LeaseQueue
from protocols.pipeline.messages import (
    HEADER_LIMIT,
    METHOD,
    OUTER_METHOD,
    Granted,
    JobInput,
    JobOutput,
    LeaseVoid,
    OuterOutput,
    StageBusy,
    StageRequest,
)
from protocols.pipeline.settings import (
    CALL_LIMIT_SECONDS,
    MAX_REQUESTS,
    RETRY_SECONDS,
    SERVER_IDLE_SECONDS,
    PipelineEvent,
    PipelineSettings,
    ignore_event,
)
from protocols.streams.endpoint import ProtocolEndpoint
from protocols.wire import expect

Serve: TypeAlias = Callable[[Stream, StageRequest], Awaitable[None]]


class StageServer:
    """Serves the jobs of all drivers at one replica.

    The endpoint is of the whole run's members, bound to no round: it checks the sender and the receiver. `drivers` is
    the number of live peers of stage 0, `trained` that of training rounds whose result the outer parameters have.
    `check` raises `BadPayload` if what another replica gave does not decode.
    """

    def __init__(
        self,
        endpoint: ProtocolEndpoint,
        settings: PipelineSettings,
        *,
        stage: int,
        work: StageWork,
        drivers: Callable[[], int],
        trained: Callable[[], int] = lambda: 0,
        check: CheckPayload = lambda data, payload: None,
        watch: Callable[[PipelineEvent], None] = ignore_event,
    ) -> None:
        self._endpoint, self._settings, self._stage, self._work = endpoint, settings, stage, work
        self._trained, self._watch = trained, watch
        self.admission = StepAdmission(settings.batches, self._tell, settings.lookahead)
        self._leases = LeaseQueue(self.admission, drivers)
        place = Place.LAST if stage == settings.last else Place.MIDDLE
        kinds = [kind for kind in JobKind if kind.place is place and kind.is_outer]
        self._outer_kinds = [kind for kind in kinds if all(map(settings.sizes.of, kind.takes + kind.gives))]
        self._outer_jobs = 0
        endpoint.serve(METHOD, StageRequest, partial(self._serve, self._serve_leased))
        endpoint.serve(OUTER_METHOD, StageRequest, partial(self._serve, self._compute_outer))
        if settings.stages > 2:
            ChainServer(
                endpoint,
                settings,
                stage=stage,
                work=work,
                leases=self._leases,
                check_request=self._check_leased,
                check=check,
                tell=self._tell,
            )

    # -- one stream ---------------------------------------------------------------------------------------------------

    async def _serve(self, serve: Serve, stream: Stream, request: StageRequest) -> None:
        """One request after the other, until the driver is gone, closes the stream or leaves it idle."""
        watch = raise_when_gone(self._endpoint.host.members, request.sender, stream.deadline)
        await run_with_helper(self._serve_all(serve, stream, request), watch)

    async def _serve_all(self, serve: Serve, stream: Stream, request: StageRequest) -> None:
        driver, asked = request.sender, request
        while True:
            self._check(driver, asked)
            await serve(stream, asked)
            async with peer_timeout(SERVER_IDLE_SECONDS, stream.peer, "waiting for its next request"):
                asked = expect(await stream.receive(HEADER_LIMIT), StageRequest)

    def _check(self, driver: Member, request: StageRequest) -> None:
        if (request.run, request.scope) != (self._settings.run, stage_scope(self._stage)):
            raise BadPayload("a request of another run or stage")
        if (request.sender, request.to) != (driver, self._endpoint.me):
            raise BadPayload("a request in another name than the stream's first one")

    def _check_leased(self, driver: Member, request: StageRequest) -> None:
        self._check(driver, request)
        if not request.number:
            raise BadPayload("a request for a place without a microbatch")

    async def _serve_leased(self, stream: Stream, request: StageRequest) -> None:
        self._check_leased(request.sender, request)
        lease = await self._leases.granted(request)
        if lease is None:
            await stream.send(StageBusy(RETRY_SECONDS))
            return
        try:
            await self._microbatch(stream, lease)
        finally:
            lease.end()

    # -- jobs ---------------------------------------------------------------------------------------------------------

    async def _compute_outer(self, stream: Stream, request: StageRequest) -> None:
        """One job, which lasts at most `CALL_LIMIT_SECONDS`: a peer that sends nothing keeps its place no longer."""
        if request.number:
            raise BadPayload("a request for outer parameters with a microbatch")
        if self._outer_jobs >= MAX_REQUESTS or self._trained() < request.trained:
            await stream.send(StageBusy(RETRY_SECONDS))
            return
        self._outer_jobs += 1
        try:
            async with peer_timeout(CALL_LIMIT_SECONDS, stream.peer, "asking for outer parameters"):
                await stream.send(Granted())
                job = await self._receive(stream, *self._outer_kinds)
                result = await self._work.run(job)
                if result.trained < request.trained:
                    raise VersionPassed("its outer parameters have gone back")
                for payload in result.payloads or (b"",):
                    await stream.send(OuterOutput(result.loss, result.trained), payload)
        except LeaseLost as lost:
            await stream.send(LeaseVoid(str(lost)[:120]))
        finally:
            self._outer_jobs -= 1

    async def _microbatch(self, stream: Stream, lease: Lease) -> None:
        await stream.send(Granted())
        try:
            if self._stage == self._settings.last:
                await self._answer(stream, await self._work.run(await self._receive(stream, JobKind.LOSS), lease))
            else:
                await self._there_and_back(stream, lease)
        except LeaseLost as lost:
            await stream.send(LeaseVoid(str(lost)[:120]))
            return
        self._leases.returned(lease)

    async def _there_and_back(self, stream: Stream, lease: Lease) -> None:
        job = await self._receive(stream, JobKind.FORWARD)
        output = await self._work.run(job, lease)
        self._tell("forwarded", lease)
        await self._answer(stream, output)
        header = await self._within_lease(stream, lease)
        gradient = await self._payloads(stream, header, JobKind.BACKWARD, kept=job.payloads)
        await self._answer(stream, await self._work.run(gradient, lease))

    async def _receive(self, stream: Stream, *kinds: JobKind) -> StageJob:
        async with peer_timeout(CALL_LIMIT_SECONDS, stream.peer, "sending a microbatch"):
            header = expect(await stream.receive(HEADER_LIMIT), JobInput)
        kind = next((each for each in kinds if each.value == header.kind), None)
        if kind is None:
            raise BadPayload(f"a job {header.kind!r} that this replica does not do now")
        return await self._payloads(stream, header, kind)

    async def _payloads(
        self, stream: Stream, header: JobInput, kind: JobKind, kept: tuple[Buffer, ...] = ()
    ) -> StageJob:
        """A job, of whose inputs the first ones are kept from the job before."""
        payloads = list(kept)
        while len(payloads) < len(kind.takes):
            async with peer_timeout(CALL_LIMIT_SECONDS, stream.peer, "sending a microbatch"):
                if payloads[len(kept) :] and await stream.receive(HEADER_LIMIT) != header:
                    raise BadPayload(f"another frame than the next input of {kind.value}")
                payload = bytearray(self._settings.sizes.of(kind.takes[len(payloads)]))
                await stream.receive_into(memoryview(payload))
            payloads.append(payload)
        return StageJob(kind, tuple(payloads), header.number)

    async def _answer(self, stream: Stream, result: JobResult) -> None:
        for payload in result.payloads or (b"",):
            await stream.send(JobOutput(result.loss), payload)

    async def _within_lease(self, stream: Stream, lease: Lease) -> JobInput:
        """The backward's header, for which the replica waits as long as the lease lasts."""
        header: Header = await run_with_helper(
            stream.receive(HEADER_LIMIT), self._leases.until_expired(lease, stream.peer)
        )
        if not isinstance(header, JobInput) or header.kind != JobKind.BACKWARD.value:
            raise BadPayload(f"{type(header).__name__} where a microbatch's gradient is due")
        return header

    def _tell(self, kind: str, lease: Lease, sender: Member | None = None) -> None:
        me = self._endpoint.me
        event = PipelineEvent(kind, lease.driver, lease.number, self._stage, me, lease.epoch, sender=sender)
        self._watch(event)
