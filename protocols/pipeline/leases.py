"""Which driver gets a replica's next place, and how long its lease lasts."""

from __future__ import annotations

from collections.abc import Callable

from protocols.aio import loop_time
from protocols.base import Member, PeerId, PeerSilent
from protocols.peers.estimates import ewma
from protocols.pipeline.admission import Lease, StepAdmission
from protocols.pipeline.fan_out import FAN_OUT
from protocols.pipeline.job import LeaseLost
from protocols.pipeline.messages import StageRequest
from protocols.pipeline.settings import CONTENDED_LEASE_SECONDS, GRANT_SECONDS, LEASE_MULTIPLE, LEASE_SECONDS

GAIN = 0.2
ASKED_SECONDS = 60.0
"""Where there are many drivers, those that have not asked for so long do not count: they use other replicas."""


class LeaseQueue:
    """Drivers that wait for a place at one replica. `drivers` is the number of live peers of stage 0."""

    def __init__(self, admission: StepAdmission, drivers: Callable[[], int]) -> None:
        self._admission, self._drivers = admission, drivers
        self._waiting: list[StageRequest] = []  # first come first
        self._asked: dict[Member, float] = {}  # drivers that use this replica, and when they have asked last
        self._usual_seconds = LEASE_SECONDS / LEASE_MULTIPLE  # from the grant of a lease to its count

    async def granted(self, request: StageRequest) -> Lease | None:
        """Wait for a place. Of several drivers that could have one, the one that has waited longest gets it."""
        admission, queue = self._admission, self._waiting
        queue.append(request)
        recently = loop_time() - ASKED_SECONDS
        self._asked = {driver: at for driver, at in self._asked.items() if at > recently}
        self._asked[request.sender] = loop_time()

        def is_next() -> bool:
            drivers, now = self._sharing(), loop_time()
            return next((each for each in queue if admission.may_grant(each.sender, drivers, now)), None) is request

        try:
            # between two rounds, or while it catches up, other replicas may well have places
            await admission.changed.reached(lambda: not admission.is_open or is_next(), loop_time() + GRANT_SECONDS)
            if not is_next():
                return None
            return admission.grant(request.sender, request.number, loop_time())
        finally:
            queue.remove(request)
            admission.changed.notify()

    def _sharing(self) -> int:
        """Among how many drivers the places are shared."""
        drivers = self._drivers()
        return drivers if drivers <= FAN_OUT else max(FAN_OUT, min(drivers, len(self._asked)))

    def returned(self, lease: Lease) -> None:
        self._usual_seconds = ewma(self._usual_seconds, loop_time() - lease.granted_at, GAIN)

    async def until_expired(self, lease: Lease, driver: PeerId, until_void: bool = False) -> None:
        """Wait as long as the lease lasts, and end it: then its place is free. Raises `PeerSilent`.

        With `until_void` it raises `LeaseLost` once the lease is void.
        """
        admission = self._admission
        while (left := lease.granted_at + self._lease_seconds() - loop_time()) > 0:
            if until_void and lease.is_void:
                raise LeaseLost("the replica's weights have changed since it was granted")
            contended = bool(self._waiting)
            await admission.changed.reached(
                lambda: bool(self._waiting) != contended or (until_void and lease.is_void),  # noqa: B023
                loop_time() + left,
            )
        if not admission.lets_leases_expire(lease.driver):  # else such a driver would make all leases long
            self.returned(lease)
        admission.expire(lease, loop_time())
        raise PeerSilent(driver, "did not send a microbatch's gradient in time")

    def _lease_seconds(self) -> float:
        if not self._waiting:
            return LEASE_SECONDS
        return min(LEASE_SECONDS, max(CONTENDED_LEASE_SECONDS, LEASE_MULTIPLE * self._usual_seconds))
