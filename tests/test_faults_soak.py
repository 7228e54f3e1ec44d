"""What is said to grow over a long run does, and what depends on how many peers are here does not."""

import math

import pytest

from tests.faults.soak import slope

HOURS = [place / 100 for place in range(50)]


def test_a_leak_is_seen_through_peers_that_come_and_go() -> None:
    peers = [4 + place % 3 for place in range(50)]
    points = [(each, hour, 10.0 * each + 5 * hour) for each, hour in zip(peers, HOURS, strict=True)]
    level = sum(value for _, _, value in points) / 50
    assert slope(points) == pytest.approx(5 / level)


def test_more_peers_towards_the_end_are_no_leak() -> None:
    assert slope([(4 + (hour > 0.2), hour, 100.0 if hour > 0.2 else 80.0) for hour in HOURS]) == pytest.approx(0.0)


@pytest.mark.parametrize(
    "points",
    [[], [(4, 0.1, 1.0)] * 9, [(place, place / 10, 1.0) for place in range(20)], [(4, hour, 0.0) for hour in HOURS]],
)
def test_too_little_says_nothing(points: list[tuple[int, float, float]]) -> None:
    assert math.isnan(slope(points))
