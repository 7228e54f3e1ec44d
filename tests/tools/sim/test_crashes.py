"""A fault at every message of a round: each message is played, and what goes wrong is found."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from protocols.base import Member
from tests.sim.crashes import main
from tests.sim.faults import Crash, Cut, Message
from tests.sim.independent_world import IndependentWorld
from tests.sim.message_fault import ROUND, Point, combinations, enumerate_points, small, strike
from tests.sim.oracle_protocol import Head, OracleProtocol
from tests.sim.scenario import Scenario
from tests.sim.world import World


def of_three(world: type[World]) -> Scenario:
    return small(3, "gossip" if issubclass(world, IndependentWorld) else "butterfly")


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return enumerate_points(small(3), OracleProtocol)


# -- the points -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world, least", [(OracleProtocol, 40), (World, 100), (IndependentWorld, 20)])
def test_messages_of_a_round_are_deterministic_and_gapless(world: type[World], least: int) -> None:
    points = enumerate_points(of_three(world), world)
    assert points == enumerate_points(of_three(world), world) and len(set(points)) == len(points) > least
    for peer in ("p0", "p1", "p2"):
        numbers = [point.number for point in points if point.peer == peer]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) and numbers[0] > 1, "not the first round"
    ways = Counter(point.way for point in points)
    assert min(ways["sent"], ways["received"]) > least / 4


def test_fault_kind_maps_to_its_event() -> None:
    sent, received = Point("p1", 17, "sent", "p2"), Point("p1", 18, "received", "p2")
    peers = ("p0", "p1", "p2")
    assert sent.fault("crash", peers).events == (Crash("p1", Message("p1", 17)),)
    assert sent.fault("silence", peers).events == (Cut(("p1",), ("p0", "p2"), True, Message("p1", 17)),)
    links = [point.fault(kind, peers).events[0] for kind in ("one-way", "stall") for point in (sent, received)]
    assert [link.links() for link in links if isinstance(link, Cut)] == [[("p1", "p2")], [("p2", "p1")]] * 2


@pytest.mark.parametrize("kind", ["crash", "stall"])
def test_fault_strikes_only_at_its_message(kind: str, points: list[Point]) -> None:
    for point in points[::20]:
        verdict = strike(small(3), kind, (point,), OracleProtocol)
        (index,) = [index for index, line in enumerate(verdict.trace) if f"number={point.number})" in line]
        assert verdict.violations == [] and f"Message(peer='{point.peer}'" in verdict.trace[index]
        assert (f"{point.peer} killed" in verdict.trace[index + 1]) == (kind == "crash")


def test_pairs_are_of_different_peers_and_counted(points: list[Point]) -> None:
    drawn = combinations(points, pairs=True, sample=100, seed=1)
    assert drawn == combinations(points, pairs=True, sample=100, seed=1) != combinations(points, True, 100, 2)
    assert len(set(drawn)) == 100 and all(one.peer != other.peer for one, other in drawn)


# -- judging ----------------------------------------------------------------------------------------------------------


class Partial(OracleProtocol):
    """Decides only with all members of its roster."""

    def enough(self, head: Head, present: list[Member]) -> bool:
        return set(head.roster) <= set(present)


class Faithful(OracleProtocol):
    """Keeps dead members in the roster."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        ledger_child = self.accounting.child
        self.accounting.child = lambda parent, present: ledger_child(parent, sorted({*parent.roster, *present}))  # type: ignore[method-assign]


class Backwards(OracleProtocol):
    """Removes live members from the roster, and keeps dead ones."""

    FORKS = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        ledger_child = self.accounting.child

        def child(parent: Head, present: list[Member]) -> Any:
            gone = [member for member in parent.roster if member not in present]
            return ledger_child(parent, [present[0], *gone] if gone else present)

        self.accounting.child = child  # type: ignore[method-assign]


class Broken(OracleProtocol):
    """Fails after the round."""

    def report(self, me: Member, before: Head, after: Head, outcome: str) -> dict[str, Any]:
        if before.key.round > ROUND:
            raise ZeroDivisionError("planted")
        return super().report(me, before, after, outcome)


BUGS: list[tuple[type[World], str, str, str]] = [
    (Backwards, "crash", "goes-on", "though most are there"),
    (Partial, "crash", "goes-on", "in touch with a majority, and at round"),
    (Faithful, "silence", "left-out", "still in the roster"),
    (Broken, "crash", "crash", "ZeroDivisionError: planted"),
]


@pytest.mark.parametrize("world, kind, invariant, words", BUGS, ids=[each[0].__name__ for each in BUGS])
def test_planted_bug_is_found(world: type[World], kind: str, invariant: str, words: str) -> None:
    """Nothing is found in what is right: `test_every_message_is_played`."""
    points = enumerate_points(of_three(world), OracleProtocol if world is Broken else world)
    violations = strike(of_three(world), kind, (points[0],), world).violations
    assert any(each.invariant == invariant and words in each.detail for each in violations)


def test_missed_fault_point_is_reported() -> None:
    violations = strike(small(3), "crash", (Point("p0", 10**6, "sent", "p1"),), OracleProtocol).violations
    assert "missed" in {each.invariant for each in violations}


# -- the command line -------------------------------------------------------------------------------------------------


def test_every_message_is_played(points: list[Point], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kind", "one-way"], OracleProtocol) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["points"] == summary["messages"] == summary["decided"] == len(points)
    assert summary["sent"] + summary["received"] == len(points)
    assert summary["violations"] == [] and summary["undecided"] == summary["failed"] == 0


def test_failed_point_is_reported_with_its_replay(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sample", "2"], Partial) == 1
    out, err = capsys.readouterr()
    at = json.loads(out.splitlines()[-1])["violations"][0]["at"]
    assert f"python -m tests.sim.crashes --protocol butterfly --peers 3 --kind crash --seed 0 --only {at}" in err
    assert main(["--kind", "crash", "--only", at], Partial) == 1


def test_real_protocol_survives_crashes_at_messages(capsys: pytest.CaptureFixture[str]) -> None:
    """Butterfly: whichever peer is lost at whichever message, the others decide the same, and continue.

    `make sim` plays every message, and every kind of fault.
    """
    assert main(["--peers", "3", "--kind", "crash", "--sample", "10"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["points"] == summary["decided"] == 10 and summary["messages"] > 200
