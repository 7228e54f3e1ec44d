"""The founding of a run in stages: it survives its founder, and two givers of seats end with one seat a stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from node.joining import stages
from node.membership.seats import Seats
from tests.sim import founding
from tests.sim.founding import FOUNDER, FoundingWorld, look, messages, play


@pytest.mark.parametrize(("dies_at", "returns"), ((31, False), (45, True)))
def test_run_begins_without_its_founder(dies_at: int, returns: bool) -> None:
    """`python -m tests.sim.founding` plays all messages."""
    violations, world = play(dies_at, returns)
    assert not violations and world.seated_then and world.restarts, "a peer has taken the seat of stage 0"


@pytest.mark.long
def test_run_begins_whenever_its_founder_dies() -> None:
    assert founding.main([]) == 0


class TwoGivers(FoundingWorld):
    """The founder and the first member of stage 1 cannot reach each other, and each gives the seat of stage 2."""

    async def part(self) -> None:
        ours, theirs = (FOUNDER, "p2"), ("p1", "p3")
        self._start(FOUNDER)
        self._start("p1")
        await look(lambda: "p1" in self.members, 10.0)
        self.cut(ours, theirs)
        self._start("p2")
        await look(lambda: "p2" in self.members, 10.0)
        self._start("p3")
        await look(lambda: "p3" in self.members, 150.0)
        self.apart = [self.known(peer) for peer in self.peers]
        self.heal(ours, theirs)
        await look(self.has_begun, 60.0)
        self.end()


def test_two_givers_of_a_seat_end_with_one() -> None:
    """The seat by the shorter line counts. The other peer asks again by itself; nothing was trained."""
    world = TwoGivers()
    world.play(world.part)
    assert world.apart[2][2] == (2, "p2", 0) and (2, "p3", 0) in world.apart[3], "each side has its own"
    assert world.has_begun() and not list(world.violations(0.0)) and world.restarts == 1
    assert world.known("p3") == ((0, FOUNDER, 0), (1, "p1", 0), (2, "p2", 0))


def _all_count(self: Seats, seat: object) -> bool:
    return True


@pytest.mark.parametrize(
    ("plant", "named"),
    (
        (lambda patch: patch.setattr(stages, "FOUNDER_SECONDS", 1000.0), "progress"),
        (lambda patch: patch.setattr(Seats, "counts", _all_count), "one-seat"),
    ),
    ids=["nobody else gives seats", "a lost seat stays"],
)
def test_planted_faults_of_a_founding_are_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], named: str
) -> None:
    plant(monkeypatch)
    violations, _ = play(31, returns=named == "one-seat")
    assert named in {each.invariant for each in violations}


def test_points_are_those_before_the_first_round() -> None:
    assert 40 < messages() < 100
