"""What a stage offers to its round."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from node.training.remote import NOTHING
from node.training.stage_trainer import LOOK_SECONDS, DrivingTrainer, ServingTrainer, StageTraining
from protocols.base import LocalProgress, Member, RoundKey
from protocols.pipeline.admission import StepAdmission
from tests.sim import loop as simloop

BATCHES, IDLE_SECONDS, JOB_SECONDS = 2, 40.0, 0.5
ME, KEY = Member("me"), RoundKey(bytes(32), "run/stage/1", bytes(32), 3)
WORK = replace(NOTHING, tokens=1024, seconds=IDLE_SECONDS, step_seconds=IDLE_SECONDS)
"""A stage had nobody for a while: the step took so long because no microbatch came."""


class Replica:
    """Its weights have just taken a step that lasted long."""

    layout = None
    is_ready = True

    async def begin(self, round_number: int, cut: asyncio.Event) -> LocalProgress:
        return WORK

    async def step(self, round_number: int, on_stepped: Any) -> tuple[bool, LocalProgress]:
        on_stepped()
        return True, WORK

    async def work(self) -> LocalProgress:
        return WORK


def admission() -> StepAdmission:
    """One in which a step is due."""
    due = StepAdmission(BATCHES, lambda kind, lease: None)
    due.open()
    for number in range(BATCHES):
        lease = due.grant(ME, number, 0.0)
        lease.begin_backward()
        lease.count()
    return due


def offers(trainer: Any) -> list[LocalProgress]:
    """All offers of one round, which is cut after a second, and its result."""
    found: list[LocalProgress] = []

    async def story() -> None:
        cut = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, cut.set)
        found.append(await trainer.train(KEY, cut, found.append))

    simloop.run(story())
    assert len(found) >= 2
    return found


async def forever() -> None:
    await asyncio.sleep(1e9)


def test_idle_time_of_a_step_does_not_hold_up_the_call() -> None:
    replica: Any = Replica()
    training = StageTraining(ME, 1, replica, lambda: True, job_seconds=lambda: JOB_SECONDS)
    driver: Any = SimpleNamespace(admission=admission(), run=forever)
    for trainer in (
        ServingTrainer(training, admission(), lambda: 4),
        DrivingTrainer(training, driver, lambda rounds: None),
    ):
        found = offers(trainer)
        assert {each.step_seconds for each in found} == {LOOK_SECONDS + JOB_SECONDS}
        assert {each.seconds for each in found} == {IDLE_SECONDS}, "the time is reported as it was"


def test_round_in_which_a_driver_rested_is_not_announced_as_trained() -> None:
    """It may have been called only to change the roster. The next attempt at the same round does not forget it."""
    replica: Any = Replica()
    driver: Any = SimpleNamespace(admission=admission(), run=forever)
    announced: list[int] = []
    trainer = DrivingTrainer(StageTraining(ME, 0, replica, lambda: True), driver, announced.append)

    async def story() -> None:
        for rests, key, expected in (
            (True, KEY, KEY.round),
            (False, KEY, KEY.round),
            (False, replace(KEY, lineage=bytes([1] * 32)), KEY.round + 1),
        ):
            trainer.rest(rests)
            cut = asyncio.Event()
            asyncio.get_running_loop().call_later(1.0, cut.set)
            await trainer.train(key, cut, lambda work: None)
            assert announced[-1] == expected

    simloop.run(story())
