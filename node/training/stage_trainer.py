"""Trainers of a pipeline's peers: one drives microbatches through all stages, the others serve them.

Both take an optimiser step whenever one is due (`StepAdmission`), and leave everything else to the outer
loop: the pseudo-gradient of a stage is measured, weighted by its tokens and averaged as that of a whole model.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from node.training.stage_replica import StageReplica
from node.training.trainer import RestGate
from protocols.aio import loop_time, task_group
from protocols.base import ALL, LocalProgress, Member, RoundKey, Vector
from protocols.pipeline.admission import StepAdmission
from protocols.pipeline.driving import PipelineDriver
from protocols.pipeline.settings import PipelineEvent, ignore_event

LOOK_SECONDS = 0.25
"""How often a stage looks whether the round's inner steps are complete at stage 0."""


@dataclass(frozen=True, slots=True)
class StageTraining:
    me: Member
    stage: int
    replica: StageReplica
    is_member: Callable[[], bool]  # in the head's roster, with the head's state: what this peer trains counts
    lacks_majority: Callable[[], bool] = lambda: False  # at most half of the head's roster is live
    watch: Callable[[PipelineEvent], None] = ignore_event  # each step, each write that drops what was counted
    job_seconds: Callable[[], float] = lambda: 0.0  # to compute one microbatch; 0 if it is not known


class _StageTrainer:
    """`protocols.base.Trainer` but for `train`."""

    def __init__(self, training: StageTraining, admission: StepAdmission) -> None:
        self.layout = training.replica.layout
        self._training, self._admission = training, admission
        self._replica = training.replica
        self._is_training, self.resets = False, 0
        self._gate = RestGate()
        self._key: RoundKey | None = None  # of the round that it trains for, or trained for last

    def rest(self, resting: bool) -> None:
        self._gate.rest(resting)
        if resting:
            self._admission.close()

    async def release(self) -> None:
        await self._replica.release()

    async def read(self, into: Vector, part: slice = ALL) -> None:
        assert part == ALL, "a run with stages has no fragments"
        await self._replica.read(into)

    async def write(self, source: Vector, anchor: Vector | None = None, tokens: int = 0, part: slice = ALL) -> None:
        assert part == ALL, "a run with stages has no fragments"
        await self._replica.replace(source, anchor, tokens, self.void)

    async def evaluate(self) -> float:
        return await self._replica.evaluate()

    def void(self) -> None:
        """The weights or the gradients have changed: all leases are void, and what was counted is dropped."""
        self._tell("voided")
        self._admission.void()

    def lose(self) -> None:
        """The replica cannot compute any more, and has lost its gradients and its steps since the anchor. No microbatch
        is admitted until `resume`.
        """
        self.resets += 1
        self._admission.close()
        self.void()

    def resume(self) -> None:
        if self._is_training and not self._gate.resting:
            self._admission.open()

    async def train_alone(self, decided: asyncio.Event) -> LocalProgress | None:
        """Train whenever the stage lacks a majority, until its round is decided; the work, or None if there was none.

        The round may not be decided before a fork, for which this peer waits. Other stages need this one meanwhile.
        Nothing is offered or announced.
        """
        has_trained = False
        while not decided.is_set():
            if self._may_train_alone():
                has_trained = True
                await self._train_alone(decided)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await decided.wait()
        return await self._replica.work() if has_trained else None

    def _may_train_alone(self) -> bool:
        return not self._gate.resting and self._training.is_member() and self._training.lacks_majority()

    async def _train_alone(self, decided: asyncio.Event) -> None:
        assert self._key
        async with self._admitting():
            while not decided.is_set() and self._may_train_alone():
                if self._admission.is_due:
                    await self._replica.step(self._key.round, self._stepped)
                else:
                    await self._wait(decided)

    @asynccontextmanager
    async def _admitting(self) -> AsyncIterator[None]:
        self._open()
        try:
            yield
        finally:
            self._close()

    def _open(self) -> None:
        self._is_training = True
        if self._replica.is_ready and not self._gate.resting:
            self._admission.open()

    def _close(self) -> None:
        self._is_training = False
        self._admission.close()

    async def _rest(self, cut: asyncio.Event, progress: Callable[[LocalProgress], None]) -> None:
        """Microbatches that are counted already stay so."""
        progress(replace(await self._replica.work(), resting=True))
        await self._gate.opened(cut)
        if self._is_training and not cut.is_set():
            self._open()

    def _offer(self, work: LocalProgress) -> LocalProgress:
        """The work, with the time that this replica needs to notice a cut: it finishes a job, and no step.

        A step lasts until its microbatches come; if that time were offered, all others would train on for it after the
        call.
        """
        return replace(work, step_seconds=LOOK_SECONDS + self._training.job_seconds())

    async def _wait(self, cut: asyncio.Event) -> None:
        """Wait for a step that is due, the cut, or a rest."""
        await self._admission.changed.reached(
            lambda: self._admission.is_due or cut.is_set() or self._gate.resting, loop_time() + LOOK_SECONDS
        )

    def _stepped(self) -> None:
        self._tell("stepped")
        self._admission.stepped()

    def _tell(self, kind: str) -> None:
        training = self._training
        training.watch(PipelineEvent(kind, training.me, 0, training.stage, training.me, self._admission.epoch))


