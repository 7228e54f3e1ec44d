"""A machine that slept, or shows another time than others do, says so; one that is merely busy does not."""

from __future__ import annotations

import pytest

from node.membership.suspend_detector import SuspendDetector, TimeJump, skew


def gap(now: float, wall: float) -> TimeJump | None:
    """After a tick at 100 s whose wall clock showed 1,000 s; the next was due a quarter of a second later."""
    ticks = SuspendDetector()
    assert ticks.tick(100.0, 1000.0, 0.25) is None
    found = ticks.tick(now, wall, 0.25)
    assert ticks.tick(now + 0.25, wall + 0.25, 0.25) is None, "it is told once"
    return found


@pytest.mark.parametrize("late", [0.0, 0.5, 1.9])
def test_nearly_punctual_tick_is_no_gap(late: float) -> None:
    assert gap(100.25 + late, 1000.25 + late) is None
    assert gap(100.25 + late, 1000.25 + late + 4.0) is None, "a clock that is set right by little"


def test_process_stop_is_seen_by_a_late_tick() -> None:
    assert gap(103.25, 1003.25) == TimeJump(3.0)
    long = gap(120.25, 1020.25)
    assert long is not None and long.seconds == 20.0 and "was stopped for 20 s" in long.line


def test_system_sleep_is_seen_by_the_wall_clock() -> None:
    slept = gap(100.25, 4600.25)
    assert slept is not None and slept.seconds == 3600.0 and "slept for 60 min" in slept.line
    back = gap(100.25, 400.25)
    assert back is not None and "set back by 10 min" in back.line


@pytest.mark.parametrize(
    "offsets, says",
    [
        ([], ""),
        ([3.0, -4.0, 2.0], ""),
        ([0.0, 0.1, 900.0], ""),  # it is the other's
        ([90.0, 91.0, 89.5], "is 90 s behind that of 3 of 3 other peers; set it"),
        ([-600.0, -601.0, 0.0], "is 10 min ahead of that of 2 of 3 other peers; set it"),
        ([30.0], "30 s behind the only other peer's, and one of the two is wrong"),
        ([60.0, -500.0, 800.0], "60 s behind the other peers', which do not agree either"),
        ([7200.0, 7200.0], "2.0 h behind that of 2 of 2 other peers, too far to be made up for"),
    ],
)
def test_skewed_clock_is_attributed_where_possible(offsets: list[float], says: str) -> None:
    line = skew(offsets, 600.0)
    assert says in line and bool(says) == bool(line)
