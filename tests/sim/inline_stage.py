"""One stage of a pipeline computed in the event loop itself, in virtual time. A node uses a worker process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from node.training.stage_learner import StageCompute
from node.training.stage_replica import Priority, StageSeconds, TurnQueue
from node.training.trainer import LocalTraining
from protocols.aio import loop_time
from protocols.base import LocalProgress, Vector
from protocols.pipeline.job import JobKind, JobResult, StageJob


class InlineStage:
    """A `StageReplica` over a `StageCompute`. A job sleeps for its duration, which may change, then is done at once."""

    def __init__(self, compute: StageCompute, inner_steps: int, seconds: StageSeconds) -> None:
        self.compute, self.seconds = compute, seconds
        self.layout = compute.layout
        self.turns = TurnQueue()
        self.local_training = LocalTraining(compute, inner_steps)
        self._marked = 0.0

    @property
    def is_ready(self) -> bool:
        return True

    def turn(self, outer: bool = False) -> AbstractAsyncContextManager[None]:
        return self.turns.turn(Priority.OUTER if outer else Priority.MICROBATCH)

    async def run(self, job: StageJob) -> JobResult:
        await asyncio.sleep(self.seconds.of(job.kind))
        return self.compute.run(job, self.local_training.anchor)

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

    async def read(self, into: Vector) -> None:
        async with self.turns.turn(Priority.WEIGHTS):
            self.local_training.read(into)

    async def replace(
        self, source: Vector, anchor: Vector | None, tokens: int, on_replaced: Callable[[], None]
    ) -> None:
        async with self.turns.turn(Priority.WEIGHTS):
            self.local_training.write(source, anchor, tokens)
            self.compute.discard()
            on_replaced()

    async def release(self) -> None:
        """Without effect: there is no worker."""

    async def evaluate(self) -> float:
        async with self.turns.turn(Priority.WEIGHTS):
            return self.local_training.evaluate()


def accumulate(stages: Sequence[StageCompute]) -> float:
    """One microbatch through all stages, forwards and back; returns its loss."""
    first, *middle, last = stages
    drawn = first.run(StageJob(JobKind.DRAW))
    x, targets = drawn.payloads
    inputs = []
    for stage in middle:
        inputs.append(x)
        (x,) = stage.run(StageJob(JobKind.FORWARD, (x,))).payloads
    done = last.run(StageJob(JobKind.LOSS, (x, targets)))
    (gradient,) = done.payloads
    for stage, x in zip(reversed(middle), reversed(inputs), strict=True):
        (gradient,) = stage.run(StageJob(JobKind.BACKWARD, (x, gradient))).payloads
    first.run(StageJob(JobKind.FINISH, (gradient,), drawn.number, done.loss))
    return done.loss