class ServingTrainer(_StageTrainer):
    """Trains a stage other than 0: it admits microbatches until the round is cut.

    Its inner steps are complete when those of stage 0 are, by `rounds_completed` (`StageClock`): replicas of different
    stages take different numbers of steps. A stage that is ahead serves until stage 0 has completed `run_rounds`.
    """

    def __init__(
        self,
        training: StageTraining,
        admission: StepAdmission,
        rounds_completed: Callable[[], int],
        run_rounds: float = math.inf,
    ) -> None:
        super().__init__(training, admission)
        self._rounds_completed, self._run_rounds = rounds_completed, run_rounds

    async def train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool = True
    ) -> LocalProgress:
        """Serve until `cut` is set, whatever `surplus` says: other stages need this one."""
        self._key, admission = key, self._admission
        work = await self._replica.begin(key.round, cut)
        complete = self._is_complete(key)

        def offer(work: LocalProgress) -> None:
            progress(self._offer(replace(work, complete=self._is_complete(key))))

        offer(work)
        if self._training.is_member():
            self._open()
        try:
            while not cut.is_set():
                if self._gate.resting:
                    await self._rest(cut, offer)
                elif admission.is_due:
                    _, due = await self._replica.step(key.round, self._stepped)
                    if due:
                        offer(due)
                elif complete != self._is_complete(key):
                    complete = not complete
                    offer(await self._replica.work())
                else:
                    await self._wait(cut)
        finally:
            self._close()
        return self._offer(replace(await self._replica.work(), complete=self._is_complete(key)))

    def _is_complete(self, key: RoundKey) -> bool:
        rounds = self._rounds_completed()
        return rounds > key.round or rounds >= self._run_rounds


class DrivingTrainer(_StageTrainer):
    """Trains stage 0; `announce` tells the other peers how many training rounds have ended at this one."""

    def __init__(self, training: StageTraining, driver: PipelineDriver, announce: Callable[[int], None]) -> None:
        super().__init__(training, driver.admission)
        self._driver, self._announce = driver, announce
        self._has_rested = False

    def rest(self, resting: bool) -> None:
        super().rest(resting)
        self._has_rested |= resting

    async def train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool = True
    ) -> LocalProgress:
        if key != self._key:  # else another attempt at the same round
            self._key, self._has_rested = key, self._gate.resting
        self._announce(key.round)
        work = await self._replica.begin(key.round, cut)
        progress(self._offer(work))
        if self._training.is_member() and not cut.is_set():
            async with self._admitting():
                await self._steps(key, cut, progress, surplus, work.complete)
        await cut.wait()
        # A slow driver, too: the other stages' averaging can begin before stage 0 has decided its round. A round of
        # others, or one in which this peer rested, may have been called only to change the roster, without training.
        if self._training.is_member() and not self._has_rested:
            self._announce(key.round + 1)
        return self._offer(await self._replica.work())

    @asynccontextmanager
    async def _admitting(self) -> AsyncIterator[None]:
        async with task_group() as group, super()._admitting():
            driving = group.create_task(self._driver.run())
            yield
            driving.cancel()

    async def _steps(
        self,
        key: RoundKey,
        cut: asyncio.Event,
        progress: Callable[[LocalProgress], None],
        surplus: bool,
        complete: bool,
    ) -> None:
        admission = self._admission
        while not cut.is_set() and (surplus or not complete):
            if self._gate.resting:
                await self._rest(cut, progress)
            elif admission.is_due:
                complete, due = await self._replica.step(key.round, self._stepped)
                if due:
                    progress(self._offer(due))
            else:
                await self._wait(cut)
