"""A stage that has lost all its peers begins again, whoever dies on the way, and whoever was apart from the others."""

from __future__ import annotations

import pytest

from node.session.stage_refill import StageRefill
from tests.sim import refilling
from tests.sim.refilling import apart, come_back, refill
from tests.support.long import long


@pytest.mark.parametrize("dies_at", (60, *long(160)))
def test_lost_stage_begins_again_whoever_dies_on_the_way(dies_at: int) -> None:
    """`python -m tests.sim.refilling` plays more messages."""
    world = refill(dies_at)
    assert not world.wrong and world.made and world.struck


@pytest.mark.parametrize("after_seconds", long(60.0, 124.0))
def test_former_members_join_the_seat_that_counts(after_seconds: float) -> None:
    assert not come_back(after_seconds).wrong


@pytest.mark.parametrize("seed", long(10, 52))
def test_two_sides_that_each_began_another_stage_again_agree(seed: int) -> None:
    """Each side refuses the other, so that no driver is live at both (10), or meets it while peers are on their way."""
    assert not apart(seed).wrong


@pytest.mark.long
def test_planted_faults_of_a_refill_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageRefill, "_accepts", lambda self, seat: False)
    monkeypatch.setattr(StageRefill, "_settle", lambda self, stage: None)
    assert "refilled" in {each.invariant for each in refill().wrong}


@pytest.mark.long
def test_refill_survives_deaths_and_partitions() -> None:
    """Peers that were apart agree on one seat, too."""
    assert refilling.main(["--every", "9", "--partitions", "3"]) == 0
