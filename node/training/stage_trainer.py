"""Trainers of a pipeline's peers: one drives microbatches through all stages, the others serve them.

Both take an AdamW step whenever B microbatches are counted at this peer, and leave everything else to the outer loop:
the pseudo-gradient of a stage is measured, weighted by its tokens and averaged as that of a whole model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from node.training.inline_stage import InlineStage, Priority
from node.training.trainer import LocalTraining
from protocols.aio import loop_time, task_group
from protocols.base import LocalProgress, Member, RoundKey, Vector
from protocols.pipeline.admission import StepAdmission
from protocols.pipeline.driving import PipelineDriver
from protocols.pipeline.serving import StageServer
from protocols.pipeline.settings import PipelineEvent, ignore_event

LOOK_SECONDS = 0.25
"""How often a stage looks whether the round's inner steps are complete at stage 0."""


@dataclass(frozen=True, slots=True)
class StageTraining:
    """What both trainers work with.

    Attributes:
        me, stage: for events.
        inner_steps: H, inner steps of a round of stage 0.
        is_member: whether what this peer trains counts: it is in the head's roster, and holds the head's state.
        watch: is passed each step, and each write that drops what was counted.
    """

    me: Member
    stage: int
    work: InlineStage
    inner_steps: int
    is_member: Callable[[], bool]
    watch: Callable[[PipelineEvent], None] = ignore_event


class _StageTrainer:
    """`protocols.base.Trainer` but for `train`.

    Attributes:
        local_training: the stage's work since its anchor.
    """

    def __init__(self, training: StageTraining, admission: StepAdmission) -> None:
        self.layout = training.work.compute.layout
        self.local_training = LocalTraining(training.work.compute, training.inner_steps)
        self._training, self._admission = training, admission
        self._marked = 0.0

    async def read(self, into: Vector, fragment: int = 0) -> None:
        """Copy the local parameters out, between two jobs."""
        async with self._training.work.turns.turn(Priority.WEIGHTS):
            self.local_training.read(into, fragment)

    async def write(self, source: Vector, fragment: int = 0, anchor: Vector | None = None, tokens: int = 0) -> None:
        """Replace the local parameters, between two jobs. All leases are void then, and what was counted is dropped."""
        async with self._training.work.turns.turn(Priority.WEIGHTS):
            self.local_training.write(source, fragment, anchor, tokens)
            self._training.work.compute.discard()
            self._change_epoch("voided")

    async def evaluate(self) -> float:
        """Held-out loss, if the stage's task has one."""
        async with self._training.work.turns.turn(Priority.WEIGHTS):
            return self.local_training.evaluate()

    async def _step(self) -> None:
        """Take the AdamW step that is due."""
        work = self._training.work
        async with work.turns.turn(Priority.WEIGHTS):
            await asyncio.sleep(work.seconds.step)
            self.local_training.step()
            self._change_epoch("stepped")
        self._spend()

    def _change_epoch(self, kind: str) -> None:
        training, admission = self._training, self._admission
        training.watch(PipelineEvent(kind, training.me, 0, training.stage, training.me, admission.epoch))
        admission.next_epoch()

    def _spend(self) -> None:
        now = loop_time()
        self.local_training.spend(now - self._marked)
        self._marked = now


class ServingTrainer(_StageTrainer):
    """Trains a stage other than 0: it admits microbatches until the round is cut.

    Its inner steps are complete when those of stage 0 are, by `rounds_completed`: replicas of different stages take
    different numbers of steps.
    """

    def __init__(self, training: StageTraining, server: StageServer, rounds_completed: Callable[[], int]) -> None:
        """
        Args:
            rounds_completed: training rounds that stage 0 has completed, as `StageClock` says.
        """
        super().__init__(training, server.admission)
        self._server, self._rounds_completed = server, rounds_completed

    async def train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool = True
    ) -> LocalProgress:
        """Serve until `cut` is set, whatever `surplus` says: other stages need this one."""
        local_training, admission = self.local_training, self._admission
        local_training.begin(key.round)
        self._marked = loop_time()
        complete = self._is_complete(key)
        progress(self._work(key))
        if self._training.is_member():
            admission.open()
        try:
            while not cut.is_set():
                if admission.is_full:
                    await self._step()
                    if local_training.due():
                        progress(self._work(key))
                elif complete != self._is_complete(key):
                    complete = not complete
                    progress(self._work(key))
                else:
                    await self._server.until(lambda: admission.is_full or cut.is_set(), loop_time() + LOOK_SECONDS)
        finally:
            admission.close()
        return self._work(key)

    def _is_complete(self, key: RoundKey) -> bool:
        return self._rounds_completed() > key.round

    def _work(self, key: RoundKey) -> LocalProgress:
        return replace(self.local_training.work(), complete=self._is_complete(key))


class DrivingTrainer(_StageTrainer):
    """Trains stage 0: it draws microbatches and drives them through all stages until the round is cut."""

    def __init__(self, training: StageTraining, driver: PipelineDriver, announce: Callable[[int], None]) -> None:
        """
        Args:
            announce: tells the other peers how many training rounds have ended at this one.
        """
        super().__init__(training, driver.admission)
        self._driver, self._announce = driver, announce

    async def train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool = True
    ) -> LocalProgress:
        """Train until `cut` is set; see `protocols.base.Trainer`."""
        local_training = self.local_training
        local_training.begin(key.round)
        self._marked = loop_time()
        self._announce(key.round)
        progress(local_training.work())
        if self._training.is_member():
            async with task_group() as group:
                driving = group.create_task(self._driver.run())
                await self._steps(cut, progress, surplus)
                self._admission.close()
                driving.cancel()
        await cut.wait()
        # a slow driver, too: in the run's last round nothing else says that stage 0 has ended its training
        self._announce(key.round + 1)
        return local_training.work()

    async def _steps(self, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool) -> None:
        """Take the steps as they fall due, until the cut; without surplus, until the inner steps are complete."""
        local_training, admission = self.local_training, self._admission
        admission.open()
        while not cut.is_set() and (surplus or not local_training.complete):
            if admission.is_full:
                await self._step()
                if local_training.due():
                    progress(local_training.work())
            else:
                await self._driver.until(lambda: admission.is_full or cut.is_set(), loop_time() + LOOK_SECONDS)
