"""Everybody of a roster is killed, and started again from what stands on its disk: the run goes on."""

from __future__ import annotations

import asyncio

import pytest

from protocols.allreduce.plan import BUDGET_FLOOR_SECONDS
from protocols.base import PeerId
from protocols.consensus.record import Kind
from protocols.history.chain import DecidedRound
from tests.sim.durable_world import DurableWorld
from tests.sim.scenario_runner import ScenarioSetup

WHOLE_SECONDS = 30.0
"""From the moment when all are there again to the moment when all vote on one branch, in their new lives."""
PATIENCE_SECONDS = 3 * BUDGET_FLOOR_SECONDS


def forks(stage: DurableWorld, peer: PeerId) -> list[DecidedRound]:
    chain = stage.chain(peer)
    return [link for link in chain.since(chain.locator()[-1]) if link.record.kind == Kind.FORK]


@pytest.mark.parametrize(
    ("peers", "every_rounds", "moment"),
    ((1, 1, 0.0), (1, 3, 0.45), (2, 1, 0.45), (2, 3, 1.05), (3, 2, 0.0), (4, 1, 1.05), (4, 3, 0.45), (5, 3, 0.0)),
)
@simulated(lambda peers, every_rounds: DurableWorld(ScenarioSetup(peers), every_rounds))
async def test_all_peers_killed_resume_with_one_fork(
    stage: DurableWorld, peers: int, every_rounds: int, moment: float
) -> None:
    """In one round, by one FORK of them all; what is lost is at most what was decided since the last checkpoint."""
    await stage.rounds(5)
    await asyncio.sleep(moment)
    reached = max(stage.head(peer).key.round for peer in stage.peers)
    for peer in stage.peers:
        stage.kill(peer)
    await asyncio.sleep(5.0)
    for peer in stage.peers:
        stage.revive(peer)
    await asyncio.sleep(0.0)
    await stage.until(stage.whole, WHOLE_SECONDS, "a whole roster")
    await stage.rounds(2)
    (fork,) = forks(stage, "p0")
    assert {member.peer for member in fork.record.roster} == set(stage.peers)
    reached, resumed = reached, fork.record.round
    assert reached - every_rounds <= resumed <= reached


@pytest.mark.parametrize("pause_seconds", (1.0, 15.0))
@simulated(DurableWorld, ScenarioSetup(4), 2)
async def test_peers_restarted_one_by_one_resume(stage: DurableWorld, pause_seconds: float) -> None:
    await stage.rounds(5)
    for peer in stage.peers:
        stage.kill(peer)
    for peer in stage.peers:
        stage.revive(peer)
        await asyncio.sleep(pause_seconds)
    await stage.until(stage.whole, PATIENCE_SECONDS + WHOLE_SECONDS, "a whole roster")
    await stage.rounds(2)


@simulated(DurableWorld, ScenarioSetup(4), 3)
async def test_newest_checkpoint_wins_after_full_restart(stage: DurableWorld) -> None:
    """One has a later checkpoint than the others: they take it over."""
    await stage.rounds(4)
    old = dict(stage.disks)
    await stage.rounds(3)
    newest = stage.disks["p2"].links[-1].lineage
    stage.disks |= {peer: old[peer] for peer in ("p0", "p1", "p3")}
    assert newest != old["p0"].links[-1].lineage
    for peer in stage.peers:
        stage.kill(peer)
    for peer in stage.peers:
        stage.revive(peer)
    await asyncio.sleep(0.0)
    await stage.until(stage.whole, PATIENCE_SECONDS + WHOLE_SECONDS, "a whole roster")
    assert all(newest in stage.chain(peer) for peer in stage.peers)


@simulated(DurableWorld, ScenarioSetup(4))
async def test_majority_resumes_without_a_missing_peer(stage: DurableWorld) -> None:
    await stage.rounds(3)
    for peer in stage.peers:
        stage.kill(peer)
    back = stage.peers[:3]
    for peer in back:
        stage.revive(peer)
    await asyncio.sleep(0.0)
    seconds = await stage.until(stage.whole, PATIENCE_SECONDS + WHOLE_SECONDS, "a whole roster")
    await stage.rounds(2)
    assert seconds >= PATIENCE_SECONDS, "they did not wait for it"


@pytest.mark.parametrize(("fork_peers", "back"), ((0, 4), (3, 2)))
@simulated(lambda fork_peers: DurableWorld(ScenarioSetup(4, fork_peers=fork_peers)))
async def test_restarted_peers_wait_where_fork_is_forbidden(stage: DurableWorld, fork_peers: int, back: int) -> None:
    await stage.rounds(3)
    for peer in stage.peers:
        stage.kill(peer)
    for peer in stage.peers[:back]:
        stage.revive(peer)
    heads = {peer: stage.disks[peer].links[-1].lineage for peer in stage.peers[:back]}
    await asyncio.sleep(2 * PATIENCE_SECONDS)
    assert {peer: stage.head(peer).key.lineage for peer in heads} == heads
    if back < fork_peers:
        stage.revive(stage.peers[back])
        await asyncio.sleep(0.0)
        await stage.until(stage.whole, PATIENCE_SECONDS + WHOLE_SECONDS, "a whole roster")


