"""Moves between stages: the mover's death at any message leaves it in one stage, and no move empties one."""

from __future__ import annotations

import pytest

from node.session.stage_mover import StageMover
from tests.sim import moving
from tests.sim.moving import MOVER, balance, cross, messages, play
from tests.support.long import long


@pytest.mark.parametrize("dies_at", (20, 75, *long(3)))
def test_mover_that_dies_comes_back_in_a_stage(dies_at: int) -> None:
    """`python -m tests.sim.moving` plays all messages."""
    world = play(dies_at)
    assert not world.wrong and world.struck and world.stage_of(MOVER) in (0, 1)


@pytest.mark.parametrize("delay_seconds", (0.0, *long(1.0)))
def test_two_peers_of_a_stage_do_not_empty_it(delay_seconds: float) -> None:
    world = cross(delay_seconds)
    assert not world.wrong and world.moves == 1


@pytest.mark.parametrize(("joiners", "start_seconds"), ((5, 1.0), *long((7, 20.0))))
def test_stages_are_balanced_by_the_rule(joiners: int, start_seconds: float) -> None:
    """From four or six, one and one peers to at least two in each stage, by two moves, and no more for minutes.

    However long a worker takes to start: a mover that is on its way is not followed by another.
    """
    world = balance(joiners, start_seconds)
    assert not world.wrong and world.moves == 2


async def _confirmed(self: StageMover, announced_at: float) -> None:
    """Without waiting for an answer."""


@pytest.mark.long
def test_planted_fault_of_a_move_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageMover, "_confirmed", _confirmed)
    monkeypatch.setattr(StageMover, "_stays", lambda self, other: True)
    assert "emptied" in {each.invariant for each in cross(0.0).wrong}


@pytest.mark.long
def test_move_survives_death_at_every_second_message() -> None:
    assert messages() > 80 and moving.main(["--every", "2"]) == 0
