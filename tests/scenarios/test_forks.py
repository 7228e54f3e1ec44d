"""A swarm that falls in two: who goes on, who waits, and what comes of it when the two meet again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from protocols.base import PeerId
from protocols.consensus.record import Kind
from protocols.consensus.vote_tally import majority
from tests.sim.scenario_runner import ScenarioRunner, ScenarioSetup
from tests.support.checkers import Report
from tests.support.long import diagonal, long
from tests.support.simulated import simulated

HEAL_SECONDS = 30.0
"""From the moment when all links are open to the moment when all vote on one branch again."""
APART_SECONDS = (57.0, 63.1)
"""Longer than it takes to go on by a fork; where the rounds stand when the links open again differs."""
PACE_SECONDS = 2.0
ROUND_SECONDS = 5.0
"""The longest round in which no peer waits for silent ones."""
SPLITS = ((1, 1), (3, 2), (2, 2), (1, 3))


@dataclass(frozen=True, slots=True)
class Side:
    """What one side of a split did in it, after the round in which it began."""

    peers: tuple[PeerId, ...]
    lineages: dict[PeerId, bytes]
    reports: dict[PeerId, list[Report]]

    @property
    def outcomes(self) -> set[str]:
        return {str(each["outcome"]) for reports in self.reports.values() for each in reports}

    @property
    def forked(self) -> bool:
        return "fork" in self.outcomes


@dataclass(frozen=True, slots=True)
class Split:
    """A split and its healing."""

    swarm: ScenarioRunner
    sides: tuple[Side, Side]
    ancestor: bytes
    one_branch_seconds: float
    whole_seconds: float
    healed_at: float


def split(left: int, right: int, fork_peers: int, apart_seconds: float) -> Split:
    """Some rounds together, a time apart, and all that follows until everybody votes on one branch."""
    swarm = ScenarioRunner(ScenarioSetup(left + right, fork_peers=fork_peers, pace_seconds=PACE_SECONDS))
    some, others = swarm.peers[:left], swarm.peers[left:]

    async def story() -> Split:
        await swarm.rounds(2)
        ancestor, began = swarm.head(swarm.peers[0]).key.lineage, swarm.now
        swarm.cut(some, others)
        await asyncio.sleep(apart_seconds)
        sides = [
            Side(
                peers,
                {peer: swarm.head(peer).key.lineage for peer in peers},
                {peer: swarm.reports(peer, began + ROUND_SECONDS) for peer in peers},
            )
            for peers in (some, others)
        ]
        healed_at = swarm.now
        swarm.heal(some, others)
        one_branch_seconds = await swarm.until(swarm.one_branch, HEAL_SECONDS, "one branch")
        whole_seconds = one_branch_seconds + await swarm.until(swarm.whole, HEAL_SECONDS, "a whole roster")
        await swarm.rounds(2)
        return Split(swarm, (sides[0], sides[1]), ancestor, one_branch_seconds, whole_seconds, healed_at)

    return swarm.play(story)


def lost(done: Split, peer: PeerId) -> tuple[int, int]:
    """Rounds and tokens that a peer said it lost by going over."""
    reports = done.swarm.caught_up(peer, done.healed_at)
    return sum(each["lost_rounds"] for each in reports), sum(each["lost_tokens"] for each in reports)


def wasted(done: Split, peer: PeerId) -> tuple[int, int]:
    """Rounds that a peer decided on a branch that is not the one of today, and what it had counted in them: by its
    history, whatever it says of losses."""
    chain, history = done.swarm.chain(peer), done.swarm.histories[peer]
    off = [
        each
        for each in history
        if each["outcome"] in ("committed", "alone", "fork", "skipped") and bytes.fromhex(each["lineage"]) not in chain
    ]
    spent = {each["anchor_lineage"] for each in off if peer in each["peers"]}  # what undecided rounds left over, too
    return len(off), sum(each["tokens"] for each in history if each["anchor_lineage"] in spent)


def expected_winner(done: Split) -> int:
    """Which side the rule (docs/decisions/0007) chooses: its first child has more signatures of the common roster;
    of two with as many, the lower lineage."""
    roster = sum(len(side.peers) for side in done.sides)
    ranks = []
    for side in done.sides:
        child = min(side.reports[side.peers[0]], key=lambda each: each["round"])
        votes = len(side.peers) if len(side.peers) < majority(roster) else majority(roster)
        ranks.append((-votes, child["lineage"]))
    return ranks.index(min(ranks))


@diagonal("sizes, apart_seconds", SPLITS, APART_SECONDS)
def test_allowed_forks_continue_and_merge_after_healing(sizes: tuple[int, int], apart_seconds: float) -> None:
    """The majority commits, a minority forks. After healing, fork choice picks a branch, and the loss is reported."""
    left, right = sizes
    done = split(left, right, fork_peers=1, apart_seconds=apart_seconds)
    quorum = majority(left + right)
    for side in done.sides:
        assert side.forked == (len(side.peers) < quorum), f"{side.peers}: {side.outcomes}"
        going_on = "alone" if len(side.peers) == 1 else "committed"
        assert going_on in side.outcomes
    assert done.whole_seconds <= HEAL_SECONDS, f"whole after {done.whole_seconds:.1f} s"
    winner, loser = done.sides[expected_winner(done)], done.sides[1 - expected_winner(done)]
    chain = done.swarm.chain(done.swarm.peers[0])
    for peer in winner.peers:
        assert winner.lineages[peer] in chain
        assert lost(done, peer) == wasted(done, peer) == (0, 0)
    for peer in loser.peers:
        assert loser.lineages[peer] not in chain
        rounds, tokens = lost(done, peer)
        assert (rounds, tokens) == wasted(done, peer), f"{peer} says that it lost {rounds} rounds, {tokens} tokens"
        assert rounds >= 3 and tokens > 0


@pytest.mark.parametrize(("left", "right"), (*SPLITS[1:3], *long(*SPLITS[::3])))
def test_minority_waits_without_loss_where_forks_are_forbidden(left: int, right: int) -> None:
    """Only a majority continues; without one, no peer does. There is never more than one branch."""
    done = split(left, right, fork_peers=0, apart_seconds=APART_SECONDS[0])
    quorum = majority(left + right)
    for side in done.sides:
        if len(side.peers) >= quorum:
            assert side.outcomes == {"committed"}
        else:
            assert side.outcomes <= {"undecided"}
            assert set(side.lineages.values()) == {done.ancestor}
    assert done.whole_seconds <= HEAL_SECONDS, f"whole after {done.whole_seconds:.1f} s"
    chain = done.swarm.chain(done.swarm.peers[0])
    assert all(link.record.kind != Kind.FORK for link in chain.since(done.ancestor))
    for peer in done.swarm.peers:
        assert lost(done, peer) == wasted(done, peer) == (0, 0)


@pytest.mark.parametrize(("fork_peers", "fragments"), ((0, 1), *long((1, 4))))
@simulated(lambda fork_peers, fragments: ScenarioRunner(ScenarioSetup(4, fork_peers=fork_peers, fragments=fragments)))
async def test_peer_missing_few_rounds_decides_them_afterwards(swarm: ScenarioRunner, fragments: int) -> None:
    """The peer asks for the decision of its present round, round by round, until it is level; no round is lost.

    Others keep the parts of four rounds of each fragment.
    """
    rest = swarm.peers[:3]
    await swarm.rounds(4)
    began = swarm.now
    swarm.cut(["p3"], rest)
    await swarm.rounds(3 * fragments, rest)
    swarm.heal(["p3"], rest)
    await swarm.until(swarm.whole, HEAL_SECONDS, "a whole roster")
    await swarm.rounds(2)
    reports, moved = swarm.reports("p3", began), sum(len(swarm.caught_up(peer)) for peer in rest)
    assert {each["outcome"] for each in reports} == {"committed"} and moved == 0
    assert sum(each["bytes_downloaded"] + each["lost_rounds"] for each in reports) == 0


@simulated(ScenarioRunner, ScenarioSetup(4, fork_peers=0, keep_rounds=16, pace_seconds=4.0))
async def test_peer_that_gave_up_replays_missed_means(swarm: ScenarioRunner) -> None:
    """Nothing is downloaded but what was averaged, and nothing is lost."""
    rest = swarm.peers[:3]
    await swarm.rounds(2)
    began, stood = swarm.now, swarm.head("p3").key.round
    swarm.cut(["p3"], rest)
    await swarm.until(lambda: "undecided" in swarm.outcomes("p3"), 600.0, "an undecided round")
    missed = swarm.head("p0").key.round - stood
    swarm.heal(["p3"], rest)
    await swarm.until(swarm.whole, HEAL_SECONDS, "a whole roster")
    await swarm.rounds(2)
    assert all(not swarm.caught_up(peer) for peer in rest)
    reports = swarm.caught_up("p3", began)
    replayed = sum(each["replayed_rounds"] for each in reports)
    assert replayed >= missed - 1 > 5, f"replayed {replayed} of {missed} rounds"
    assert sum(each["bytes_downloaded"] for each in reports) == 0
    assert all(each["lost_rounds"] == each["lost_tokens"] == 0 for each in reports)
