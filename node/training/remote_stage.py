"""One stage of a pipeline in a worker process: its jobs, its steps, and its work since the anchor.

A worker that dies loses the gradients of the present step. `on_lost` is called in that instant, before any other job:
it voids all leases, so that no microbatch of the lost gradient is ever counted in the next worker's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Self

from node.tasks.spec import WorkerSpec
from node.training import shared
from node.training.process import WorkerError, WorkerGone, WorkerProcess
from node.training.remote import NOTHING, RemoteTrainer
from node.training.stage_replica import Priority, TurnQueue
from node.training.stage_worker import ActivationSlots, codec_of, sizes_of
from protocols.aio import loop_time, run_with_helper
from protocols.base import ALL, BadPayload, Compute, LocalProgress, Vector
from protocols.pipeline.job import JobResult, LeaseLost, StageJob


class RemoteStage(RemoteTrainer):
    """A `StageReplica` over a worker process. `on_restored` is called when another worker has replaced a lost one."""

    def __init__(self, spec: WorkerSpec, compute: Compute, on_given_up: Callable[[str], None] | None = None) -> None:
        assert spec.stage is not None
        self.codec = codec_of(spec)
        self.sizes = sizes_of(self.codec)
        self._slots_descriptor = shared.create()
        super().__init__(replace(spec, stage=replace(spec.stage, slots=self._slots_descriptor)), compute, on_given_up)
        self.on_lost: Callable[[], None] = lambda: None
        self.on_restored: Callable[[], None] = lambda: None
        self._turns = TurnQueue()
        self._marked = 0.0

    async def __aenter__(self) -> Self:
        try:
            self._slots = ActivationSlots(self._slots_descriptor, self.sizes)
            return await super().__aenter__()
        except BaseException:
            os.close(self._slots_descriptor)
            raise

    async def __aexit__(self, *error: Any) -> None:
        try:
            await super().__aexit__(*error)
        finally:
            os.close(self._slots_descriptor)

    @property
    def is_ready(self) -> bool:
        return self._worker is not None

    def _lose(self, worker: WorkerProcess) -> None:
        if self._worker is worker:
            super()._lose(worker)
            self._unanswered = worker  # its steps since the anchor are dropped: it may have died in the middle of one
            self.on_lost()

    async def _gain(self, worker: WorkerProcess) -> None:
        await super()._gain(worker)
        self.on_restored()

    @asynccontextmanager
    async def turn(self, outer: bool = False) -> AsyncIterator[None]:
        async with self._turns.turn(Priority.OUTER if outer else Priority.MICROBATCH), self._boundary():
            yield

    @asynccontextmanager
    async def _weights_turn(self) -> AsyncIterator[None]:
        async with self._turns.turn(Priority.WEIGHTS), self._boundary():
            yield

    async def run(self, job: StageJob) -> JobResult:
        self._slots.put(job.payloads)
        try:
            answer = await self._ask({"do": job.kind.value, "number": job.number, "loss": job.loss, "stale": job.stale})
        except WorkerError as error:
            raise BadPayload(str(error)) from error
        except WorkerGone:
            raise LeaseLost("the replica's worker died") from None
        if "lost" in answer:
            raise LeaseLost(str(answer["lost"]))
        given = self._slots.result(map(self.sizes.of, job.kind.gives)) if answer["given"] else ()
        return JobResult(given, int(answer["number"]), float(answer["loss"]))

    # -- the weights --------------------------------------------------------------------------------------------------

    async def begin(self, round_number: int, cut: asyncio.Event) -> LocalProgress:
        self._marked = loop_time()
        return await run_with_helper(self._begin(round_number, cut), self._watch(cut))

    async def _begin(self, round_number: int, cut: asyncio.Event) -> LocalProgress:
        while await self._alive(cut):
            try:
                async with self._weights_turn():
                    return LocalProgress(**await self._ask({"do": "begin", "round": round_number}))
            except WorkerGone:
                continue
        return NOTHING

    async def step(self, round_number: int, on_stepped: Callable[[], None]) -> tuple[bool, LocalProgress | None]:
        try:
            async with self._weights_turn():
                now = loop_time()
                command = {"do": "step", "round": round_number, "seconds": now - self._marked}
                complete, tokens, work = await self._ask(command)
                self._marked = now
                self._carried = tokens
                on_stepped()
        except WorkerGone:
            return False, NOTHING
        return complete, LocalProgress(**work) if work else None

    async def work(self) -> LocalProgress:
        try:
            async with self._weights_turn():
                work = LocalProgress(**await self._ask({"do": "work"}))
                self._carried = work.tokens
                return work
        except WorkerGone:
            return NOTHING

    async def read(self, into: Vector, part: slice = ALL) -> None:
        async with self._turns.turn(Priority.WEIGHTS):
            await super().read(into, part)

    async def replace(
        self, source: Vector, anchor: Vector | None, tokens: int, on_replaced: Callable[[], None]
    ) -> None:
        async with self._turns.turn(Priority.WEIGHTS):
            await super().write(source, anchor, tokens)
            on_replaced()
