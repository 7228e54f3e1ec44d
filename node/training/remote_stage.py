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

from node.tasks.spec import GptValues, WorkerSpec
from node.training import shared
from node.training.activation_slots import ActivationSlots
from node.training.inline_stage import Priority, TurnQueue
from node.training.leased_stage import UninterruptedJobs
from node.training.process import WorkerError, WorkerGone, WorkerProcess
from node.training.remote import NOTHING, RemoteTrainer
from node.training.stage_job import StageSizes, stage_sizes
from node.training.stage_learner import check_activation
from protocols.aio import loop_time, run_with_helper
from protocols.base import BadPayload, Buffer, Compute, LocalProgress, Vector
from protocols.pipeline.work import LeaseLost

MAX_OUTER_JOBS = 4
"""Evaluations that wait or run at once: those whose askers are gone run to their end, too."""


class RemoteStage(RemoteTrainer):
    """`StageJobs` and `StageReplica` over a worker process. Use as an async context manager, as `RemoteTrainer`.

    Attributes:
        sizes: of activations, targets and logits.
        on_lost: called when a worker has died, or its answer is not awaited any more.
        on_restored: called when another worker has taken its place.
    """

    def __init__(self, spec: WorkerSpec, compute: Compute, on_given_up: Callable[[str], None] | None = None) -> None:
        assert spec.stage is not None
        self.sizes: StageSizes = stage_sizes(spec)
        self._activations = spec.stage.activations
        self._slots_descriptor = shared.create()
        super().__init__(replace(spec, stage=replace(spec.stage, slots=self._slots_descriptor)), compute, on_given_up)
        self.on_lost: Callable[[], None] = lambda: None
        self.on_restored: Callable[[], None] = lambda: None
        self._turns, self._running = TurnQueue(), UninterruptedJobs()
        self._outer_jobs = 0
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
        """Whether there is a worker now."""
        return self._worker is not None

    def _lose(self, worker: WorkerProcess) -> None:
        if self._worker is worker:
            super()._lose(worker)
            self._unanswered = worker  # its steps since the anchor are dropped: it may have died in the middle of one
            self.on_lost()

    def _gain(self, worker: WorkerProcess) -> None:
        super()._gain(worker)
        self.on_restored()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A turn between two jobs, in the order of arrival."""
        async with self._turns.turn(Priority.MICROBATCH), self._boundary():
            yield

    @asynccontextmanager
    async def _weights_turn(self) -> AsyncIterator[None]:
        async with self._turns.turn(Priority.WEIGHTS), self._boundary():
            yield

    # -- jobs ---------------------------------------------------------------------------------------------------------

    async def forward(self, x: Buffer) -> bytes:
        await self._job({"do": "forward"}, x)
        return self._slots.result(self.sizes.activation_bytes)

    async def backward(self, x: Buffer, gradient: Buffer) -> bytes:
        await self._job({"do": "backward"}, x, gradient)
        return self._slots.result(self.sizes.activation_bytes)

    async def loss(self, x: Buffer, targets: Buffer) -> tuple[float, bytes]:
        loss = await self._job({"do": "loss"}, x, targets)
        return float(loss), self._slots.result(self.sizes.activation_bytes)

    async def draw(self) -> tuple[int, bytes, bytes]:
        batch, sizes = await self._job({"do": "draw"}), self.sizes
        y = self._slots.result(sizes.activation_bytes)
        return int(batch), y, self._slots.result(sizes.target_bytes, after=sizes.activation_bytes)

    async def finish(self, batch: int, gradient: Buffer, loss: float) -> None:
        await self._job({"do": "finish", "batch": batch, "loss": loss}, gradient)

    def check(self, activation: Buffer) -> None:
        """Check what another stage has sent, in the peer's own process."""
        if isinstance(self._spec.values, GptValues):
            check_activation(activation, self._activations)

    async def _job(self, command: dict[str, Any], *inputs: Buffer) -> Any:
        """Have the worker do one job inside the caller's turn.

        Raises:
            BadPayload: it refuses the inputs.
            LeaseLost: there is no worker, or it died.
        """
        for number, data in enumerate(inputs):
            self._slots.put(number, data)
        try:
            return await self._ask(command)
        except WorkerError as error:
            raise BadPayload(str(error)) from error
        except WorkerGone:
            raise LeaseLost("the replica's worker died") from None

    # -- with the outer parameters: `OuterWork`, `FirstOuterWork` -----------------------------------------------------

    async def outer_forward(self, x: Buffer) -> bytes:
        return bytes(await self._outer({"do": "outer_forward"}, x, size=self.sizes.activation_bytes))

    async def outer_loss(self, x: Buffer, targets: Buffer) -> float:
        return float(await self._outer({"do": "outer_loss"}, x, targets))

    async def outer_logits(self, x: Buffer, position: int) -> bytes:
        return bytes(await self._outer({"do": "outer_logits", "position": position}, x, size=self.sizes.logit_bytes))

    async def outer_sample(self, index: int) -> tuple[bytes, bytes] | None:
        size = self.sizes.activation_bytes
        both = await self._outer({"do": "outer_sample", "index": index}, size=size + self.sizes.target_bytes)
        return (both[:size], both[size:]) if both else None

    async def outer_first(self, tokens: Buffer) -> bytes:
        return bytes(await self._outer({"do": "outer_first"}, tokens, size=self.sizes.activation_bytes))

    async def _outer(self, command: dict[str, Any], *inputs: Buffer, size: int = 0) -> Any:
        """A job of its own. Returns the worker's answer or, with `size`, so many bytes of the result; none if False.

        Raises:
            LeaseLost: there is no worker, or too many such jobs wait.
        """

        async def job() -> Any:
            try:
                async with self.turn():
                    answer = await self._job(command, *inputs)
                    if answer is False:
                        return b""
                    return self._slots.result(size) if size else answer
            finally:
                self._outer_jobs -= 1

        if self._outer_jobs >= MAX_OUTER_JOBS:
            raise LeaseLost("too many evaluations at once")
        self._outer_jobs += 1
        return await self._running.finish(job())

    # -- the weights --------------------------------------------------------------------------------------------------

    async def begin(self, round_number: int, cut: asyncio.Event) -> LocalProgress:
        """See `StageReplica`."""
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
        """See `StageReplica`. If the worker dies, the work starts again from zero."""
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
        """See `StageReplica`; nothing if there is no worker now."""
        try:
            async with self._weights_turn():
                work = LocalProgress(**await self._ask({"do": "work"}))
                self._carried = work.tokens
                return work
        except WorkerGone:
            return NOTHING

    async def read(self, into: Vector, fragment: int = 0) -> None:
        """Copy the local parameters out, between two jobs."""
        async with self._turns.turn(Priority.WEIGHTS):
            await super().read(into, fragment)

    async def replace(
        self, source: Vector, anchor: Vector | None, tokens: int, on_replaced: Callable[[], None]
    ) -> None:
        """See `StageReplica`."""
        async with self._turns.turn(Priority.WEIGHTS):
            await super().write(source, 0, anchor, tokens)
            on_replaced()
