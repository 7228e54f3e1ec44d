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
from tests.sim.oracle_protocol import Child, Head, OracleProtocol
from tests.sim.pairs import PairSession, PairWorld, pair_world
from tests.sim.scenario import Scenario, resolve
from tests.sim.world import HEALED_SECONDS, Outcome, World, play
from tests.sim.worlds import world_of


def broken(fault: str, seed: int = 0, peers: int = 5) -> Scenario:
    return Scenario(peers=peers, rounds=3, seed=seed, fault=fault)


def violated(outcome: Outcome) -> set[str]:
    return {violation.invariant for violation in outcome.violations}


# -- without bugs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", BREAKING)
def test_faultless_swarm_recovers_from_every_fault_family(fault: str) -> None:
    for seed in range(4):
        outcome = play(broken(fault, seed, 3 + seed), OracleProtocol)
        assert outcome.violations == [], f"seed {seed}"
        assert 0 < outcome.rounds_did <= outcome.rounds_could


@pytest.mark.parametrize("fault", ["none", "slow", "crash", "partition", "mixed"])
def test_mixing_peers_survive_every_fault_family(fault: str) -> None:
    outcome = play(Scenario(peers=4, rounds=4, fault=fault), PairWorld)
    assert outcome.violations == []
    assert 0 < outcome.rounds_did <= outcome.rounds_could


@pytest.mark.parametrize(
    "world, scenario",
    [
        (World, Scenario(peers=4, rounds=2, seed=7, fault="slow")),
        (OracleProtocol, broken("crash", 3)),
        (OracleProtocol, broken("mixed", 3)),
        (PairWorld, Scenario(peers=4, rounds=4, seed=3)),
    ],
    ids=["butterfly", "oracle-crash", "oracle-mixed", "pairs"],
)
def test_trace_is_determined_by_the_seed(world: type[World], scenario: Scenario) -> None:
    assert len({play(scenario, world).trace.digest() for _ in range(4)}) == 1
    assert len({play(replace(scenario, seed=seed), world).trace.digest() for seed in range(4)}) == 4


def test_explicit_faults_replay_like_drawn_ones() -> None:
    drawn = resolve(broken("mixed", 5))
    again = replace(drawn, fault="mixed", faults=drawn.faults)
    assert play(drawn, OracleProtocol).trace.digest() == play(again, OracleProtocol).trace.digest()


