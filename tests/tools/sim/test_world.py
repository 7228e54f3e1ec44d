"""A world that breaks and heals: a stand-in for the protocol gets through, and every bug planted in it is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protocols.base import Member
from tests.sim import world as worlds
from tests.sim.families import BREAKING
from tests.sim.faults import Faults
from tests.sim.oracle_protocol import Child, Head, OracleProtocol
from tests.sim.scenario import Scenario, resolve
from tests.sim.world import HEALED_SECONDS, Outcome, World, play


def broken(fault: str, seed: int = 0, peers: int = 5) -> Scenario:
    return Scenario(peers=peers, rounds=3, seed=seed, fault=fault)


def violated(outcome: Outcome) -> set[str]:
    return {violation.invariant for violation in outcome.violations}


# -- what gets through ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", BREAKING)
def test_faultless_swarm_recovers_from_every_fault_family(fault: str) -> None:
    for seed in range(10):
        outcome = play(broken(fault, seed, 3 + seed % 4), OracleProtocol)
        assert outcome.violations == [], f"seed {seed}"
        assert 0 < outcome.rounds_did <= outcome.rounds_could


@pytest.mark.parametrize("fault", ["crash", "mixed"])
def test_same_seed_gives_the_same_trace(fault: str) -> None:
    assert len({play(broken(fault, 3), OracleProtocol).trace.digest() for _ in range(20)}) == 1
    assert len({play(broken(fault, seed), OracleProtocol).trace.digest() for seed in range(20)}) == 20


def test_explicit_faults_replay_like_drawn_ones() -> None:
    drawn = resolve(broken("mixed", 5))
    again = replace(drawn, fault="mixed", faults=drawn.faults)
    assert play(drawn, OracleProtocol).trace.digest() == play(again, OracleProtocol).trace.digest()


@pytest.mark.parametrize("fault", BREAKING)
def test_real_protocol_runs_under_every_fault_family(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that the world holds together: what comes of it is not judged here."""
    monkeypatch.setattr(worlds, "HEALED_SECONDS", 30.0)
    outcome = play(replace(broken(fault, 1, 3), breaking_seconds=30.0))
    assert 30.0 < outcome.virtual_seconds < 200.0 and all(outcome.histories.values())


def test_restart_appears_as_new_incarnation_in_history() -> None:
    faults = Faults().crash("p1", at=20.0, lasts=30.0)
    outcome = play(Scenario(peers=3, rounds=5, faults=faults), OracleProtocol)
    lives = [report["incarnation"] for report in outcome.histories["p1"]]
    assert outcome.violations == [] and sorted(lives) == lives and set(lives) == {0, 1}
    assert {report["incarnation"] for report in outcome.histories["p0"]} == {0}


def test_dead_peer_reports_nothing() -> None:
    faults = Faults().crash("p1", at=20.0)
    outcome = play(Scenario(peers=3, rounds=5, faults=faults, breaking_seconds=200.0), OracleProtocol)
    lives = [report["incarnation"] for report in outcome.histories["p1"]]
    assert outcome.violations == [] and 0 < lives.count(0) < 20 < len(outcome.histories["p0"])


# -- rounds that could commit -----------------------------------------------------------------------------------------


def test_rounds_without_connected_majority_do_not_count() -> None:
    """Five in three groups: neither of them a majority; before and after every round could, and did."""
    faults = Faults().silence({"p0", "p1"}, {"p2", "p3", "p4"}, at=20, heal=90).silence({"p2", "p3"}, {"p4"}, 20, 90)
    outcome = play(Scenario(peers=5, rounds=4, faults=faults), OracleProtocol)
    undecided = outcome.reports("undecided")
    assert outcome.violations == [] and len(undecided) > 20
    assert outcome.rounds_could == outcome.rounds_did >= 4


def test_missed_possible_rounds_count_against_the_protocol() -> None:
    class Lazy(OracleProtocol):
        """Decides no round while anybody is missing."""

        def enough(self, head: Head, present: list[Member]) -> bool:
            return len(present) == len(self.peers)

    outcome = play(Scenario(peers=5, rounds=4, faults=Faults().crash("p4", at=1, lasts=100)), Lazy)
    assert outcome.rounds_could > outcome.rounds_did


# -- planted bugs -----------------------------------------------------------------------------------------------------


class Stuck(OracleProtocol):
    """Goes on only with everybody, and never meets the next life of one who died."""

    def enough(self, head: Head, present: list[Member]) -> bool:
        return set(head.roster) <= set(present)


class Minority(OracleProtocol):
    """Whoever is left decides, each for itself."""

    def enough(self, head: Head, present: list[Member]) -> bool:
        self.accounting.children.clear()
        return True


class Hasty(OracleProtocol):
    """Applies what nobody has decided."""

    def report(self, me: Member, before: Head, after: Head, outcome: str) -> dict[str, Any]:
        changes = {"params_hash": "mine alone"} if outcome == "undecided" else {}
        return {**super().report(me, before, after, outcome), **changes}


class Greedy(OracleProtocol):
    """Counts the first contribution of each again in every round."""

    def committed(self, me: Member, child: Child) -> dict[str, Any]:
        again = {peer: (bytes(32).hex(), 2, 2) for peer in child.contributions}
        return {**super().committed(me, child), "contributions": again}


class Torn(OracleProtocol):
    """Says that it holds more chunks than there are."""

    def committed(self, me: Member, child: Child) -> dict[str, Any]:
        return {**super().committed(me, child), "contributions": {me.peer: (child.parent.key.lineage.hex(), 3, 2)}}


class Divergent(OracleProtocol):
    """One peer's parameters differ in some bit."""

    def report(self, me: Member, before: Head, after: Head, outcome: str) -> dict[str, Any]:
        changes = {"params_hash": "other bits"} if me.peer == "p1" else {}
        return {**super().report(me, before, after, outcome), **changes}


class Silent(OracleProtocol):
    """Moves to the others' branch and calls it a round like any other."""

    def report(self, me: Member, before: Head, after: Head, outcome: str) -> dict[str, Any]:
        return super().report(me, before, after, "undecided" if outcome == "superseded" else outcome)


CRASH = Faults().crash("p2", at=15.0, lasts=20.0)
APART = Faults().silence({"p0"}, {"p1", "p2"}, at=15, heal=60)
BUGS: list[tuple[type[World], Faults, str]] = [
    (Stuck, CRASH, "progress"),
    (Minority, APART, "one-child"),
    (Hasty, APART, "unmoved"),
    (Greedy, CRASH, "counted-once"),
    (Torn, CRASH, "counted-once"),
    (Divergent, CRASH, "same-bits"),
    (Silent, APART, "unmoved"),
]


@pytest.mark.parametrize("world, faults, invariant", BUGS, ids=[world.__name__ for world, _, _ in BUGS])
def test_planted_bug_is_found(world: type[World], faults: Faults, invariant: str) -> None:
    scenario = Scenario(peers=3, rounds=4, faults=faults)
    assert play(scenario, OracleProtocol).violations == []
    assert invariant in violated(play(scenario, world))


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
