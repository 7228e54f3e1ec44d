"""What is said to grow over a long run does, what depends on how many peers are here does not, and how sure that is."""

import math
import random

import pytest

from tests.faults.soak import Growth, slope, student

HOURS = [place / 100 for place in range(50)]


def test_leak_is_seen_despite_changing_peer_counts() -> None:
    peers = [4 + place % 3 for place in range(50)]
    points = [(each, hour, 10.0 * each + 5 * hour) for each, hour in zip(peers, HOURS, strict=True)]
    level = sum(value for _, _, value in points) / 50
    assert slope(points) == pytest.approx(Growth(5 / level, 0.0))


def test_more_peers_near_the_end_are_no_leak() -> None:
    points = [(4 + (hour > 0.2), hour, 100.0 if hour > 0.2 else 80.0) for hour in HOURS]
    assert slope(points) == pytest.approx(Growth(0.0, 0.0))


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(4, 0.1, 1.0)] * 9,
        [(place, place / 10, 1.0) for place in range(20)],
        [(4, hour, 0.0) for hour in HOURS],
        [(4, place / 3600, 1.0 + place % 2) for place in range(500)],
    ],
)
def test_too_few_points_are_undecided(points: list[tuple[int, float, float]]) -> None:
    found = slope(points)
    assert math.isnan(found.share) and math.isnan(found.within) and found.verdict == "undecided"


def test_confidence_interval_holds_with_correlated_noise() -> None:
    def soaked(seed: int) -> Growth:
        rng, off, points = random.Random(seed), 0.0, []
        for place in range(400):  # of four seconds; half of what it is off by is left after a quarter of a minute
            off = 0.84 * off + rng.gauss(0.0, 3.0)
            points.append((4, place / 900, 700.0 + off))
        return slope(points)

    found = [soaked(seed) for seed in range(100)]
    assert 88 <= sum(abs(each.share) <= each.within for each in found) < 100


def test_only_significant_growth_is_over_the_limit() -> None:
    found = [Growth(0.03, 0.015), Growth(0.022, 0.036), Growth(-0.01, 0.005), Growth(-0.5, 2.0)]
    assert [each.verdict for each in found] == ["over", "undecided", "under", "undecided"]
    assert str(found[1]) == "+2.20% ± 3.60%" and str(slope([])) == "an unknown share"


def test_student_quantiles_match_the_table() -> None:
    table = {4: 2.776, 5: 2.571, 8: 2.306, 12: 2.179, 30: 2.042}
    assert {freedom: student(freedom) for freedom in table} == pytest.approx(table, rel=0.01)
