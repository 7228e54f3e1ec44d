"""Members leave one after the other, the last of them for good: those who left before it go on among themselves."""

from __future__ import annotations

import asyncio

import pytest

from node.training.trainer import InlineTrainer
from protocols.allreduce.plan import BUDGET_FLOOR_SECONDS
from tests.sim.leaving import PACE_SECONDS, Leaving, Play
from tests.sim.leaving_scenario import LongRounds

AGAIN_SECONDS = 45.0
"""From the start of those who go on to a roster of all of them: patience, a vote, the rounds that admit the rest."""


@pytest.mark.parametrize(("peers", "pause_seconds"), ((3, 0.0), (4, 12.0), (5, 0.0), (6, 3.0)))
@simulated(lambda peers: Leaving(LongRounds(peers, pace_seconds=PACE_SECONDS)))
async def test_former_majority_forks_without_the_last_leaver(stage: Leaving, peers: int, pause_seconds: float) -> None:
    """By one FORK of a majority of a roster that several were in; the last one follows it when it is back."""
    await stage.rounds(2)
    *early, last = stage.peers
    await stage.leave_in_turn([*early, last], pause_seconds)
    for peer in early:
        stage.revive(peer)
    await asyncio.sleep(0.0)
    await stage.until(stage.whole, AGAIN_SECONDS, "a roster of all but the last")
    (fork,) = stage.forks(early[0])
    assert len(fork.record.roster) >= 2
    await stage.rounds(2)
    stage.revive(last)
    await asyncio.sleep(0.0)
    await stage.until(stage.whole, AGAIN_SECONDS, "a roster of all")
    assert {link.lineage for peer in stage.peers for link in stage.forks(peer)} == {fork.lineage}


@pytest.mark.parametrize(
    ("fork_peers", "back"), ((1, ("p0", "p3")), (1, ("p0",)), (4, ("p0", "p1", "p2")), (0, ("p0", "p1", "p2")))
)
@simulated(lambda fork_peers: Leaving(LongRounds(5, pace_seconds=PACE_SECONDS, fork_peers=fork_peers)))
async def test_too_few_former_members_wait_for_last_member(
    stage: Leaving, fork_peers: int, back: tuple[str, ...]
) -> None:
    """Two of five are no majority of any roster; and a run may want more, or forbid forks."""
    await stage.rounds(2)
    await stage.leave_in_turn(stage.peers, 2.0)
    heads = {stage.disks[peer].links[-1].lineage for peer in back}
    for peer in back:
        stage.revive(peer)
    await asyncio.sleep(6 * BUDGET_FLOOR_SECONDS)
    assert {stage.head(peer).key.lineage for peer in back} <= heads
    stage.revive("p4")
    await asyncio.sleep(0.0)
    if fork_peers == 1:
        await stage.until(stage.whole, AGAIN_SECONDS, "a roster with the last one")


@simulated(Leaving, LongRounds(4, pace_seconds=PACE_SECONDS))
async def test_former_members_wait_for_a_long_round(stage: Leaving) -> None:
    """It is there and trains: they are admitted when its round is over, and nobody forks."""
    await stage.rounds(1)
    await stage.leave_in_turn(stage.peers[:3])
    trainer = stage.replicas["p3"].trainer
    assert isinstance(trainer, InlineTrainer)
    trainer.step_seconds = 20.0
    for peer in stage.peers[:3]:
        stage.revive(peer)
    await asyncio.sleep(0.0)
    await stage.until(stage.whole, 600.0, "a roster of all")
    assert stage.now > 12 * BUDGET_FLOOR_SECONDS and not stage.forks("p3")


@simulated(Leaving, LongRounds(7, pace_seconds=PACE_SECONDS))
async def test_former_members_find_head_despite_silent_donors(stage: Leaving) -> None:
    """Of seven, the last three do not even refuse: those who were told to ask them first lose no time by it."""
    await stage.rounds(2)
    await stage.leave_in_turn(stage.peers, 0.5)
    stage.cut(stage.peers[:4], stage.peers[4:])
    for peer in stage.peers[:4]:
        stage.revive(peer)
    await asyncio.sleep(0.0)
    await stage.until(stage.whole, AGAIN_SECONDS, "a roster of four")


@simulated(Leaving, LongRounds(5, founders=3, pace_seconds=PACE_SECONDS))
async def test_fork_of_small_roster_yields_to_grown_swarm(stage: Leaving) -> None:
    """Two of three leave; the third is joined by others. The two fork where they cannot reach them, and follow then."""
    await stage.rounds(2)
    await stage.leave_in_turn(["p0", "p1"])
    for peer in ("p3", "p4"):
        stage.begin(peer)
    await asyncio.sleep(0.0)
    await stage.until(stage.whole, AGAIN_SECONDS, "a roster with the newcomers")
    swarm = stage.alive()
    await stage.rounds(3)
    stage.cut(["p0", "p1"], swarm)
    for peer in ("p0", "p1"):
        stage.revive(peer)
    await asyncio.sleep(0.0)
    await stage.until(lambda: bool(stage.forks("p0")), 120.0, "a fork of the two")
    kept = stage.head("p2").key.lineage
    stage.heal(["p0", "p1"], swarm)
    await stage.until(stage.whole, AGAIN_SECONDS, "a roster of all")
    assert all(kept in stage.chain(peer) and not stage.forks(peer) for peer in stage.peers)


def test_crash_during_former_member_recovery_costs_no_branch() -> None:
    """Every hundredth message; `python -m tests.sim.leaving` plays them all."""
    calm = Play(3)
    calm.run()
    for at in range(50, calm.messages, 100):
        Play(3, "crash", at).run()
