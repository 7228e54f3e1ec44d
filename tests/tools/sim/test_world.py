"""A simulated world that breaks and heals: a simple correct protocol passes, and every bug planted in it is found.

`OracleProtocol` stands for protocols that vote on rounds, gossip for those whose peers share no anchor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from node.membership import watching
from protocols.base import AveragingResult, Contribution, LocalProgress, Member, PeerId, Vector
from protocols.base import Outcome as RoundOutcome
from protocols.butterfly import round as round_module
from protocols.butterfly.attachment import LeadSearch
from protocols.pairwise.shared_state import SharedStateSession
from protocols.pairwise.state_swap import StateSwap
from tests.sim import scenario as scenarios
from tests.sim import world as worlds
from tests.sim.families import BREAKING
from tests.sim.faults import Faults
from tests.sim.independent_world import IndependentWorld
from tests.sim.oracle_protocol import Head, OracleProtocol
from tests.sim.scenario import Scenario, resolve
from tests.sim.world import HEALED_SECONDS, Outcome, World, play
from tests.support.long import long

PROTOCOLS = {World: "butterfly", OracleProtocol: "butterfly", IndependentWorld: "gossip"}


# -- without bugs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "world, fault",
    [*((OracleProtocol, fault) for fault in BREAKING), (IndependentWorld, "none"), (World, "mixed")],
)
def test_correct_protocol_recovers_from_fault_family(world: type[World], fault: str) -> None:
    scenario = Scenario(protocol=PROTOCOLS[world], peers=4, rounds=3, seed=1, fault=fault)
    outcome = play(scenario, world)
    assert outcome.violations == []
    assert 0 < outcome.rounds_did <= outcome.rounds_could
    if world is not World:
        again = play(replace(resolve(scenario), fault=fault), world)
        assert outcome.trace.digest() == again.trace.digest(), "what a seed has drawn is played like what is drawn"


def test_dead_peer_reports_nothing_until_it_restarts() -> None:
    faults = Faults().crash("p1", at=20.0, lasts=130.0)
    outcome = play(Scenario(peers=3, rounds=5, faults=faults), OracleProtocol)
    incarnations = [report["incarnation"] for report in outcome.histories["p1"]]
    assert outcome.violations == [] and sorted(incarnations) == incarnations and set(incarnations) == {0, 1}
    assert 0 < incarnations.count(0) < 20 < len(outcome.histories["p0"])
    assert {report["incarnation"] for report in outcome.histories["p0"]} == {0}


def test_observers_of_a_large_run_follow_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a roster of four, and each peer seeing few others."""
    for module in (round_module, scenarios, worlds):
        monkeypatch.setattr(module, "MAX_ROSTER", 4)
    monkeypatch.setattr(watching, "MAX_WATCHED", 8)
    monkeypatch.setattr(watching, "VOTERS_WATCHED", 2)
    monkeypatch.setattr(watching, "OTHERS_WATCHED", 1)
    world = World(Scenario(peers=14, rounds=3, seed=2, elements=64))
    assert max(len([*world.neighbours.of(peer)]) for peer in world.observers) < 13
    world.play(world.run)
    assert not world.check(world.histories) and not world.leaks() and not world.progress(world.histories)
    assert len({loop.chain.head.state_root for loop in world.replicas.values()}) == 1


def test_work_of_peers_behind_voters_counts() -> None:
    """With the outer loop, its trainers and the catching up of a real peer."""
    world = World(Scenario(peers=10, rounds=6, seed=3, elements=64, voters=3, clusters=True))
    world.play(world.run)
    assert not world.check(world.histories) and not world.leaks() and not world.progress(world.histories)
    assert len({loop.chain.head.state_root for loop in world.replicas.values()}) == 1
    last = [report for reports in world.histories.values() for report in reports if report["round"] == 4]
    assert {report["peer"] for report in last if report["peer"] in report["peers"]} == set(world.peers)


# -- rounds that could commit -----------------------------------------------------------------------------------------


def test_rounds_without_connected_majority_do_not_count() -> None:
    """Five peers in three groups, none a majority; before and after that, every round could commit, and did."""
    faults = Faults().silence({"p0", "p1"}, {"p2", "p3", "p4"}, at=20, heal=90).silence({"p2", "p3"}, {"p4"}, 20, 90)
    outcome = play(Scenario(peers=5, rounds=4, faults=faults), OracleProtocol)
    assert outcome.violations == [] and len(outcome.reports("undecided")) > 20
    assert outcome.rounds_could == outcome.rounds_did >= 4


def test_missed_possible_rounds_count_against_the_protocol() -> None:
    outcome = play(Scenario(peers=5, rounds=4, faults=Faults().crash("p4", at=1, lasts=100)), Stuck)
    assert outcome.rounds_could > outcome.rounds_did + 10, "each missed attempt counts"


# -- planted bugs -----------------------------------------------------------------------------------------------------


class Stuck(OracleProtocol):
    """Decides only with its whole roster, and never admits the next incarnation of a dead peer."""

    def enough(self, head: Head, present: list[Member]) -> bool:
        return set(head.roster) <= set(present)


