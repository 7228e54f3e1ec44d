"""A fault at every message of a round: each message is played, and what goes wrong is found."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from protocols.base import AveragingResult, LocalProgress, Member, Outcome, PeerId, PeerSilent, Vector
from tests.sim.crashes import main
from tests.sim.faults import Crash, Cut, Message
from tests.sim.message_fault import KINDS, ROUND, Point, combinations, enumerate_points, named, small, strike
from tests.sim.oracle_protocol import Child, Head, OracleProtocol
from tests.sim.pairs import PairSession, PairWorld, pair_world
from tests.sim.world import World


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return enumerate_points(small(3), OracleProtocol)


def result(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return summary


# -- the points -------------------------------------------------------------------------------------------------------


def test_messages_of_a_round_are_deterministic_and_gapless(points: list[Point]) -> None:
    assert points == enumerate_points(small(3), OracleProtocol)
    assert len(set(points)) == len(points) > 40
    for peer in ("p0", "p1", "p2"):
        numbers = [point.number for point in points if point.peer == peer]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) and numbers[0] > 5
    ways = Counter(point.way for point in points)
    assert ways["sent"] > 10 and ways["received"] > 10


@pytest.mark.parametrize("world, least", [(World, 100), (PairWorld, 20)], ids=["butterfly", "pairs"])
def test_every_peer_has_points_after_its_first_round(world: type[World], least: int) -> None:
    points = enumerate_points(small(3), world)
    assert len(points) > least and {point.peer for point in points} == {"p0", "p1", "p2"}
    assert all(point.number > 1 for point in points)


def test_failing_round_without_faults_is_an_error() -> None:
    class Never(OracleProtocol):
        def enough(self, head: Head, present: list[Member]) -> bool:
            raise ZeroDivisionError

    with pytest.raises((RuntimeError, ZeroDivisionError)):
        enumerate_points(small(3), Never)


def test_fault_kind_maps_to_its_event() -> None:
    sent, received = Point("p1", 17, "sent", "p2"), Point("p1", 18, "received", "p2")
    peers = ("p0", "p1", "p2")
    (crash,) = sent.fault("crash", peers).events
    (silence,) = sent.fault("silence", peers).events
    assert crash == Crash("p1", Message("p1", 17))
    assert silence == Cut(("p1",), ("p0", "p2"), True, Message("p1", 17))
    links = [point.fault(kind, peers).events[0] for kind in ("one-way", "stall") for point in (sent, received)]
    assert [link.links() for link in links if isinstance(link, Cut)] == [[("p1", "p2")], [("p2", "p1")]] * 2
    with pytest.raises(ValueError, match="unknown kind 'flood'"):
        sent.fault("flood", peers)


@pytest.mark.parametrize("kind", ["crash", "stall"])
def test_fault_strikes_only_at_its_message(kind: str, points: list[Point]) -> None:
    for point in points[::5]:
        verdict = strike(small(3), kind, (point,), OracleProtocol)
        (index,) = [index for index, line in enumerate(verdict.trace) if f"number={point.number})" in line]
        assert verdict.violations == [] and f"Message(peer='{point.peer}'" in verdict.trace[index]
        assert (f"{point.peer} killed" in verdict.trace[index + 1]) == (kind == "crash")


def test_pairs_are_of_different_peers_and_counted(points: list[Point]) -> None:
    drawn = combinations(points, pairs=True, sample=100, seed=1)
    assert drawn == combinations(points, pairs=True, sample=100, seed=1) != combinations(points, True, 100, 2)
    assert len(set(drawn)) == 100 and all(one.peer != other.peer for one, other in drawn)
    assert combinations(points, pairs=False, sample=None, seed=1) == [(point,) for point in points]
    assert len(combinations(points, pairs=False, sample=7, seed=1)) == 7


def test_points_have_names(points: list[Point]) -> None:
    assert named(points, str(points[3])) == [(points[3],)]
    assert named(points, f"{points[0]},{points[-1]}") == [(points[0], points[-1])]
    with pytest.raises(ValueError, match="no message 'p1:0' in this round"):
        named(points, "p1:0")


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


class Selfish(OracleProtocol):
    """A peer that misses another decides by itself."""

    def enough(self, head: Head, present: list[Member]) -> bool:
        if len(present) < 3:
            self.accounting.children.pop(head.key.lineage, None)
        return True


class Twice(OracleProtocol):
    """Counts the contributions of dead peers a second time."""

    def committed(self, me: Member, child: Child) -> dict[str, Any]:
        report = super().committed(me, child)
        gone = [member.peer for member in child.parent.roster if member not in child.head.roster]
        again = {peer: (self.ledger_first(), 2, 2) for peer in gone}
        return {**report, "contributions": {**report["contributions"], **again}}

    def ledger_first(self) -> str:
        return next(iter(self.accounting.children)).hex()


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


BUGS: list[tuple[type[World], str, str]] = [
    (Backwards, "crash", "goes-on"),
    (Partial, "crash", "goes-on"),
    (Faithful, "crash", "left-out"),
    (Faithful, "silence", "left-out"),
    (Selfish, "silence", "one-child"),
    (Twice, "crash", "counted-once"),
]


@pytest.mark.parametrize("world, kind, invariant", BUGS, ids=[f"{world.__name__}-{kind}" for world, kind, _ in BUGS])
def test_planted_bug_is_found(
    world: type[World], kind: str, invariant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is found in what is right: `test_every_message_is_played`."""
    assert main(["--kind", kind, "--sample", "8"], world) == 1
    out, err = capsys.readouterr()
    summary = json.loads(out.splitlines()[-1])
    assert invariant in {violation["invariant"] for violation in summary["violations"]}
    at = summary["violations"][0]["at"]
    assert (
        f"replay: python -m tests.sim.crashes --protocol butterfly --peers 3 --kind {kind} --seed 0 --only {at}" in err
    )
    assert main(["--kind", kind, "--only", at], world) == 1


