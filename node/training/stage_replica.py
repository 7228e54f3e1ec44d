"""One stage's weights at this peer, and the rules by which jobs come to it: turns and leases.

StageReplica    what computes, one job at a time: `RemoteStage` in a worker, or the simulator's in the event loop
TurnQueue       one job at a time: what changes the weights first, the others as they arrive
LeasedStage     `protocols.pipeline.job.StageWork` over a `StageReplica`
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Protocol

from protocols.aio import loop_time
from protocols.base import Layout, LocalProgress, Vector
from protocols.peers.estimates import ewma
from protocols.pipeline.admission import Lease
from protocols.pipeline.job import JobKind, JobResult, LeaseLost, Place, StageJob, VersionPassed

GAIN = 0.2
MAX_OUTER_JOBS = 6
"""Jobs without a lease that wait or run at once: those whose askers are gone run to their end, too."""


class StageReplica(Protocol):
    """One stage's weights at this peer, its work since its anchor, and the gradients since its last step.

    A job that fails has added nothing to them, or has lost all that was added. What is called inside a turn
    (`on_stepped`, `on_replaced`) runs before any further job.
    """

    layout: Layout

    @property
    def is_ready(self) -> bool:
        """Whether it can compute now; False while a worker is being replaced."""

    def turn(self, outer: bool = False) -> AbstractAsyncContextManager[None]:
        """Wait for a turn, see `TurnQueue`; `outer`: for a job with the outer parameters."""

    async def run(self, job: StageJob) -> JobResult:
        """Compute a job, inside a turn. Raises `BadPayload`, or `LeaseLost` if the worker died."""

    async def begin(self, round_number: int, cut: asyncio.Event) -> LocalProgress:
        """Start a round, or resume it. Without a worker, waits for one until the cut."""

    async def step(self, round_number: int, on_stepped: Callable[[], None]) -> tuple[bool, LocalProgress | None]:
        """Take the optimiser step; whether the round's are complete, and the work so far if it is time to report it."""

    async def work(self) -> LocalProgress:
        """The work since the anchor was written."""

    async def read(self, into: Vector) -> None:
        """Copy the local parameters out, between two jobs."""

    async def replace(
        self, source: Vector, anchor: Vector | None, tokens: int, on_replaced: Callable[[], None]
    ) -> None:
        """Replace the local parameters and the anchor, and drop the gradients; see `protocols.base.Trainer.write`."""

    async def release(self) -> None:
        """Free what computing needs, between two rounds."""

    async def evaluate(self) -> float:
        """Held-out loss of the outer parameters, if a stage alone has one; else nan."""


class Priority(IntEnum):
    """Which job is next. Backwards do not go before forwards: stages further on would stand still meanwhile."""

    WEIGHTS = 0
    MICROBATCH = 1
    OUTER = 2


OUTER_AFTER = 2
"""A job with the outer parameters waits for no more than so many turns of microbatches, and for as many after another:
so it comes at last, and there is at most one in a row while microbatches wait."""


class TurnQueue:
    """One job at a time: what changes the weights, microbatches, then jobs with the outer parameters."""

    def __init__(self) -> None:
        self._waiting: dict[Priority, deque[asyncio.Future[None]]] = {priority: deque() for priority in Priority}
        self._is_taken = False
        self._passed = 0  # turns of microbatches since a job with the outer parameters had one

    @asynccontextmanager
    async def turn(self, priority: Priority) -> AsyncIterator[None]:
        if self._is_taken:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[priority].append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        self._is_taken = False
        weights, microbatches, outer = (self._next(each) for each in Priority)
        if weights is None and outer and (microbatches is None or self._passed >= OUTER_AFTER):
            priority, self._passed = Priority.OUTER, 0
        elif weights is None and microbatches:
            priority, self._passed = Priority.MICROBATCH, self._passed + 1
        elif weights:
            priority = Priority.WEIGHTS
        else:
            return
        self._is_taken = True
        self._waiting[priority].popleft().set_result(None)

    def _next(self, priority: Priority) -> asyncio.Future[None] | None:
        """The first that still waits."""
        waiting = self._waiting[priority]
        while waiting and waiting[0].done():
            waiting.popleft()
        return waiting[0] if waiting else None


