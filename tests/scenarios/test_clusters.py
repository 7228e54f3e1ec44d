"""Runs with clusters: voters that are lost in a data phase, newcomers, and drawn faults at voters and associates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from protocols.base import PeerId
from protocols.consensus.record import coordinators
from protocols.consensus.vote_tally import majority
from tests.sim.scenario import Scenario
from tests.sim.scenario_runner import ScenarioRunner, ScenarioSetup
from tests.sim.world import CONTRIBUTE_ROUNDS, play
from tests.support.long import long
from tests.support.simulated import simulated

MOST_BALLOTS = 5
LOST = long((7, 5, 2), (9, 5, 2))
"""Peers, voters, voters killed: with those that live a quorum can decide."""
MOST_LOST = ((7, 5, 3), *long((9, 5, 3)))


def clustered(peers: int, voters: int) -> ScenarioRunner:
    """Rounds of five seconds and a data phase of two, which moves much more than the control messages."""
    return ScenarioRunner(
        ScenarioSetup(
            peers,
            voters=voters,
            elements=100_000,
            chunk_elements=5_000,
            uplinks=(100_000.0,) * peers,
            inner_steps=10,
        )
    )


async def killed_in_a_data_phase(swarm: ScenarioRunner, voters: int, lost: int) -> tuple[int, list[PeerId]]:
    """Kill voters while all send, the coordinators of the first ballots among them. Returns the round, and whom."""
    await swarm.until(lambda: contributors(swarm, swarm.peers) == {*swarm.peers}, 120.0, "a mean of all")
    number = swarm.head("p0").key.round + 1
    await swarm.rounds(1)
    await swarm.until(lambda: all(moves(swarm, peer, number) for peer in swarm.peers), 60.0, "a data phase")
    order = coordinators(swarm.head("p0").key.lineage, swarm.head("p0").roster)
    lives = order[min(MOST_BALLOTS, majority(voters)) - 1]  # it coordinates the last ballot that may be needed
    chosen = [peer for peer in order if peer != lives][:lost]
    for peer in chosen:
        swarm.kill(peer)
    await asyncio.sleep(0.0)
    return number, chosen


def moves(swarm: ScenarioRunner, peer: PeerId, number: int) -> bool:
    """Whether a peer is in the data phase of a round, and has no part yet."""
    session = swarm.session(peer)
    exchange = session.exchange if session and session.head.key.round == number else None
    return exchange is not None and not exchange.parts


def contributors(swarm: ScenarioRunner, peers: Sequence[PeerId]) -> set[PeerId]:
    """Those whose work is in the mean that these peers have decided last."""
    last = [swarm.histories[peer][-1] for peer in peers if swarm.histories[peer]]
    lineages = {each["lineage"] for each in last}
    return (
        set()
        if len(lineages) != 1
        else {name for each in last for name, held in each["contributions"].items() if held[1]}
    )


@pytest.mark.parametrize(("peers", "voters", "lost"), LOST)
@simulated(clustered)
async def test_lost_minority_of_voters_costs_ballots(swarm: ScenarioRunner, voters: int, lost: int) -> None:
    number, killed = await killed_in_a_data_phase(swarm, voters, lost)
    rest = [peer for peer in swarm.peers if peer not in killed]
    await swarm.until(lambda: all(swarm.head(peer).key.round > number for peer in rest), 60.0, "the round's decision")
    decided = swarm.since(rest[-1], number)[0]
    assert decided.record.averaged and decided.certificate.ballot < MOST_BALLOTS
    await swarm.revived(*killed)
    await together(swarm)


@pytest.mark.parametrize(("peers", "voters", "lost"), MOST_LOST)
@simulated(clustered)
async def test_lost_majority_of_voters_ends_in_one_branch(swarm: ScenarioRunner, voters: int, lost: int) -> None:
    _, killed = await killed_in_a_data_phase(swarm, voters, lost)
    rest = [peer for peer in swarm.peers if peer not in killed]
    await swarm.until(lambda: all(swarm.forks(peer) for peer in rest), 300.0, "a fork, which all follow")
    await swarm.revived(*killed)
    await together(swarm)


async def together(swarm: ScenarioRunner) -> None:
    """All are on one branch, and all work counts, after few rounds in which all hold the state."""
    await swarm.until(swarm.one_branch, 120.0, "one branch")
    number = max(swarm.head(peer).key.round for peer in swarm.peers)
    await swarm.until(lambda: contributors(swarm, swarm.peers) == {*swarm.peers}, 300.0, "a mean of all")
    assert swarm.head("p0").key.round - number <= CONTRIBUTE_ROUNDS + 1


@pytest.mark.parametrize(("fault", "seed"), (("lies", 3), *long(("silence", 2), ("slow", 2))))
def test_drawn_faults_cost_no_peer_its_place(fault: str, seed: int) -> None:
    """Seeds in which something has gone wrong: requests that the end of a round broke off, a lead that began early."""
    scenario = Scenario(peers=9, rounds=6, seed=seed, fault=fault, elements=1500, voters=3, clusters=True)
    assert play(scenario).violations == []


@simulated(ScenarioRunner, ScenarioSetup(18, founders=9, voters=3, inner_steps=10))
async def test_joiners_at_once_count_soon_and_slow_no_round(swarm: ScenarioRunner) -> None:
    """As many as the run has peers."""
    await swarm.until(lambda: contributors(swarm, swarm.founders) == {*swarm.founders}, 120.0, "a mean of all")
    began = swarm.head("p0").key.round
    calm_seconds = swarm.round_seconds("p0", began - 1)
    await swarm.begun(*swarm.peers[9:])
    await together(swarm)
    longest = max(swarm.round_seconds("p0", number) for number in range(began, swarm.head("p0").key.round))
    assert longest <= 1.2 * calm_seconds