class Endless(PairSession):
    """Waits for a partner that does not answer."""

    async def _ask(self, partner: PeerId, mine: Sequence[Vector], into: Sequence[Vector]) -> str:
        try:
            return await super()._ask(partner, mine, into)
        except PeerSilent:
            await asyncio.sleep(1e4)
            raise


def test_pair_that_hangs_at_silence_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--peers", "2", "--kind", "silence", "--sample", "4"], pair_world(Endless)) == 1
    assert "goes-on" in capsys.readouterr().out


class Shy(PairSession):
    """Meets no other once the round is over at whose messages faults happen."""

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        return await super().average(mine, work, into) if self.round <= ROUND else AveragingResult(Outcome.SKIPPED)


@pytest.mark.parametrize("session, wrong", [(PairSession, set()), (Shy, {"goes-on"})])
def test_peer_continuing_alone_after_fault_is_found(session: type[PairSession], wrong: set[str]) -> None:
    point = enumerate_points(small(3), PairWorld)[0]
    verdict = strike(small(3), "stall", (point,), pair_world(session))
    assert {violation.invariant for violation in verdict.violations} == wrong


def test_missed_fault_point_is_reported(points: list[Point]) -> None:
    beyond = Point("p0", 10**6, "sent", "p1")
    assert "missed" in {
        violation.invariant for violation in strike(small(3), "crash", (beyond,), OracleProtocol).violations
    }


def test_code_error_keeps_its_point(points: list[Point]) -> None:
    class Broken(OracleProtocol):
        def report(self, me: Member, before: Head, after: Head, outcome: str) -> dict[str, Any]:
            if before.key.round > ROUND:
                raise ZeroDivisionError("planted")
            return super().report(me, before, after, outcome)

    verdict = strike(small(3), "crash", (points[0],), Broken)
    assert "ZeroDivisionError: planted" in {violation.detail for violation in verdict.violations}


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_message_is_played(kind: str, points: list[Point], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kind", kind], OracleProtocol) == 0
    summary = result(capsys)
    assert summary["points"] == summary["messages"] == len(points) == summary["sent"] + summary["received"]
    assert summary["decided"] == len(points) and summary["undecided"] == summary["failed"] == 0
    assert summary["violations"] == [] and summary["points_per_minute"] > 0


def test_pairs_with_four_peers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--peers", "4", "--pairs", "--sample", "40", "--kind", "stall"], OracleProtocol) == 0
    assert result(capsys)["points"] == 40


def test_two_processes_give_the_same_result(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for jobs in ("1", "2"):
        assert main(["--sample", "4", "--jobs", jobs], Partial) == 1
        summary = result(capsys)
        found.append((summary["points"], summary["outcomes"], summary["violations"]))
    assert found[0] == found[1]


def test_every_message_of_a_pair_round_is_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--peers", "3"], PairWorld) == 0
    summary = result(capsys)
    assert summary["points"] == summary["messages"] > 20 and summary["undecided"] == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["crash", "silence"])
def test_real_protocol_survives_fault_points(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Butterfly: whichever peer is lost at whichever message, the others decide the same for the round, and go on.

    `make sim` plays every message.
    """
    assert main(["--peers", "3", "--kind", kind, "--sample", "20"]) == 0
    summary = result(capsys)
    assert summary["points"] == summary["decided"] == 20 and summary["messages"] > 200