@dataclass(frozen=True, slots=True)
class OuterVersion:
    """Of a stage's outer parameters at this peer."""

    trained: int = 0  # rounds whose result they have
    change: int = 0  # another after each change


class LeasedStage:
    """Computes a microbatch's jobs only while its lease is valid, and counts it once its backward has ended.

    A job runs to its end even if its caller is cancelled. Otherwise the worker would have to be killed. `version` is
    that of the outer parameters, None while they change.
    """

    def __init__(self, replica: StageReplica, version: Callable[[], OuterVersion | None] = OuterVersion) -> None:
        self.counted = 0  # microbatches
        self.computed_seconds = 0.0  # of all jobs with a lease
        self._replica, self._version = replica, version
        self._seconds = {False: 0.0, True: 0.0}  # usual time of a job; True: of one that adds to the gradient
        self._outer_jobs = 0
        self._tasks: set[asyncio.Task[JobResult]] = set()

    @property
    def usual_seconds(self) -> float:
        """Moving average of the time to compute a microbatch, forwards and backwards; 0 before the first."""
        return sum(self._seconds.values()) if self._seconds[True] else 0.0

    async def run(self, job: StageJob, lease: Lease | None = None) -> JobResult:
        if lease is None:
            return await self._run_outer(job)
        result = await self._to_its_end(self._leased(job, lease))
        if not job.kind.adds_gradient:
            _require_valid(not lease.is_void)  # the weights may have been written since the job's turn ended
        return result

    async def _leased(self, job: StageJob, lease: Lease) -> JobResult:
        counts = job.kind.adds_gradient
        async with self._replica.turn():
            _require_valid(lease.begin_backward() if counts else lease.begin_forward())
            began = loop_time()
            try:
                result = await self._replica.run(replace(job, stale=lease.is_stale))
            except BaseException:
                lease.fail()
                raise
            if counts:
                _require_valid(not lease.is_void)  # the worker died after it had answered
                lease.count()
                self.counted += 1
            seconds, usual = loop_time() - began, self._seconds[counts]
            self.computed_seconds += seconds
            self._seconds[counts] = ewma(usual, seconds, GAIN) if usual else seconds
            return result

    async def _run_outer(self, job: StageJob) -> JobResult:
        async def run() -> JobResult:
            try:
                async with self._replica.turn(outer=True):
                    before = self._version()
                    result = await self._replica.run(job)
                    if before is None or self._version() != before:
                        raise VersionPassed("its outer parameters have changed meanwhile")
                    return replace(result, trained=before.trained)
            finally:
                self._outer_jobs -= 1

        if not job.kind.is_outer:
            raise ValueError(f"a job {job.kind.value} needs a lease")
        if self._outer_jobs >= MAX_OUTER_JOBS:
            raise LeaseLost("too many evaluations at once")
        self._outer_jobs += 1
        return await self._to_its_end(run())

    async def _to_its_end(self, job: Coroutine[Any, Any, JobResult]) -> JobResult:
        task = asyncio.get_running_loop().create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[JobResult]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone


def _require_valid(valid: bool) -> None:
    if not valid:
        raise LeaseLost("the replica's weights have changed since it was granted")


@dataclass(frozen=True, slots=True)
class StageSeconds:
    forward: float = 0.0
    backward: float = 0.0
    step: float = 0.0
    outer: float = 0.0

    def of(self, kind: JobKind) -> float:
        if kind.is_outer:
            return self.outer
        if not kind.adds_gradient:
            return self.forward
        return self.backward + (self.forward if kind.place is Place.LAST else 0.0)  # which does both in one
