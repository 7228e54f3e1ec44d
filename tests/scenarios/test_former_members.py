"""Members leave one after the other, the last of them for good: those who left before it go on among themselves."""

from __future__ import annotations

import asyncio

import pytest

from protocols.allreduce.plan import BUDGET_FLOOR_SECONDS
from tests.sim.leaving import Leaving, Play
from tests.sim.scenario_runner import ScenarioRunner, ScenarioSetup
from tests.support.inline_trainer import InlineTrainer
from tests.support.long import long
from tests.support.simulated import simulated

AGAIN_SECONDS = 45.0
"""From the start of those who go on to a roster of all of them: patience, a vote, the rounds that admit the rest."""


@pytest.mark.parametrize(("peers", "pause_seconds"), ((3, 0.0), (4, 12.0), *long((5, 0.0), (6, 3.0))))
@simulated(Leaving)
async def test_former_majority_forks_without_the_last_leaver(swarm: Leaving, peers: int, pause_seconds: float) -> None:
    """By one FORK of a majority of a roster that several were in; the last one follows it when it is back."""
    await swarm.rounds(2)
    *early, last = swarm.peers
    await swarm.leave_in_turn([*early, last], pause_seconds)
    await swarm.revived(*early)
    await swarm.until(swarm.whole, AGAIN_SECONDS, "a roster of all but the last")
    (fork,) = swarm.forks(early[0])
    assert len(fork.record.roster) >= 2
    await swarm.rounds(2)
    await swarm.revived(last)
    await swarm.until(swarm.whole, AGAIN_SECONDS, "a roster of all")
    assert {link.lineage for peer in swarm.peers for link in swarm.forks(peer)} == {fork.lineage}


@pytest.mark.parametrize(
    ("fork_peers", "back"), ((1, ("p0", "p3")), *long((4, ("p0", "p1", "p2")), (0, ("p0", "p1", "p2")), (1, ("p0",))))
)
@simulated(lambda fork_peers: Leaving(5, fork_peers=fork_peers))
async def test_too_few_former_members_wait_for_last_member(
    swarm: Leaving, fork_peers: int, back: tuple[str, ...]
) -> None:
    """Two of five are no majority of any roster; and a run may want more, or forbid forks."""
    await swarm.rounds(2)
    await swarm.leave_in_turn(swarm.peers, 2.0)
    heads = {swarm.disks[peer].links[-1].lineage for peer in back}
    for peer in back:
        swarm.revive(peer)
    await asyncio.sleep(6 * BUDGET_FLOOR_SECONDS)
    assert {swarm.head(peer).key.lineage for peer in back} <= heads
    await swarm.revived("p4")
    if fork_peers == 1:
        await swarm.until(swarm.whole, AGAIN_SECONDS, "a roster with the last one")


@pytest.mark.long
@simulated(Leaving, 4)
async def test_former_members_wait_for_a_long_round(swarm: Leaving) -> None:
    """The last member still trains. It admits the former members when its round is over, and no peer forks."""
    await swarm.rounds(1)
    await swarm.leave_in_turn(swarm.peers[:3])
    trainer = swarm.replicas["p3"].trainer
    assert isinstance(trainer, InlineTrainer)
    trainer.step_seconds = 20.0
    await swarm.revived(*swarm.peers[:3])
    await swarm.until(swarm.whole, 600.0, "a roster of all")
    assert swarm.now > 12 * BUDGET_FLOOR_SECONDS and not swarm.forks("p3")


@simulated(Leaving, 7)
async def test_former_members_find_head_despite_silent_donors(swarm: Leaving) -> None:
    """Three of seven peers do not answer at all. Former members that ask them first lose no time."""
    await swarm.rounds(2)
    await swarm.leave_in_turn(swarm.peers, 0.5)
    swarm.cut(swarm.peers[:4], swarm.peers[4:])
    await swarm.revived(*swarm.peers[:4])
    await swarm.until(swarm.whole, AGAIN_SECONDS, "a roster of four")


@simulated(ScenarioRunner, ScenarioSetup(3))
async def test_peers_without_states_take_that_of_a_waiting_peer(swarm: ScenarioRunner) -> None:
    """The last member dies before it admits the peer that has caught up. The others come back with empty disks."""
    await swarm.rounds(5)
    swarm.kill("p1")
    swarm.kill("p2")
    await swarm.until(lambda: bool(swarm.forks("p0")), 2 * AGAIN_SECONDS, "a fork of the last member")
    trainer = swarm.replicas["p0"].trainer
    assert isinstance(trainer, InlineTrainer)
    trainer.step_seconds = 20.0  # it admits nobody for a while
    await swarm.rounds(1)
    await swarm.revived("p1")
    await swarm.until(lambda: swarm.head("p1") == swarm.head("p0"), AGAIN_SECONDS, "the state of the last member")
    newest = swarm.head("p1").key.lineage
    await swarm.restarted("p0")
    await swarm.revived("p2")
    await swarm.until(swarm.whole, 2 * AGAIN_SECONDS, "a roster of all")
    assert all(newest in swarm.chain(peer) for peer in swarm.peers)


@pytest.mark.long
@simulated(Leaving, 5, founders=3)
async def test_fork_of_small_roster_yields_to_grown_swarm(swarm: Leaving) -> None:
    """Two of three leave; the third is joined by others. The two fork where they cannot reach them, and follow then."""
    await swarm.rounds(2)
    await swarm.leave_in_turn(["p0", "p1"])
    await swarm.begun("p3", "p4")
    await swarm.until(swarm.whole, AGAIN_SECONDS, "a roster with the newcomers")
    others = swarm.alive()
    await swarm.rounds(3)
    swarm.cut(["p0", "p1"], others)
    await swarm.revived("p0", "p1")
    await swarm.until(lambda: bool(swarm.forks("p0")), 120.0, "a fork of the two")
    kept = swarm.head("p2").key.lineage
    swarm.heal(["p0", "p1"], others)
    await swarm.until(swarm.whole, AGAIN_SECONDS, "a roster of all")
    assert all(kept in swarm.chain(peer) and not swarm.forks(peer) for peer in swarm.peers)


@pytest.mark.long
def test_crash_during_former_member_recovery_costs_no_branch() -> None:
    """Every two hundredth message; `python -m tests.sim.leaving` plays them all."""
    calm = Play(3)
    calm.run()
    for at in range(50, calm.messages, 200):
        Play(3, "crash", at).run()
