"""Admission of microbatches to the optimiser steps of one replica: leases instead of barriers. Pure.

A replica grants a lease while counted + leased < B + A. It steps when B microbatches are counted and all leases that it
kept at its last step have ended; the first B to be counted make the step, with up to A more. The leases of the others
stay: their backwards run in the weights of their forwards, which are one step old. With A = 0 no lease is left at a
step. No step waits for other stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from protocols.aio import Notifier
from protocols.base import Member

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 10.0, 600.0
"""How long a driver whose lease ran out waits for its next place; doubled each time, until it returns a microbatch."""


class LeaseState(Enum):
    HELD = auto()  # The microbatch has been admitted; its backward has not begun.
    COMPUTING = auto()  # its backward runs, and will count whatever becomes of the driver
    COUNTED = auto()  # it is part of the gradient of its epoch
    ENDED = auto()  # it was not counted and never will be


@dataclass(slots=True, eq=False)
class Lease:
    """A microbatch's place at one replica. Its forward and its backward run in the weights of the same epoch.

    `epoch` is that of the grant until the forward begins, and that of the forward from then on.
    """

    driver: Member
    number: int
    epoch: int
    granted_at: float  # seconds
    _admission: StepAdmission = field(repr=False)
    state: LeaseState = LeaseState.HELD
    has_begun: bool = False

    @property
    def is_void(self) -> bool:
        return self.state is LeaseState.ENDED

    @property
    def is_stale(self) -> bool:
        """Whether its forward ran in the weights before the last step."""
        return self.has_begun and self.epoch < self._admission.epoch

    def begin_forward(self) -> bool:
        """Fix the weights of the microbatch: a step may have passed since the grant. False if the lease is void."""
        if not self.is_void and not self.has_begun:
            self.has_begun, self.epoch = True, self._admission.epoch
        return not self.is_void

    def begin_backward(self) -> bool:
        """Keep the place until the backward has ended, even if the driver is lost meanwhile; False if it is void.

        In the last stage it is the forward, too.
        """
        self.begin_forward()
        if self.state is LeaseState.HELD:
            self.state = LeaseState.COMPUTING
        return self.state is LeaseState.COMPUTING

    def count(self) -> None:
        if self.state is not LeaseState.COMPUTING:
            raise ValueError(f"a lease that is {self.state.name} cannot be counted")
        self._admission._settle(self, LeaseState.COUNTED)

    def fail(self) -> None:
        if self.state is LeaseState.COMPUTING:
            self._admission._settle(self, LeaseState.ENDED)

    def end(self) -> None:
        """The driver needs the place no longer. A backward that runs is still counted."""
        if self.state is LeaseState.HELD:
            self._admission._settle(self, LeaseState.ENDED)


class StepAdmission:
    """The microbatches of the present optimiser step of a replica. `watch` is told what becomes of each lease."""

    def __init__(self, batches: int, watch: Callable[[str, Lease], None], lookahead: int = 0) -> None:
        self.changed = Notifier()  # notified when a lease may be granted, or a step taken, that could not before
        self.batches, self.places = batches, batches + lookahead  # B, B + A
        self.epoch = 0  # how often the weights have changed
        self.counted: list[Lease] = []  # in the present gradient
        self.is_open = False  # whether leases are granted: between a round's begin and its cut
        self._leased: dict[Lease, None] = {}
        self._expired: dict[Member, tuple[int, float]] = {}  # drivers: leases that ran out in a row, none before then
        self._watch = watch

    @property
    def leased(self) -> int:
        return len(self._leased)

    @property
    def is_due(self) -> bool:
        """Whether a step is to be taken now. It waits for stale leases: the step would end their weights."""
        return len(self.counted) >= self.batches and not any(lease.is_stale for lease in self._leased)

    def may_grant(self, driver: Member, drivers: int, now: float) -> bool:
        if not self.is_open or len(self.counted) + self.leased >= self.places:
            return False
        open_leases = sum(lease.driver == driver for lease in self._leased)
        if driver in self._expired:
            return not open_leases and now >= self._expired[driver][1]
        return open_leases < fair_share(self.places, drivers)

    def grant(self, driver: Member, number: int, now: float) -> Lease:
        lease = Lease(driver, number, self.epoch, now, self)
        self._leased[lease] = None
        self._watch("granted", lease)
        return lease

    def lets_leases_expire(self, driver: Member) -> bool:
        """Whether a lease of this driver ran out, and it has returned none since."""
        return driver in self._expired

    def expire(self, lease: Lease, now: float) -> None:
        """End a lease whose backward did not come in time. Its driver gets one place at a time, each after a longer
        wait, until it returns a microbatch.
        """
        if lease.state is not LeaseState.HELD:
            return
        times, until = self._expired.get(lease.driver, (0, 0.0))
        if now >= until:  # of leases that run out together, only the first counts
            wait_seconds = min(FIRST_WAIT_SECONDS * 2.0 ** min(times, 10), LONGEST_WAIT_SECONDS)
            self._expired[lease.driver] = times + 1, now + wait_seconds
        lease.end()

    def open(self) -> None:
        self.is_open = True
        self.changed.notify()

    def close(self) -> None:
        """Grant no lease. Those that are held stay valid."""
        self.is_open = False

    def stepped(self) -> None:
        """The step has been taken that was due: the next one begins, and its leases stay."""
        self.counted = []
        self.epoch += 1
        self.changed.notify()

    def void(self) -> None:
        """The weights were replaced, or the gradient is lost: void every lease, and forget what was counted."""
        for lease in tuple(self._leased):
            self._settle(lease, LeaseState.ENDED)
        self.stepped()

    def _settle(self, lease: Lease, state: LeaseState) -> None:
        lease.state = state
        self._leased.pop(lease, None)
        if state is LeaseState.COUNTED:
            self._expired.pop(lease.driver, None)
            self.counted.append(lease)
        self._watch("counted" if state is LeaseState.COUNTED else "ended", lease)
        self.changed.notify()


def fair_share(places: int, drivers: int) -> int:
    """Places that one of `drivers` drivers may hold: twice its share; all of them if it is the only one."""
    return places if drivers <= 1 else -(-2 * places // drivers)
