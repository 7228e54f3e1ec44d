"""Everybody of a roster is killed, and started again from what stands on its disk: the run goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from protocols.allreduce import plan as planning
from protocols.allreduce.plan import BUDGET_FLOOR_SECONDS
from protocols.base import Deadline, PeerGone, PeerId, Settings, Trainer
from protocols.streams.framing import BULK_METHODS
from tests.sim.scenario_runner import ScenarioRunner, ScenarioSetup
from tests.sim.transport import SimTransport
from tests.support.long import long
from tests.support.simulated import simulated

WHOLE_SECONDS = 30.0
"""The limit from the last restart until all new incarnations vote on one branch."""
PATIENCE_SECONDS = 3 * BUDGET_FLOOR_SECONDS


@pytest.mark.parametrize(
    ("peers", "every_rounds", "moment"),
    (
        (1, 3, 0.45),
        (2, 1, 0.45),
        (3, 2, 0.0),
        (4, 1, 1.05),
        *long((1, 1, 0.0), (2, 3, 1.05), (4, 3, 0.45), (5, 3, 0.0)),
    ),
)
@simulated(lambda peers, every_rounds: ScenarioRunner(ScenarioSetup(peers, every_rounds=every_rounds)))
async def test_all_peers_killed_resume_with_one_fork(
    swarm: ScenarioRunner, peers: int, every_rounds: int, moment: float
) -> None:
    """In one round, by one FORK of them all; what is lost is at most what was decided since the last checkpoint."""
    await swarm.rounds(5)
    await asyncio.sleep(moment)
    reached = max(swarm.head(peer).key.round for peer in swarm.peers)
    for peer in swarm.peers:
        swarm.kill(peer)
    await asyncio.sleep(5.0)
    await swarm.revived(*swarm.peers)
    await swarm.until(swarm.whole, WHOLE_SECONDS, "a whole roster")
    await swarm.rounds(2)
    (fork,) = swarm.forks("p0")
    assert {member.peer for member in fork.record.roster} == set(swarm.peers)
    assert reached - every_rounds <= fork.record.round <= reached


class AwaitingBackup(ScenarioRunner):
    """Peers of a stage: others have a much newer state of it."""

    waits = True

    def _settings(self, index: int, trainer: Trainer, transport: SimTransport) -> Settings:
        return replace(super()._settings(index, trainer, transport), awaits_backup=lambda: self.waits)


@simulated(AwaitingBackup, ScenarioSetup(2, every_rounds=2))
async def test_restarted_peers_await_a_newer_backup(swarm: AwaitingBackup) -> None:
    """They would train on from an older state. Members that were there all the time fork as ever."""
    await swarm.rounds(3)
    await swarm.restarted("p1")
    await swarm.until(swarm.whole, PATIENCE_SECONDS, "a fork of the member that is left")
    await swarm.restarted(*swarm.peers)
    await asyncio.sleep(PATIENCE_SECONDS)
    assert not swarm.whole()
    swarm.waits = False
    await swarm.until(swarm.whole, WHOLE_SECONDS, "a whole roster")


@pytest.mark.parametrize("pause_seconds", (15.0, *long(1.0)))
@simulated(ScenarioRunner, ScenarioSetup(4, every_rounds=2))
async def test_peers_restarted_one_by_one_resume(swarm: ScenarioRunner, pause_seconds: float) -> None:
    await swarm.rounds(5)
    for peer in swarm.peers:
        swarm.kill(peer)
    for peer in swarm.peers:
        swarm.revive(peer)
        await asyncio.sleep(pause_seconds)
    await swarm.until(swarm.whole, PATIENCE_SECONDS + WHOLE_SECONDS, "a whole roster")
    await swarm.rounds(2)


@simulated(ScenarioRunner, ScenarioSetup(4, every_rounds=3))
async def test_newest_checkpoint_wins_after_full_restart(swarm: ScenarioRunner) -> None:
    """One has a later checkpoint than the others: they take it over."""
    await swarm.rounds(4)
    old = dict(swarm.disks)
    await swarm.rounds(3)
    newest = swarm.disks["p2"].links[-1].lineage
    swarm.disks |= {peer: old[peer] for peer in ("p0", "p1", "p3")}
    assert newest != old["p0"].links[-1].lineage
    await swarm.restarted(*swarm.peers)
    await swarm.until(swarm.whole, PATIENCE_SECONDS + WHOLE_SECONDS, "a whole roster")
    assert all(newest in swarm.chain(peer) for peer in swarm.peers)


@simulated(ScenarioRunner, ScenarioSetup(4, every_rounds=1))
async def test_majority_resumes_without_a_missing_peer(swarm: ScenarioRunner) -> None:
    await swarm.rounds(3)
    for peer in swarm.peers:
        swarm.kill(peer)
    back = swarm.peers[:3]
    await swarm.revived(*back)
    seconds = await swarm.until(swarm.whole, PATIENCE_SECONDS + WHOLE_SECONDS, "a whole roster")
    await swarm.rounds(2)
    assert seconds >= PATIENCE_SECONDS, "they did not wait for it"


@pytest.mark.parametrize(("fork_peers", "back"), ((0, 4), (3, 2)))
@simulated(lambda fork_peers: ScenarioRunner(ScenarioSetup(4, fork_peers=fork_peers, every_rounds=1)))
async def test_restarted_peers_wait_where_fork_is_forbidden(swarm: ScenarioRunner, fork_peers: int, back: int) -> None:
    await swarm.rounds(3)
    for peer in swarm.peers:
        swarm.kill(peer)
    for peer in swarm.peers[:back]:
        swarm.revive(peer)
    heads = {peer: swarm.disks[peer].links[-1].lineage for peer in swarm.peers[:back]}
    await asyncio.sleep(2 * PATIENCE_SECONDS)
    assert {peer: swarm.head(peer).key.lineage for peer in heads} == heads
    if back < fork_peers:
        await swarm.revived(swarm.peers[back])
        await swarm.until(swarm.whole, PATIENCE_SECONDS + WHOLE_SECONDS, "a whole roster")


@simulated(ScenarioRunner, ScenarioSetup(4, every_rounds=4))
async def test_surviving_member_decides_and_restarted_ones_wait(swarm: ScenarioRunner) -> None:
    """It holds the newest state: nothing is lost but the round under way."""
    await swarm.rounds(3)
    newest = swarm.head("p3").key.lineage
    await swarm.restarted(*swarm.peers[:3])
    await swarm.until(swarm.whole, PATIENCE_SECONDS + WHOLE_SECONDS, "a whole roster")
    (fork,) = swarm.forks("p0")
    assert [member.peer for member in fork.record.roster] == ["p3"]
    assert newest in swarm.chain("p0")


@simulated(ScenarioRunner, ScenarioSetup(4, every_rounds=3))
async def test_peer_restarted_alone_does_not_fork(swarm: ScenarioRunner) -> None:
    await swarm.rounds(4)
    swarm.kill("p1")
    await swarm.rounds(2)
    await swarm.revived("p1")
    await swarm.until(swarm.whole, WHOLE_SECONDS, "a whole roster")
    await swarm.rounds(2)
    assert not swarm.forks("p1")


@pytest.mark.long
@simulated(ScenarioRunner, ScenarioSetup(3, every_rounds=1))
async def test_lagging_survivor_does_not_block_restarted_peers(swarm: ScenarioRunner) -> None:
    """The survivor cannot catch up: the means that it lacks were lost with the processes that held them."""
    behind, others = swarm.peers[2], swarm.peers[:2]
    await swarm.rounds(3)
    stood = swarm.head(behind).key.round
    swarm.silence(behind)
    await swarm.until(lambda: all(swarm.head(peer).key.round > stood for peer in others), 200.0, "a round without it")
    for peer in others:
        swarm.kill(peer)
    swarm.heal([behind], others)
    await swarm.revived(*others)
    await swarm.until(swarm.whole, 2 * PATIENCE_SECONDS + WHOLE_SECONDS, "a whole roster")
    await swarm.rounds(2)


@pytest.mark.parametrize(("peers", "fork_peers", "dead"), ((3, 2, 2), *long((4, 2, 3))))
@simulated(lambda peers, fork_peers: ScenarioRunner(ScenarioSetup(peers, fork_peers=fork_peers, every_rounds=1)))
async def test_restarted_peers_proceed_with_too_few_survivors(swarm: ScenarioRunner, peers: int, dead: int) -> None:
    """The survivors are fewer than `fork_peers` and may not fork. The restarted peers are enough, and admit them."""
    await swarm.rounds(3)
    await swarm.restarted(*swarm.peers[:dead])
    await swarm.until(swarm.whole, 2 * PATIENCE_SECONDS + 2 * WHOLE_SECONDS, "a whole roster")
    await swarm.rounds(2)


@simulated(ScenarioRunner, ScenarioSetup(4, every_rounds=1))
async def test_isolated_survivor_does_not_revert_the_others(swarm: ScenarioRunner) -> None:
    """It forked alone while the others, all of them started again, went on without it."""
    alone, others = swarm.peers[3], swarm.peers[:3]
    await swarm.rounds(3)
    swarm.silence(alone)
    await swarm.restarted(*others)
    await swarm.until(lambda: "alone" in swarm.outcomes(alone), 300.0, "the one alone goes on")
    await swarm.until(lambda: bool(swarm.forks(others[0])), 300.0, "the others go on")
    await swarm.rounds(3, others)
    theirs = swarm.head(others[0]).key.lineage
    swarm.heal([alone], others)
    await swarm.until(swarm.whole, 2 * WHOLE_SECONDS, "a whole roster")
    assert theirs in swarm.chain(alone)


@pytest.mark.parametrize(
    ("moment", "away_seconds", "apart_seconds", "complaint_rounds"),
    (
        (0.3, 12.0, 0.0, 32),
        (0.0, 25.0, -15.0, 32),
        (0.0, 5.0, 0.0, 4),
        *long(
            (0.0, 5.0, 0.0, 32), (0.3, 5.0, 10.0, 32), (0.6, 5.0, 10.0, 32), (0.9, 2.0, 5.0, 32), (0.0, 0.0, 10.0, 32)
        ),
        *long((0.0, 25.0, -15.0, 2), (0.3, 12.0, 0.0, 3), (0.9, 2.0, 5.0, 4), (0.0, 25.0, -15.0, 5)),
    ),
)
@simulated(lambda: ScenarioRunner(ScenarioSetup(3, every_rounds=2)))
async def test_pair_that_exchanges_no_data_readmits_its_reducer(
    swarm: ScenarioRunner,
    moment: float,
    away_seconds: float,
    apart_seconds: float,
    complaint_rounds: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As two peers behind routers, which meet through the third. No round waits for its deadline, and none forks.

    With few `complaint_rounds` the broken link is tried again while the third is away.
    """
    opened = SimTransport.open

    def refusing(self: SimTransport, peer: PeerId, method: str, deadline: Deadline) -> Any:
        if method in BULK_METHODS and "p0" not in (self.me, peer):
            raise PeerGone(peer, "is reached through a relay only")
        return opened(self, peer, method, deadline)

    monkeypatch.setattr(SimTransport, "open", refusing)
    monkeypatch.setattr(planning, "COMPLAINT_ROUNDS", complaint_rounds)
    await swarm.rounds(4)
    while swarm.coordinator("p1") == "p0":  # else no one calls the round before it is back
        await swarm.rounds(1)
    await asyncio.sleep(moment)
    began = swarm.now
    swarm.kill("p0")
    for one, other in (("p1", "p2"), ("p2", "p1")):
        swarm.network.block(one, other)
        swarm.network.contacts.views[one].lose(other)  # at once: their connection went through it
    meeting = asyncio.get_running_loop().call_later(away_seconds + apart_seconds, swarm.heal, ["p1"], ["p2"])
    await asyncio.sleep(away_seconds)
    await swarm.revived("p0")
    await asyncio.sleep(max(0.0, meeting.when() - swarm.now))
    await swarm.until(swarm.whole, WHOLE_SECONDS, "a whole roster")
    since = swarm.now
    await swarm.rounds(4)
    assert not swarm.forks("p1")
    for peer in ("p1", "p2"):
        assert set(swarm.outcomes(peer, began)) <= {"committed", "skipped"}
    assert all(len(each["peers"]) == 3 for each in swarm.reports("p1", since)[1:])
