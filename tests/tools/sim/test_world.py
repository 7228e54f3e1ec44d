"""A simulated world that breaks and heals: a simple correct protocol passes, and every bug planted in it is found.

`OracleProtocol` stands for protocols that vote on rounds, `PairWorld` for those whose peers share no anchor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from protocols.base import AveragingResult, Contribution, LocalProgress, Member, PeerId, Vector
from protocols.base import Outcome as RoundOutcome
from protocols.vectors import VectorView
from tests.sim import world as worlds
from tests.sim.families import BREAKING
from tests.sim.faults import Faults
from tests.sim.independent_world import IndependentWorld
from tests.sim.oracle_protocol import Head, OracleProtocol
from tests.sim.pairs import PairSession, PairWorld, pair_world
from tests.sim.scenario import Scenario, resolve
from tests.sim.world import HEALED_SECONDS, Outcome, World, play


def broken(fault: str, seed: int = 0, peers: int = 5) -> Scenario:
    return Scenario(peers=peers, rounds=3, seed=seed, fault=fault)


# -- without bugs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "world, fault",
    [*((OracleProtocol, fault) for fault in BREAKING), (PairWorld, "none"), (PairWorld, "mixed"), (World, "mixed")],
)
def test_correct_protocol_recovers_from_fault_family(world: type[World], fault: str) -> None:
    outcome = play(broken(fault, 1, 4), world)
    assert outcome.violations == []
    assert 0 < outcome.rounds_did <= outcome.rounds_could


@pytest.mark.parametrize(
    "world, scenario",
    [
        (World, Scenario(peers=4, rounds=2, seed=7, fault="slow")),
        (OracleProtocol, broken("mixed", 3)),
        (PairWorld, Scenario(peers=4, rounds=4, seed=3)),
    ],
    ids=["butterfly", "oracle", "pairs"],
)
def test_trace_is_determined_by_the_seed(world: type[World], scenario: Scenario) -> None:
    first = play(scenario, world).trace.digest()
    assert first == play(scenario, world).trace.digest() != play(replace(scenario, seed=8), world).trace.digest()
    again = replace(resolve(scenario), fault=scenario.fault)
    assert first == play(again, world).trace.digest(), "what a seed has drawn is played like what is drawn"


def test_dead_peer_reports_nothing_until_it_restarts() -> None:
    faults = Faults().crash("p1", at=20.0, lasts=130.0)
    outcome = play(Scenario(peers=3, rounds=5, faults=faults), OracleProtocol)
    incarnations = [report["incarnation"] for report in outcome.histories["p1"]]
    assert outcome.violations == [] and sorted(incarnations) == incarnations and set(incarnations) == {0, 1}
    assert 0 < incarnations.count(0) < 20 < len(outcome.histories["p0"])
    assert {report["incarnation"] for report in outcome.histories["p0"]} == {0}


# -- rounds that could commit -----------------------------------------------------------------------------------------


def test_rounds_without_connected_majority_do_not_count() -> None:
    """Five peers in three groups, none a majority; before and after that, every round could commit, and did."""
    faults = Faults().silence({"p0", "p1"}, {"p2", "p3", "p4"}, at=20, heal=90).silence({"p2", "p3"}, {"p4"}, 20, 90)
    outcome = play(Scenario(peers=5, rounds=4, faults=faults), OracleProtocol)
    assert outcome.violations == [] and len(outcome.reports("undecided")) > 20
    assert outcome.rounds_could == outcome.rounds_did >= 4


def test_missed_possible_rounds_count_against_the_protocol() -> None:
    outcome = play(Scenario(peers=5, rounds=4, faults=Faults().crash("p4", at=1, lasts=100)), Stuck)
    assert outcome.rounds_could > outcome.rounds_did


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


class Deaf(PairSession):
    """Meets no other peer."""

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        return AveragingResult(RoundOutcome.SKIPPED)


class Jumping(PairSession):
    """Goes from its first round to one after the last."""

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        self.round = max(self.round, 9)
        return await super().reclaim()


class Unmixed(PairSession):
    """Exchanges states, and does not average them."""

    def mix(self, state: Sequence[Vector], data: bytearray) -> None:
        pass


class Back(PairSession):
    """Ends in a round that is long over."""

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        self.round //= 2
        return await super().reclaim()


class Lingering(PairSession):
    """Leaves a task behind in each round."""

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        self.task = asyncio.get_running_loop().create_task(asyncio.sleep(1e4))
        return await super().reclaim()


CRASH = Faults().crash("p2", at=15.0, lasts=20.0)
CUT_OFF = Faults().silence({"p0"}, {"p1", "p2"}, at=15, heal=60)
VOTED_BUGS: list[tuple[type[World], Faults, str, str]] = [
    (Stuck, CRASH, "progress", f"0 rounds of all peers in {HEALED_SECONDS:g} s after"),
    (Minority, CUT_OFF, "one-child", "beside"),
    (Undecided, Faults(), "progress", "outcome undecided"),
    (Excluding, Faults(), "progress", "left out of the roster"),
]
PAIR_BUGS: list[tuple[type[PairSession], str, str, str]] = [
    (Deaf, "none", "progress", "it could mix in"),
    (Deaf, "partition", "progress", "after all was healed"),
    (Jumping, "none", "progress", "it leaves most rounds out"),
    (Jumping, "none", "clock", "a round that no peer has reached"),
    (Unmixed, "partition", "spread", "at the end"),
    (Back, "none", "progress", "it does not come to the end"),
    (Back, "none", "never-back", "where"),
    (Lingering, "none", "no-leak", "are left over"),
    (Lingering, "crash", "no-leak", "of its first"),
]


def details(outcome: Outcome, invariant: str) -> str:
    return "; ".join(violation.detail for violation in outcome.violations if violation.invariant == invariant)


@pytest.mark.parametrize("world, faults, invariant, words", VOTED_BUGS)
def test_planted_bug_in_voting_is_found(world: type[World], faults: Faults, invariant: str, words: str) -> None:
    outcome = play(Scenario(peers=3, rounds=4, faults=faults), world)
    assert words in details(outcome, invariant)
    assert outcome.virtual_seconds < HEALED_SECONDS + 250, "a swarm that does not recover ends, too"


@pytest.mark.parametrize("session, fault, invariant, words", PAIR_BUGS)
def test_planted_bug_in_mixing_is_found(
    session: type[PairSession], fault: str, invariant: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "HEALED_SECONDS", 100.0)
    outcome = play(Scenario(peers=4, rounds=6, fault=fault, elements=64), pair_world(session))
    assert words in details(outcome, invariant)


def test_mean_that_is_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that nothing is written to holds anything: numbers far from the mean, or NaN, which no codec takes."""
    monkeypatch.setattr(VectorView, "write", lambda *arguments: None)
    try:
        outcome = play(Scenario(protocol="parameter_server_async", peers=4, rounds=5), IndependentWorld)
    except ValueError as error:
        assert "holds NaN or infinity" in str(error)
    else:
        assert details(outcome, "spread")