@pytest.mark.parametrize("fault", BREAKING)
def test_real_protocol_runs_under_every_fault_family(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that the world does not fail: its violations are not looked at here."""
    monkeypatch.setattr(worlds, "HEALED_SECONDS", 30.0)
    outcome = play(replace(broken(fault, 1, 3), breaking_seconds=30.0))
    assert 30.0 < outcome.virtual_seconds < 200.0 and all(outcome.histories.values())


def test_restart_appears_as_new_incarnation_in_history() -> None:
    faults = Faults().crash("p1", at=20.0, lasts=30.0)
    outcome = play(Scenario(peers=3, rounds=5, faults=faults), OracleProtocol)
    incarnations = [report["incarnation"] for report in outcome.histories["p1"]]
    assert outcome.violations == [] and sorted(incarnations) == incarnations and set(incarnations) == {0, 1}
    assert {report["incarnation"] for report in outcome.histories["p0"]} == {0}


def test_dead_peer_reports_nothing() -> None:
    faults = Faults().crash("p1", at=20.0)
    outcome = play(Scenario(peers=3, rounds=5, faults=faults, breaking_seconds=200.0), OracleProtocol)
    incarnations = [report["incarnation"] for report in outcome.histories["p1"]]
    assert outcome.violations == [] and 0 < incarnations.count(0) < 20 < len(outcome.histories["p0"])


def test_single_peer_continues_with_zero_spread() -> None:
    outcome = play(Scenario(peers=1, rounds=4, fault="partition"), PairWorld)
    assert outcome.violations == [] and outcome.rounds_could == 0
    assert {report["spread"] for report in outcome.histories["p0"]} == {0.0}


def test_reported_spread_approximates_the_true_one() -> None:
    reported, true = [], []

    class Measured(PairWorld):
        def reported(self, report: dict[str, object]) -> None:
            super().reported(report)
            if len(self.replicas) == 5 and report["round"]:
                reported.append(report["spread"])
                true.append(self.spread())

    play(Scenario(peers=5, rounds=6, elements=2000), Measured)
    assert sum(reported) == pytest.approx(sum(true), rel=0.2)


def test_each_protocol_has_its_world() -> None:
    assert world_of("butterfly") is World and world_of("gossip") is IndependentWorld


# -- rounds that could commit -----------------------------------------------------------------------------------------


def test_rounds_without_connected_majority_do_not_count() -> None:
    """Five peers in three groups, none a majority; before and after that, every round could commit, and did."""
    faults = Faults().silence({"p0", "p1"}, {"p2", "p3", "p4"}, at=20, heal=90).silence({"p2", "p3"}, {"p4"}, 20, 90)
    outcome = play(Scenario(peers=5, rounds=4, faults=faults), OracleProtocol)
    undecided = outcome.reports("undecided")
    assert outcome.violations == [] and len(undecided) > 20
    assert outcome.rounds_could == outcome.rounds_did >= 4


def test_missed_possible_rounds_count_against_the_protocol() -> None:
    class Lazy(OracleProtocol):
        """Decides no round while a peer is missing."""

        def enough(self, head: Head, present: list[Member]) -> bool:
            return len(present) == len(self.peers)

    outcome = play(Scenario(peers=5, rounds=4, faults=Faults().crash("p4", at=1, lasts=100)), Lazy)
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


class Hasty(OracleProtocol):
    """Applies a mean without a decision."""

    def report(self, me: Member, before: Head, after: Head, outcome: str) -> dict[str, Any]:
        changes = {"params_hash": "mine alone"} if outcome == "undecided" else {}
        return {**super().report(me, before, after, outcome), **changes}


class Greedy(OracleProtocol):
    """Counts the first contribution of each peer again in every round."""

    def committed(self, me: Member, child: Child) -> dict[str, Any]:
        again = {peer: (bytes(32).hex(), 2, 2) for peer in child.contributions}
        return {**super().committed(me, child), "contributions": again}


class Torn(OracleProtocol):
    """Reports more chunks than there are."""

    def committed(self, me: Member, child: Child) -> dict[str, Any]:
        return {**super().committed(me, child), "contributions": {me.peer: (child.parent.key.lineage.hex(), 3, 2)}}


class Divergent(OracleProtocol):
    """One peer's parameters differ in a bit."""

    def report(self, me: Member, before: Head, after: Head, outcome: str) -> dict[str, Any]:
        changes = {"params_hash": "other bits"} if me.peer == "p1" else {}
        return {**super().report(me, before, after, outcome), **changes}


class Silent(OracleProtocol):
    """Moves to the others' branch and reports it as an undecided round."""

    def report(self, me: Member, before: Head, after: Head, outcome: str) -> dict[str, Any]:
        return super().report(me, before, after, "undecided" if outcome == "superseded" else outcome)


class Deaf(PairSession):
    """Meets no other peer."""

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        return AveragingResult(RoundOutcome.SKIPPED)


class Seldom(PairSession):
    """Meets others in its first round, and in no other."""

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        return await super().average(mine, work, into) if self.round == 0 else AveragingResult(RoundOutcome.SKIPPED)


class Jumping(PairSession):
    """Goes from its first round to the last one."""

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        self.round = max(self.round, 5)
        return await super().reclaim()


class Unmixed(PairSession):
    """Exchanges states, and does not average them."""

    def mix(self, state: Sequence[Vector], data: bytearray) -> None:
        pass


class Twice(PairSession):
    """Counts each message twice."""

    def count(self, peer: PeerId, name: str) -> None:
        super().count(peer, name)
        super().count(peer, name)


class Grouped(PairSession):
    """Reports all pairs of a round as one group."""

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        self.group = f"round {self.round}"
        return await super().average(mine, work, into)


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
VOTED_BUGS: list[tuple[type[World], Faults, str]] = [
    (Stuck, CRASH, "progress"),
    (Minority, CUT_OFF, "one-child"),
    (Hasty, CUT_OFF, "unmoved"),
    (Greedy, CRASH, "counted-once"),
    (Torn, CRASH, "counted-once"),
    (Divergent, CRASH, "same-bits"),
    (Silent, CUT_OFF, "unmoved"),
]
PAIR_BUGS: list[tuple[type[PairSession], str, str]] = [
    (Deaf, "none", "progress"),
    (Deaf, "partition", "progress"),
    (Seldom, "none", "progress"),
    (Jumping, "none", "progress"),
    (Unmixed, "partition", "spread"),
    (Twice, "none", "counted-once"),
    (Grouped, "none", "one-group"),
    (Back, "none", "never-back"),
    (Lingering, "none", "no-leak"),
    (Lingering, "crash", "no-leak"),
]


@pytest.mark.parametrize("world, faults, invariant", VOTED_BUGS, ids=[world.__name__ for world, _, _ in VOTED_BUGS])
def test_planted_bug_in_voting_is_found(world: type[World], faults: Faults, invariant: str) -> None:
    scenario = Scenario(peers=3, rounds=4, faults=faults)
    assert play(scenario, OracleProtocol).violations == []
    assert invariant in violated(play(scenario, world))


@pytest.mark.parametrize("session, fault, invariant", PAIR_BUGS)
def test_planted_bug_in_mixing_is_found(
    session: type[PairSession], fault: str, invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "HEALED_SECONDS", 200.0)
    assert invariant in violated(play(Scenario(peers=4, rounds=6, fault=fault), pair_world(session)))


def test_unrecovered_swarm_ends_after_the_limit() -> None:
    outcome = play(Scenario(peers=3, rounds=4, faults=CRASH), Stuck)
    (violation,) = [each for each in outcome.violations if each.invariant == "progress"]
    assert f"in {HEALED_SECONDS:g} s" in violation.detail
    assert outcome.virtual_seconds < HEALED_SECONDS + 200


# -- scenarios --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, words",
    [({"fault": "locusts"}, "unknown fault"), ({"faults": Faults().crash("p7", at=1.0)}, "p7, who is none of p0, p1")],
)
def test_impossible_scenario_is_rejected(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Scenario(peers=2, **wrong)


def test_faults_end_before_healing() -> None:
    assert (resolve(Scenario(faults=Faults().crash("p0", at=500.0, lasts=50.0))).breaking_seconds or 0) > 550
    assert resolve(Scenario(faults=Faults().crash("p0", at_message=5))).breaks
    assert not resolve(Scenario(faults=Faults().skew("p0", 5.0))).breaks


def test_mean_that_is_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that nothing is written to holds anything: numbers far from the mean, or NaN, which no codec takes."""
    monkeypatch.setattr(VectorView, "write", lambda *arguments: None)
    try:
        outcome = play(Scenario(protocol="parameter_server_async", peers=4, rounds=5), IndependentWorld)
    except ValueError as error:
        assert "holds NaN or infinity" in str(error)
    else:
        assert "spread" in violated(outcome)
