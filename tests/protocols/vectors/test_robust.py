"""Robust rules: values by hand, order, weights, what they withstand; clipping and blame of outliers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.robustness import table
from protocols.base import Vector
from protocols.moshpit.matchmaker import UNCLIPPED
from protocols.vectors import robust
from protocols.vectors.robust import RULES, RobustAggregator
from tests.support.example_vectors import noisy_contributions

LARGEST = torch.finfo(torch.float32).max
TOLERANT = tuple(name for name in RULES if name != "mean")


def aggregate(
    name: str, rows: Sequence[Sequence[float]] | torch.Tensor, weights: Sequence[float] | None = None
) -> Vector:
    matrix = rows.clone() if isinstance(rows, torch.Tensor) else torch.tensor(rows)
    into = torch.full((matrix.shape[1],), math.nan)
    RULES[name](matrix, weights or [1.0] * len(matrix), into)
    return into


def column(name: str, values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """The result for contributions of one element."""
    return float(aggregate(name, [[float(value)] for value in values], weights))


# -- by hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, values, weights, expected",
    [
        ("mean", [1, 2, 6], None, 3),
        ("median", [9, 1, 5], None, 5),
        ("median", [9, 1, 5, 3], None, 4),
        ("median", [1, 5, 9], [1, 1, 3], 9),
        ("median", [1, 5, 9], [1, 1, 2], 7),  # half the weight reaches 5, the other half begins at 9
        ("median", [1, 5, 9], [3, 0.5, 1], 1),
        ("trimmed_mean", [1, 2, 4, 100], None, 3),  # a quarter of the weight at each end
        ("trimmed_mean", [1, 2, 4, 4, 5, -100, 100, 3], None, (2 + 3 + 4 + 4) / 4),
        ("trimmed_mean", [1, 2, 100], None, (0.25 * 1 + 1 * 2 + 0.25 * 100) / 1.5),  # at the border, in part
        ("trimmed_mean", [1, 2, 9], [2, 5, 1], 2),
        ("centered_clip", [-1, 0, 1, 100], None, 0.5),  # two pull down by τ, two up: the median stays
        ("centered_clip", [0, 0, 0, 10], None, 0),
        ("krum", [0, 1, 2, 2.5, 100], None, 2),  # 1 and 2.5 are its nearest: 1.25
        ("multi_krum", [0, 1, 2, 2.5, 100], None, 1.5),  # 2, then 1 (2) before 2.5 (2.5)
        ("multi_krum", [0, 1, 2, 2.5, 100], [1, 1, 3, 1, 1], 1.75),
        ("krum", [1, 2, 3, 100], None, 2.5),  # fewer than five: the median
        ("multi_krum", [7, 9], None, 8),
    ],
)
def test_rules_match_hand_calculation(
    name: str, values: list[float], weights: list[float] | None, expected: float
) -> None:
    assert column(name, values, weights) == pytest.approx(expected)


# -- properties of all rules ------------------------------------------------------------------------------------------


counts = st.integers(1, 12)


@pytest.mark.parametrize("name", RULES)
@given(count=counts, seed=st.integers(0, 1000))
@settings(max_examples=25)
def test_contribution_order_does_not_matter(name: str, count: int, seed: int) -> None:
    rows, rng = noisy_contributions(count, 7, seed), Random(seed)
    weights, order = [rng.uniform(0.5, 4) for _ in range(count)], rng.sample(range(count), count)
    mixed = aggregate(name, rows[order], [weights[index] for index in order])
    assert torch.allclose(mixed, aggregate(name, rows, weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ("mean", "median", "trimmed_mean", "centered_clip"))
@given(count=counts, seed=st.integers(0, 1000))
@settings(max_examples=25)
def test_weight_equals_repeated_contributions(name: str, count: int, seed: int) -> None:
    rows, rng = noisy_contributions(count, 5, seed), Random(seed)
    counts_of = [rng.randint(1, 4) for _ in range(count)]
    repeated = rows.repeat_interleave(torch.tensor(counts_of), 0)
    unit = 2.0 ** rng.randint(-300, 300)
    weighted = aggregate(name, rows, [unit * each for each in counts_of])
    assert torch.allclose(weighted, aggregate(name, repeated), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", RULES)
@given(count=counts, seed=st.integers(0, 1000), shift=st.sampled_from([-3.0, 0.0, 50.0]))
@settings(max_examples=15)
def test_shifting_all_shifts_the_result(name: str, count: int, seed: int, shift: float) -> None:
    rows = noisy_contributions(count, 5, seed)
    assert torch.allclose(aggregate(name, rows + shift), aggregate(name, rows) + shift, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("count", (1, 2, 5, 9))
def test_equal_contributions_are_the_result(name: str, count: int) -> None:
    vector = torch.tensor([1.5, -2.25, 3e38, 0.0, 1e-30])
    assert torch.allclose(aggregate(name, vector.repeat(count, 1)), vector, rtol=1e-6)


@pytest.mark.parametrize("name", RULES)
@given(count=counts, seed=st.integers(0, 1000))
@settings(max_examples=20)
def test_finite_input_gives_finite_result(name: str, count: int, seed: int) -> None:
    rng = Random(seed)
    values = [LARGEST, -LARGEST, 0.0, 1e-45, 1.0, -1e30]
    rows = [[rng.choice(values) for _ in range(4)] for _ in range(count)]
    result = aggregate(name, rows, [rng.choice([1e-300, 1.0, 1e300]) for _ in range(count)])
    assert result.isfinite().all()


@pytest.mark.parametrize("name", RULES)
def test_bad_weights_and_sizes_are_rejected(name: str) -> None:
    rows = noisy_contributions(6, 3, 0)
    for weights, size in (([1.0] * 5, 3), ([1.0] * 6, 4), ([1.0] * 5 + [0.0], 3), ([1.0] * 5 + [math.nan], 3)):
        with pytest.raises(ValueError):
            RULES[name](rows.clone(), weights, torch.empty(size))


# -- what they withstand ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, liars",
    [("median", 7), ("centered_clip", 7), ("trimmed_mean", 4), ("krum", 6), ("multi_krum", 6)],
)
@pytest.mark.parametrize("scale", (-1000.0, 1e30))
def test_rule_withstands_its_limit_but_not_more(name: str, liars: int, scale: float) -> None:
    """The liars among 16 are wrong in one direction: the result stays near the honest ones unless they are too many."""
    honest, signal = noisy_contributions(16, 200, 3), torch.ones(200) / 200**0.5
    rows = honest.clone()
    rows[16 - liars :] = scale * signal
    assert float((aggregate(name, rows) - signal).norm()) <= 1.5
    wrong = 5 if name == "trimmed_mean" else 9
    rows[16 - wrong :] = scale * signal
    assert float((aggregate(name, rows) - signal).norm()) > 10


@given(
    honest=st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=12),
    lies=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), max_size=11),
)
@settings(max_examples=50)
def test_minority_cannot_move_median_beyond_honest_range(honest: list[float], lies: list[float]) -> None:
    values = [*honest, *lies[: len(honest) - 1]]
    assert min(honest) - 1e-5 <= column("median", values) <= max(honest) + 1e-5


def test_figures_match_the_independent_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert table(3)
    monkeypatch.setitem(robust.RULES, "krum", robust.multi_krum)
    assert not table(3), "another rule is detected"


# -- clipping and blame -----------------------------------------------------------------------------------------------


def judged(name: str, rows: torch.Tensor, allowances: Sequence[float] | None = None) -> tuple[Vector, dict[int, str]]:
    judge, into, count = RobustAggregator(name, allowances or [1.0] * len(rows)), torch.empty(rows.shape[1]), len(rows)
    for half in (slice(0, rows.shape[1] // 2), slice(rows.shape[1] // 2, None)):
        piece = rows[:, half].clone()
        judge.average(range(count), [float(row.norm()) for row in piece], [*piece], [1.0] * count, into[half])
    return into, judge.named()


@pytest.mark.parametrize("name", RULES)
def test_honest_contributors_are_not_clipped_or_blamed(name: str) -> None:
    rows = noisy_contributions(8, 400, 1)
    rows[3] *= 1.3
    result, named = judged(name, rows)
    assert named == {}
    if name == "mean":
        assert torch.allclose(result, rows.mean(0), atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_contribution_above_declared_norm_is_clipped_and_blamed(name: str) -> None:
    rows = noisy_contributions(8, 400, 1)
    rows[3] *= -100
    result, named = judged(name, rows)
    assert list(named) == [3]
    if name == "mean":
        limit = robust.MEASURED_SLACK * sorted(float(row[:200].norm()) for row in rows)[3]
        kept = rows.clone()
        kept[3, :200] *= limit / rows[3, :200].norm()
        assert torch.allclose(result[:200], kept[:, :200].mean(0), atol=1e-5)
        assert "sent" in named[3] and "times what counts" in named[3]


@pytest.mark.parametrize("others", [1, 2, 5])
@pytest.mark.parametrize("silent", [0, 1])
def test_lying_half_does_not_set_the_norm(others: int, silent: int) -> None:
    """With as many liars as honest peers, they are clipped to honest norms (twice that of a single one) and blamed."""
    rows = noisy_contributions(2 * others + silent, 400, 1)
    rows[others : 2 * others] *= -20
    rows[2 * others :] = 0
    result, named = judged("mean", rows)
    assert list(named) == list(range(others, 2 * others))
    most = max(float(row.norm()) for row in rows[:others])
    slack = robust.MEASURED_SLACK if others > 1 else robust.PAIR_SLACK
    assert float(result.norm()) <= slack * most


def test_allowance_permits_a_larger_norm() -> None:
    rows = noisy_contributions(8, 400, 1)
    rows[3] *= 6
    result, named = judged("mean", rows, [1.0] * 3 + [5.0] + [1.0] * 4)
    assert named == {} and torch.allclose(result, rows.mean(0), atol=1e-6)


def test_outlier_with_normal_norm_is_blamed() -> None:
    rows = noisy_contributions(8, 400, 1, spread=0.5)
    rows[5] *= -1
    for name in TOLERANT:
        _, named = judged(name, rows)
        assert list(named) == [5] and named[5].startswith("stands apart"), name


def test_short_vectors_are_not_judged_by_norm() -> None:
    rows = torch.tensor([[1.0] * 10, [1.0] * 10, [1.0] * 10, [50.0] * 10])
    result, named = judged("mean", rows)
    assert named == {} and torch.allclose(result, rows.mean(0))


@pytest.mark.parametrize("small", (1e-45, 0.0))
def test_tiny_contribution_does_not_scale_down_the_other(small: float) -> None:
    """States of a group are not clipped to the median norm, which is the lower one of two."""
    rows, into = torch.stack([torch.ones(1024), torch.full((1024,), small)]), torch.empty(1024)
    judge = RobustAggregator("mean", (UNCLIPPED, UNCLIPPED))
    judge.average([0, 1], [float(row.norm()) for row in rows], [*rows], [1.0, 1.0], into)
    assert torch.equal(into, torch.full((1024,), 0.5)) and not judge.named()
