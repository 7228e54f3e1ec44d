"""Pipelines whose peers move from stage to stage: training goes on, nothing counts twice, and no round is lost.

Each story is judged by the checkers of rounds and of microbatches (`PipelineRunner.play`) beside what it asserts.
"""

from __future__ import annotations

import asyncio

import pytest

from protocols.base import PeerId
from tests.sim.pipeline_runner import MovingRunner
from tests.sim.scenario_runner import ScenarioSetup
from tests.support.long import long
from tests.support.simulated import simulated


def counted(run: MovingRunner, peer: PeerId, stage: int, since: float) -> int:
    """Microbatches that a peer has counted in a stage."""
    return run.count("counted", since, stage)[peer]


@simulated(MovingRunner, (0, 0, 1, 1, 2))
async def test_moved_peer_contributes_there_and_back(run: MovingRunner) -> None:
    """Others decide each round meanwhile, without a fork. At its return it begins from its own checkpoint."""
    await run.rounds(2)
    began = run.now
    for target in (0, 1):
        run.move("p3", target)
        await run.until(lambda target=target: run.stage("p3") == target, 30.0, "the switch")  # type: ignore[misc]
        await run.until(run.whole, 120.0, "a whole swarm")
        since = run.now
        await run.rounds(2)
        assert counted(run, "p3", target, since) and not counted(run, "p3", 1 - target, since)
    assert not any(run.forks(peer) for peer in run.peers)
    assert all("undecided" not in run.outcomes(peer, began) for peer in ("p0", "p1", "p2", "p4"))


@pytest.mark.parametrize("number", (60, *long(1, 150)))
@simulated(MovingRunner, (0, 0, 1, 1))
async def test_mover_killed_at_a_message_comes_back(run: MovingRunner, number: int) -> None:
    """In one of both stages, whose peers train on. `python -m tests.sim.moving` plays all messages."""
    assert await run.killed_in_move("p3", 0, number)


@pytest.mark.parametrize("stage", (1, *long(0)))
@simulated(MovingRunner, (0, 0, 1, 1), ScenarioSetup(4, inner_steps=6, pace_seconds=4.0))
async def test_move_in_everybodys_first_step_skips_no_round(run: MovingRunner, stage: int) -> None:
    await run.rounds(2)
    await asyncio.sleep(0.2)
    mover, began = run.of_stage(stage)[1], run.now
    run.move(mover, 1 - stage)
    await run.until(lambda: run.stage(mover) == 1 - stage, 60.0, "the switch")
    await run.rounds(2)
    assert all(set(run.outcomes(peer, began)) <= {"committed", "alone"} for peer in run.peers if peer != mover)