@simulated(DurableWorld, ScenarioSetup(4), 4)
async def test_surviving_member_decides_and_restarted_ones_wait(stage: DurableWorld) -> None:
    """It holds the newest state: nothing is lost but the round under way."""
    await stage.rounds(3)
    newest = stage.head("p3").key.lineage
    for peer in stage.peers[:3]:
        stage.kill(peer)
        stage.revive(peer)
    await asyncio.sleep(0.0)
    await stage.until(stage.whole, PATIENCE_SECONDS + WHOLE_SECONDS, "a whole roster")
    (fork,) = forks(stage, "p0")
    assert [member.peer for member in fork.record.roster] == ["p3"]
    assert newest in stage.chain("p0")


@simulated(DurableWorld, ScenarioSetup(4), 3)
async def test_peer_restarted_alone_does_not_fork(stage: DurableWorld) -> None:
    await stage.rounds(4)
    stage.kill("p1")
    await stage.rounds(2)
    stage.revive("p1")
    await asyncio.sleep(0.0)
    await stage.until(stage.whole, WHOLE_SECONDS, "a whole roster")
    await stage.rounds(2)
    assert not forks(stage, "p1")


@simulated(DurableWorld, ScenarioSetup(4))
async def test_members_branch_beats_that_of_restarted_peers(stage: DurableWorld) -> None:
    """Two live, two were started again, and the two halves do not hear each other: neither can know of the other."""
    members, heirs = stage.peers[:2], stage.peers[2:]
    await stage.rounds(3)
    stage.cut(members, heirs)
    for peer in heirs:
        stage.kill(peer)
        stage.revive(peer)
    await asyncio.sleep(2 * PATIENCE_SECONDS)
    apart = {peer: stage.head(peer).key.lineage for peer in stage.peers}
    assert forks(stage, members[0]) and forks(stage, heirs[0])
    stage.heal(members, heirs)
    await stage.until(stage.whole, 2 * WHOLE_SECONDS, "a whole roster")
    assert all(apart[members[0]] in stage.chain(peer) for peer in stage.peers)
    assert all(apart[heirs[0]] not in stage.chain(peer) for peer in stage.peers)


@simulated(DurableWorld, ScenarioSetup(3))
async def test_lagging_survivor_does_not_block_restarted_peers(stage: DurableWorld) -> None:
    """It lives, and cannot get to where they are: the means that lead there died with those who held them."""
    behind, others = stage.peers[2], stage.peers[:2]
    await stage.rounds(3)
    stood = stage.head(behind).key.round
    stage.silence(behind)
    await stage.until(lambda: all(stage.head(peer).key.round > stood for peer in others), 200.0, "a round without it")
    for peer in others:
        stage.kill(peer)
    stage.heal([behind], others)
    for peer in others:
        stage.revive(peer)
    await asyncio.sleep(0.0)
    await stage.until(stage.whole, 2 * PATIENCE_SECONDS + WHOLE_SECONDS, "a whole roster")
    await stage.rounds(2)


@pytest.mark.parametrize(("peers", "fork_peers", "dead"), ((3, 2, 2), (4, 2, 3)))
@simulated(lambda peers, fork_peers: DurableWorld(ScenarioSetup(peers, fork_peers=fork_peers)))
async def test_restarted_peers_proceed_with_too_few_survivors(stage: DurableWorld, peers: int, dead: int) -> None:
    """They may not fork, being fewer than the run wants; the heirs are enough, and admit them."""
    await stage.rounds(3)
    for peer in stage.peers[:dead]:
        stage.kill(peer)
        stage.revive(peer)
    await asyncio.sleep(0.0)
    await stage.until(stage.whole, 2 * PATIENCE_SECONDS + 2 * WHOLE_SECONDS, "a whole roster")
    await stage.rounds(2)


@simulated(DurableWorld, ScenarioSetup(4))
async def test_isolated_survivor_does_not_revert_the_others(stage: DurableWorld) -> None:
    """It forked alone while the others, all of them started again, went on without it."""
    alone, others = stage.peers[3], stage.peers[:3]
    await stage.rounds(3)
    stage.silence(alone)
    for peer in others:
        stage.kill(peer)
        stage.revive(peer)
    await stage.until(lambda: "alone" in stage.outcomes(alone), 300.0, "the one alone goes on")
    await stage.until(lambda: bool(forks(stage, others[0])), 300.0, "the others go on")
    await stage.rounds(3, others)
    theirs = stage.head(others[0]).key.lineage
    stage.heal([alone], others)
    await stage.until(stage.whole, 2 * WHOLE_SECONDS, "a whole roster")
    assert theirs in stage.chain(alone)
