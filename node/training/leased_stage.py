"""The rules of leases around the computations of one stage: what `protocols.pipeline.work` promises to the protocol.

StageJobs      what a stage computes, one job at a time: `InlineStage` in the event loop, `RemoteStage` in a worker
LeasedStage    `StageWork` and `FirstStageWork` over `StageJobs`
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from protocols.aio import loop_time
from protocols.base import Buffer
from protocols.peers.estimates import ewma
from protocols.pipeline.admission import Lease
from protocols.pipeline.work import LeaseLost

T = TypeVar("T")
GAIN = 0.2


class StageJobs(Protocol):
    """What one stage computes. Each method is called inside a turn of its own.

    Gradients of all microbatches since the last step are summed. A job that fails has added nothing, or has lost all
    that was added.

    Raises:
        BadPayload: what was received does not decode, or is not finite.
        LeaseLost: the worker died.
    """

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Wait for a turn. Turns come in the order in which they were asked for; steps and writes come first."""

    async def forward(self, x: Buffer) -> bytes:
        """Of a middle stage: its output."""

    async def backward(self, x: Buffer, gradient: Buffer) -> bytes:
        """Of a middle stage: compute the forward again, add to the gradient, return the gradient of `x`."""

    async def loss(self, x: Buffer, targets: Buffer) -> tuple[float, bytes]:
        """Of the last stage: the loss; adds to the gradient, and returns that of `x`, too."""

    async def draw(self) -> tuple[int, bytes, bytes]:
        """Of stage 0: draw the next batch. Returns its number for `finish`, the output, and the targets."""

    async def finish(self, batch: int, gradient: Buffer, loss: float) -> None:
        """Of stage 0: compute the forward again, add to the gradient, and note the loss."""

    def check(self, activation: Buffer) -> None:
        """Of stage 0: see `FirstStageWork.check`. It needs no turn."""


class UninterruptedJobs:
    """Runs jobs to their end even if their callers are cancelled. Otherwise the worker would have to be killed."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    async def finish(self, job: Coroutine[Any, Any, T]) -> T:
        """Run a job and return its result."""
        task = asyncio.get_running_loop().create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone


class LeasedStage:
    """Computes a microbatch only while its lease is valid, and counts it once its backward has ended.

    Attributes:
        jobs: the computations.
        counted: microbatches that were counted so far.
        usual_seconds: moving average of the time to compute a microbatch, forwards and backwards; 0 before the first.
        computed_seconds: time that all jobs took so far.
    """

    def __init__(self, jobs: StageJobs) -> None:
        self.jobs = jobs
        self.counted = 0
        self.computed_seconds = 0.0
        self._forward_seconds = self._backward_seconds = 0.0
        self._running = UninterruptedJobs()

    @property
    def usual_seconds(self) -> float:
        return self._forward_seconds + self._backward_seconds if self._backward_seconds else 0.0

    async def forward(self, x: Buffer, lease: Lease) -> bytes:
        return await self._uncounted(lease, lambda: self.jobs.forward(x))

    async def backward(self, x: Buffer, gradient: Buffer, lease: Lease) -> bytes:
        return await self._counted(lease, lambda: self.jobs.backward(x, gradient))

    async def loss(self, x: Buffer, targets: Buffer, lease: Lease) -> tuple[float, bytes]:
        return await self._counted(lease, lambda: self.jobs.loss(x, targets))

    async def draw(self, lease: Lease) -> tuple[int, bytes, bytes]:
        return await self._uncounted(lease, self.jobs.draw)

    async def finish(self, batch: int, gradient: Buffer, loss: float, lease: Lease) -> None:
        await self._counted(lease, lambda: self.jobs.finish(batch, gradient, loss))

    def check(self, activation: Buffer) -> None:
        self.jobs.check(activation)

    async def _uncounted(self, lease: Lease, work: Callable[[], Awaitable[T]]) -> T:
        async def job() -> T:
            async with self.jobs.turn():
                _require_valid(not lease.is_void)
                began = loop_time()
                result = await work()
                self._forward_seconds = self._took(self._forward_seconds, began)
                return result

        result = await self._running.finish(job())
        _require_valid(not lease.is_void)  # the weights may have been written since the job's turn ended
        return result

    async def _counted(self, lease: Lease, work: Callable[[], Awaitable[T]]) -> T:
        """A job that adds to the gradient: it counts even if the caller is cancelled meanwhile."""

        async def job() -> T:
            async with self.jobs.turn():
                _require_valid(lease.begin_backward())
                began = loop_time()
                try:
                    result = await work()
                except BaseException:
                    lease.fail()
                    raise
                _require_valid(not lease.is_void)  # the worker died after it had answered
                lease.count()
                self.counted += 1
                self._backward_seconds = self._took(self._backward_seconds, began)
                return result

        return await self._running.finish(job())

    def _took(self, usual_seconds: float, began: float) -> float:
        """Note the end of a job. Returns the new moving average of such jobs."""
        seconds = loop_time() - began
        self.computed_seconds += seconds
        return ewma(usual_seconds, seconds, GAIN) if usual_seconds else seconds


def _require_valid(valid: bool) -> None:
    if not valid:
        raise LeaseLost("the replica's weights have changed since it was granted")
