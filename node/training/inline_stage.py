"""One stage of a pipeline computed in the event loop itself: for the simulator, paced tasks and tests.

StageCompute    what a stage computes, synchronously: `node.tasks.paced_stage`, `node.training.stage_learner`
TurnQueue       one job at a time: what changes the weights first, the others as they arrive
InlineStage     the jobs and the weights of a stage, over a `StageCompute`
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from node.training.outer_stage import OuterCompute
from node.training.trainer import Learner, LocalTraining
from protocols.aio import loop_time
from protocols.base import Buffer, LocalProgress, Vector


class StageCompute(Learner, OuterCompute, Protocol):
    """One stage's weights, and what is computed with them. Bytes are activations as they travel.

    Gradients of all microbatches since the last step are summed. `Learner.step` divides them by their number, takes the
    optimiser step and clears them; its tokens are those of these microbatches.

    Attributes:
        position: number of batches drawn so far, in stage 0.

    Raises:
        BadPayload: what was received does not decode, or is not finite.
    """

    position: int

    def forward(self, x: Buffer) -> bytes:
        """Of a middle stage: its output."""

    def backward(self, x: Buffer, gradient: Buffer) -> bytes:
        """Of a middle stage: compute the forward again, add to the gradient, return the gradient of `x`."""

    def loss(self, x: Buffer, targets: Buffer) -> tuple[float, bytes]:
        """Of the last stage: the loss; adds to the gradient, and returns that of `x`, too."""

    def draw(self) -> tuple[int, bytes, bytes]:
        """Of stage 0: draw the next batch. Returns its number for `finish`, its output, and the targets."""

    def finish(self, batch: int, gradient: Buffer, loss: float) -> None:
        """Of stage 0: compute the forward again, add to the gradient, and note the loss."""

    def check(self, activation: Buffer) -> None:
        """Of stage 0: see `protocols.pipeline.work.FirstStageWork.check`."""

    def discard(self) -> None:
        """Drop the gradients since the last step."""

    def using(self, vectors: Sequence[Vector]) -> AbstractContextManager[None]:
        """Compute with these parameters instead of its own, inside the context."""


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
    """`StageJobs` and `StageReplica` over a `StageCompute`. A job sleeps for its duration, then is done at once.

    Attributes:
        compute: the stage.
        seconds: durations; they may change at any time.
        turns: what runs between jobs takes a turn of its own.
        local_training: the stage's work since its anchor.
    """

    def __init__(self, compute: StageCompute, inner_steps: int, seconds: StageSeconds) -> None:
        """
        Args:
            inner_steps: H, inner steps of a round of stage 0.
        """
        self.compute, self.seconds = compute, seconds
        self.layout = compute.layout
        self.turns = TurnQueue()
        self.local_training = LocalTraining(compute, inner_steps)
        self._marked = 0.0

    @property
    def is_ready(self) -> bool:
        return True

    def turn(self) -> AbstractAsyncContextManager[None]:
        return self.turns.turn(Priority.MICROBATCH)

    # -- jobs ---------------------------------------------------------------------------------------------------------

    async def forward(self, x: Buffer) -> bytes:
        await asyncio.sleep(self.seconds.forward)
        return self.compute.forward(x)

    async def backward(self, x: Buffer, gradient: Buffer) -> bytes:
        await asyncio.sleep(self.seconds.backward)
        return self.compute.backward(x, gradient)

    async def loss(self, x: Buffer, targets: Buffer) -> tuple[float, bytes]:
        await asyncio.sleep(self.seconds.forward + self.seconds.backward)
        return self.compute.loss(x, targets)

    async def draw(self) -> tuple[int, bytes, bytes]:
        await asyncio.sleep(self.seconds.forward)
        return self.compute.draw()

    async def finish(self, batch: int, gradient: Buffer, loss: float) -> None:
        await asyncio.sleep(self.seconds.backward)
        self.compute.finish(batch, gradient, loss)

    def check(self, activation: Buffer) -> None:
        self.compute.check(activation)

    # -- the weights --------------------------------------------------------------------------------------------------

    async def begin(self, round_number: int, cut: asyncio.Event) -> LocalProgress:
        self.local_training.begin(round_number)
        self._marked = loop_time()
        return self.local_training.work()

    async def step(self, round_number: int, on_stepped: Callable[[], None]) -> tuple[bool, LocalProgress | None]:
        async with self.turns.turn(Priority.WEIGHTS):
            await asyncio.sleep(self.seconds.step)
            self.local_training.step()
            on_stepped()
            now = loop_time()
            self.local_training.spend(now - self._marked)
            self._marked = now
        due = self.local_training.due()
        return self.local_training.complete, self.local_training.work() if due else None

    async def work(self) -> LocalProgress:
        return self.local_training.work()

    async def read(self, into: Vector, fragment: int = 0) -> None:
        async with self.turns.turn(Priority.WEIGHTS):
            self.local_training.read(into, fragment)

    async def replace(
        self, source: Vector, anchor: Vector | None, tokens: int, on_replaced: Callable[[], None]
    ) -> None:
        async with self.turns.turn(Priority.WEIGHTS):
            self.local_training.write(source, 0, anchor, tokens)
            self.compute.discard()
            on_replaced()

    async def release(self) -> None:
        """Without effect: there is no worker."""

    async def evaluate(self) -> float:
        async with self.turns.turn(Priority.WEIGHTS):
            return self.local_training.evaluate()