class Minority(OracleProtocol):
    """Each remaining peer decides by itself."""

    def enough(self, head: Head, present: list[Member]) -> bool:
        self.accounting.children.clear()
        return True


class Undecided(OracleProtocol):
    """Reports rounds in which nothing is decided."""

    def report(self, me: Member, before: Head, after: Head, outcome: str) -> dict[str, Any]:
        return super().report(me, before, before, "undecided")


class Excluding(OracleProtocol):
    """A peer stops after one round, and is not missed."""

    def goes_on(self, peer: PeerId) -> bool:
        return super().goes_on(peer) and (peer != "p1" or not self.histories[peer])


async def meet_no_other(
    self: SharedStateSession, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]
) -> AveragingResult:
    return AveragingResult(RoundOutcome.SKIPPED)


reclaim = SharedStateSession.reclaim


async def jump_over_the_last_round(self: SharedStateSession) -> Mapping[PeerId, Contribution]:
    self.round = max(self.round, 9)
    return await reclaim(self)


async def end_in_a_former_round(self: SharedStateSession) -> Mapping[PeerId, Contribution]:
    self.round //= 2
    return await reclaim(self)


async def leave_a_task_behind(self: SharedStateSession) -> Mapping[PeerId, Contribution]:
    self.task = asyncio.get_running_loop().create_task(asyncio.sleep(1e4))  # type: ignore[attr-defined]
    return await reclaim(self)


CRASH = Faults().crash("p2", at=15.0, lasts=20.0)
CUT_OFF = Faults().silence({"p0"}, {"p1", "p2"}, at=15, heal=60)
VOTED_BUGS: list[tuple[type[World], Faults, str, str]] = [
    (Stuck, CRASH, "progress", f"0 rounds of all peers in {HEALED_SECONDS:g} s after"),
    (Minority, CUT_OFF, "one-child", "beside"),
    (Undecided, Faults(), "progress", "outcome undecided"),
    (Excluding, Faults(), "progress", "left out of the roster"),
]
Bug = tuple[type, str, Callable[..., Any]]
DEAF: Bug = (SharedStateSession, "average", meet_no_other)
UNMIXED: Bug = (StateSwap, "_mix", lambda self, write: 0.0)
LINGERING: Bug = (SharedStateSession, "reclaim", leave_a_task_behind)
MIXING_BUGS: list[tuple[Bug, str, dict[str, str]]] = [
    (DEAF, "none", {"progress": "it could mix in"}),
    (DEAF, "partition", {"progress": "after all was healed"}),
    ((SharedStateSession, "reclaim", jump_over_the_last_round), "none",
     {"progress": "it leaves most rounds out", "clock": "a round that no peer has reached"}),
    (UNMIXED, "partition", {"spread": "at the end"}),
    ((SharedStateSession, "reclaim", end_in_a_former_round), "none",
     {"progress": "it does not come to the end", "never-back": "where"}),
    (LINGERING, "none", {"no-leak": "are left over"}),
    (LINGERING, "crash", {"no-leak": "of its first"}),
]  # fmt: skip


def details(outcome: Outcome, invariant: str) -> str:
    return "; ".join(violation.detail for violation in outcome.violations if violation.invariant == invariant)


@pytest.mark.parametrize("world, faults, invariant, words", VOTED_BUGS)
def test_planted_bug_in_voting_is_found(world: type[World], faults: Faults, invariant: str, words: str) -> None:
    outcome = play(Scenario(peers=3, rounds=4, faults=faults), world)
    assert words in details(outcome, invariant)
    assert outcome.virtual_seconds < HEALED_SECONDS + 250, "a swarm that does not recover ends, too"


@pytest.mark.parametrize(
    "faults, until, invariant, words",
    [
        (Faults(), 9, "contributes", "its mean is without p4"),
        *long((CRASH, 99, "progress", "0 rounds of all peers"), (CRASH, 14, "contributes", "all count in round")),
    ],
)
def test_work_that_counts_late_or_never_is_found(
    faults: Faults, until: int, invariant: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: an associate asks for no lead before this round."""
    lacks = LeadSearch._lacks
    monkeypatch.setattr(worlds, "HEALED_SECONDS", 80.0)
    monkeypatch.setattr(
        LeadSearch, "_lacks", lambda self: lacks(self) and (self.me.peer != "p4" or self._round > until)
    )
    outcome = play(Scenario(peers=5, rounds=5, faults=faults, elements=64, voters=2, clusters=True))
    assert words in details(outcome, invariant)


@pytest.mark.parametrize("bug, fault, violations", MIXING_BUGS)
def test_planted_bug_in_mixing_is_found(
    bug: Bug, fault: str, violations: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "HEALED_SECONDS", 100.0)
    monkeypatch.setattr(*bug)
    outcome = play(Scenario(protocol="gossip", peers=4, rounds=6, fault=fault, elements=64), IndependentWorld)
    for invariant, words in violations.items():
        assert words in details(outcome, invariant)
