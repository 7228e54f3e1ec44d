"""What is said to grow over a long run does, what depends on how many peers are here does not, and how sure that is."""

import math
import random

import pytest

from tests.faults.soak import Growth, slope

HOURS = [place / 100 for place in range(50)]


def test_growth_is_told_from_changing_peer_counts() -> None:
    peers = [4 + place % 3 for place in range(50)]
    points = [(each, hour, 10.0 * each + 5 * hour) for each, hour in zip(peers, HOURS, strict=True)]
    level = sum(value for _, _, value in points) / 50
    assert slope(points) == pytest.approx(Growth(5 / level, 0.0))
    points = [(4 + (hour > 0.2), hour, 100.0 if hour > 0.2 else 80.0) for hour in HOURS]
    assert slope(points) == pytest.approx(Growth(0.0, 0.0)), "more peers near the end"
    assert slope([(4, place / 3600, 1.0 + place % 2) for place in range(500)]).verdict == "undecided", "too short"


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
    found = [Growth(0.03, 0.015), Growth(0.022, 0.036), Growth(-0.01, 0.005), Growth(math.nan, math.nan)]
    assert [each.verdict for each in found] == ["over", "undecided", "under", "undecided"]
