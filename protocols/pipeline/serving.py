"""A replica of a stage other than 0: it answers drivers. A lease is one turn of the handler's loop on one stream.

No table of ids, no messages that release: when the handler ends, for whatever reason, the lease has ended. The replica
keeps the microbatch's input, as it came, between forward and backward, and computes the forward again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from protocols.aio import Notifier, loop_time, peer_timeout, run_with_helper, until_gone
from protocols.base import BadPayload, Header, Member, PeerSilent, Stream, stage_scope
from protocols.peers.estimates import ewma
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
from protocols.pipeline.settings import (
    CALL_LIMIT_SECONDS,
    CONTENDED_LEASE_SECONDS,
    GRANT_SECONDS,
    LEASE_MULTIPLE,
    LEASE_SECONDS,
    SERVER_IDLE_SECONDS,
    PipelineEvent,
    PipelineSettings,
    ignore_event,
)
from protocols.pipeline.work import LeaseLost, StageWork
from protocols.streams.endpoint import ProtocolEndpoint
from protocols.wire import expect

GAIN = 0.2
RETRY_SECONDS = 0.25
"""When a driver that was refused may ask again."""


class StageServer:
    """Serves the microbatches of all drivers at one replica.

    Attributes:
        admission: which of them the present step consists of.
    """

    def __init__(
        self,
        endpoint: ProtocolEndpoint,
        settings: PipelineSettings,
        stage: int,
        work: StageWork,
        drivers: Callable[[], int],
        watch: Callable[[PipelineEvent], None] = ignore_event,
    ) -> None:
        """
        Args:
            endpoint: of the whole run's members, bound to no round: it checks the sender and the receiver.
            drivers: number of live peers of stage 0.
            watch: is passed every event.
        """
        self._endpoint, self._settings, self._stage, self._work = endpoint, settings, stage, work
        self._drivers, self._watch = drivers, watch
        self._notifier = Notifier()
        self.admission = StepAdmission(settings.batches, self._notifier.notify, self._tell)
        self._queue: list[tuple[object, Member]] = []  # drivers that wait for a place, first come first
        self._usual_seconds = LEASE_SECONDS / LEASE_MULTIPLE  # from the grant of a lease to its count
        endpoint.serve(METHOD, MicrobatchRequest, self._serve)

    async def until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until the condition, which is asked whenever the admission changes, holds; whether it does in time."""
        return await self._notifier.reached(condition, deadline)

    # -- one stream ---------------------------------------------------------------------------------------------------

    async def _serve(self, stream: Stream, request: MicrobatchRequest) -> None:
        """One microbatch after the other, until the driver closes the stream or leaves it idle."""
        driver = request.sender
        watched = until_gone(self._endpoint.host.members, [driver], stream.deadline)

        async def end_with_driver() -> None:
            await watched
            raise PeerSilent(stream.peer, "is gone")

        await run_with_helper(self._serve_all(stream, request), end_with_driver())

    async def _serve_all(self, stream: Stream, request: MicrobatchRequest) -> None:
        driver, asked = request.sender, request
        while True:
            self._check(driver, asked)
            async with self._place(asked) as lease:
                if lease is None:
                    await stream.send(StageBusy(RETRY_SECONDS))
                else:
                    await self._microbatch(stream, lease)
            async with peer_timeout(SERVER_IDLE_SECONDS, stream.peer, "waiting for its next request"):
                asked = expect(await stream.receive(HEADER_LIMIT), MicrobatchRequest)

    def _check(self, driver: Member, request: MicrobatchRequest) -> None:
        """
        Raises:
            BadPayload: it is for another stage, or not from the driver that opened the stream.
        """
        if (request.run, request.scope) != (self._settings.run, stage_scope(self._stage)):
            raise BadPayload("a microbatch of another run or stage")
        if (request.sender, request.to) != (driver, self._endpoint.me):
            raise BadPayload("a microbatch in another name than the stream's first one")

    @asynccontextmanager
    async def _place(self, request: MicrobatchRequest) -> AsyncIterator[Lease | None]:
        """A lease, which ends with this context; None if there is no place in time."""
        lease = await self._granted(request)
        if lease is None:
            yield None
            return
        try:
            yield lease
        finally:
            lease.end()

    async def _granted(self, request: MicrobatchRequest) -> Lease | None:
        """Wait for a place. Of several drivers that could have one, the one that has waited longest gets it."""
        driver, admission = request.sender, self.admission
        ticket = object()
        queue = self._queue
        queue.append((ticket, driver))

        def is_next() -> bool:
            drivers = self._drivers()
            return next((t for t, each in queue if admission.may_grant(each, drivers, loop_time())), None) is ticket

        try:
            # between two rounds, or while it catches up, other replicas may well have places
            await self._notifier.reached(lambda: not admission.is_open or is_next(), loop_time() + GRANT_SECONDS)
            if not is_next():
                return None
            return admission.grant(driver, request.number, loop_time())
        finally:
            queue.remove((ticket, driver))
            self._notifier.notify()

    # -- one microbatch -----------------------------------------------------------------------------------------------

    async def _microbatch(self, stream: Stream, lease: Lease) -> None:
        await stream.send(Granted())
        try:
            if self._stage == self._settings.last:
                await self._last(stream, lease)
            else:
                await self._middle(stream, lease)
        except LeaseLost as lost:
            await stream.send(LeaseVoid(str(lost)[:120]))
            return
        self._usual_seconds = ewma(self._usual_seconds, loop_time() - lease.granted_at, GAIN)

    async def _middle(self, stream: Stream, lease: Lease) -> None:
        size = self._settings.activation_bytes
        x = await self._receive(stream, MicrobatchInput, size)
        y = await self._work.forward(x, lease)
        self._tell("forwarded", lease)
        await stream.send(ForwardOutput(), y)
        await self._within_lease(stream, lease)
        gradient = await self._payload(stream, size)
        found = await self._work.backward(x, gradient, lease)
        await stream.send(InputGradient(), found)

    async def _last(self, stream: Stream, lease: Lease) -> None:
        x = await self._receive(stream, MicrobatchInput, self._settings.activation_bytes)
        targets = await self._receive(stream, MicrobatchTargets, self._settings.target_bytes)
        loss, gradient = await self._work.loss(x, targets, lease)
        await stream.send(LossResult(loss), gradient)

    async def _receive(self, stream: Stream, kind: type[Header], size: int) -> bytearray:
        async with peer_timeout(CALL_LIMIT_SECONDS, stream.peer, "sending a microbatch"):
            expect(await stream.receive(HEADER_LIMIT), kind)
            return await self._payload(stream, size)

    async def _payload(self, stream: Stream, size: int) -> bytearray:
        payload = bytearray(size)
        async with peer_timeout(CALL_LIMIT_SECONDS, stream.peer, "sending a microbatch"):
            await stream.receive_into(memoryview(payload))
        return payload

    async def _within_lease(self, stream: Stream, lease: Lease) -> None:
        """Wait for the backward's header, as long as the lease lasts.

        Raises:
            PeerSilent: the lease ran out. Its place is free again.
        """

        async def until_expired() -> None:
            while (left := lease.granted_at + self._lease_seconds() - loop_time()) > 0:
                await self._notifier.reached(partial(self._has_changed, bool(self._queue)), loop_time() + left)
            if not self.admission.lets_leases_expire(lease.driver):  # else such a driver would make all leases long
                self._usual_seconds = ewma(self._usual_seconds, loop_time() - lease.granted_at, GAIN)
            self.admission.expire(lease, loop_time())
            raise PeerSilent(stream.peer, "did not send a microbatch's gradient in time")

        expect(await run_with_helper(stream.receive(HEADER_LIMIT), until_expired()), BackwardRequest)

    def _lease_seconds(self) -> float:
        """How long a lease lasts now: not long where other drivers wait."""
        if not self._queue:
            return LEASE_SECONDS
        return min(LEASE_SECONDS, max(CONTENDED_LEASE_SECONDS, LEASE_MULTIPLE * self._usual_seconds))

    def _has_changed(self, contended: bool) -> bool:
        return bool(self._queue) != contended

    def _tell(self, kind: str, lease: Lease) -> None:
        me = self._endpoint.me
        self._watch(PipelineEvent(kind, lease.driver, lease.number, self._stage, me, lease.epoch))
