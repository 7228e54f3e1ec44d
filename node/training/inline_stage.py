"""One stage of a pipeline computed in the event loop itself: for the simulator, paced tasks and tests.

StageCompute    what a stage computes, synchronously: `node.tasks.paced_stage`, `node.training.stage_learner`
TurnQueue       one job at a time: what changes the weights first, the others as they arrive
InlineStage     `protocols.pipeline.work` over a `StageCompute`
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar

from node.training.trainer import Learner
from protocols.base import Buffer
from protocols.pipeline.admission import Lease
from protocols.pipeline.work import LeaseLost

T = TypeVar("T")


class StageCompute(Learner, Protocol):
    """One stage's weights, and what is computed with them. Bytes are activations as they travel.

    Gradients of all microbatches since the last step are summed. `Learner.step` divides them by their number, takes the
    AdamW step and clears them; its tokens are those of these microbatches.

    Raises:
        BadPayload: what was received does not decode, or is not finite.
    """

    def forward(self, x: Buffer) -> bytes:
        """Of a middle stage: its output."""

    def backward(self, x: Buffer, gradient: Buffer) -> bytes:
        """Of a middle stage: compute the forward again, add to the gradient, return the gradient of `x`."""

    def loss(self, x: Buffer, targets: Buffer) -> tuple[float, bytes]:
        """Of the last stage: the loss; adds to the gradient, and returns that of `x`, too."""

    def draw(self) -> tuple[object, bytes, bytes]:
        """Of stage 0: draw the next batch. Returns a handle for `finish`, its output, and the targets."""

    def finish(self, batch: object, gradient: Buffer, loss: float) -> None:
        """Of stage 0: compute the forward again, add to the gradient, and note the loss."""

    def discard(self) -> None:
        """Drop the gradients since the last step."""


class Priority(IntEnum):
    """Which job is next. Backwards do not go before forwards: stages further on would stand still meanwhile."""

    WEIGHTS = 0
    MICROBATCH = 1


class TurnQueue:
    """Lets one job run at a time, in the order of priority, then of arrival."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._is_taken = False

    @asynccontextmanager
    async def turn(self, priority: Priority) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as this context."""
        if self._is_taken:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (priority, next(self._numbers), turn))
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
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._is_taken = True
                turn.set_result(None)
                return


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Durations of a stage's jobs, in seconds, beside what computing them takes."""

    forward: float = 0.0
    backward: float = 0.0
    step: float = 0.0


class InlineStage:
    """`StageWork` and `FirstStageWork` over a `StageCompute`. A job sleeps for its duration, then is done at once.

    Attributes:
        compute: the stage.
        seconds: durations; they may change at any time.
        turns: what runs between jobs takes a turn of its own.
    """

    def __init__(self, compute: StageCompute, seconds: StageSeconds) -> None:
        self.compute, self.seconds = compute, seconds
        self.turns = TurnQueue()
        self._jobs: set[asyncio.Task[object]] = set()

    async def forward(self, x: Buffer, lease: Lease) -> bytes:
        return await self._uncounted(lease, lambda: self.compute.forward(x))

    async def backward(self, x: Buffer, gradient: Buffer, lease: Lease) -> bytes:
        return await self._counted(lease, self.seconds.backward, lambda: self.compute.backward(x, gradient))

    async def loss(self, x: Buffer, targets: Buffer, lease: Lease) -> tuple[float, bytes]:
        return await self._counted(lease, self._both_seconds(), lambda: self.compute.loss(x, targets))

    async def draw(self, lease: Lease) -> tuple[object, bytes, bytes]:
        return await self._uncounted(lease, self.compute.draw)

    async def finish(self, batch: object, gradient: Buffer, loss: float, lease: Lease) -> None:
        await self._counted(lease, self.seconds.backward, lambda: self.compute.finish(batch, gradient, loss))

    def _both_seconds(self) -> float:
        return self.seconds.forward + self.seconds.backward

    async def _uncounted(self, lease: Lease, work: Callable[[], T]) -> T:
        async with self.turns.turn(Priority.MICROBATCH):
            _require_valid(not lease.is_void)
            await asyncio.sleep(self.seconds.forward)
            return work()

    async def _counted(self, lease: Lease, seconds: float, work: Callable[[], T]) -> T:
        """A job that adds to the gradient. Once it has begun it ends and counts, even if the caller is cancelled."""

        async def job() -> T:
            async with self.turns.turn(Priority.MICROBATCH):
                _require_valid(lease.begin_backward())
                try:
                    await asyncio.sleep(seconds)
                    result = work()
                except BaseException:
                    lease.fail()
                    raise
                lease.count()
                return result

        task = asyncio.get_running_loop().create_task(job())
        self._jobs.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._jobs.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone


def _require_valid(valid: bool) -> None:
    if not valid:
        raise LeaseLost("the replica's weights have changed since it was granted")
