"""Robust aggregation: rules by which a reducer averages contributions of which some may be wrong. Pure.

    mean            weighted mean; one contribution can move it anywhere, so norms are clipped before it (`plan`)
    centered_clip   Karimireddy et al. 2021, arXiv 2012.10333, algorithm 2
    trimmed_mean    without the lowest and the highest quarter of the weight (Yin et al. 2018, arXiv 1803.01498)
    median          coordinate-wise weighted median (the same paper)
    krum            the contribution that is nearest to its neighbours (Blanchard et al. 2017, arXiv 1703.02757)
    multi_krum      weighted mean of the contributions that Krum ranks first (the same paper, section 4)

A contribution of weight 2 counts like two equal ones of weight 1, except in Krum's ranking. The result stays among the
honest contributions while the wrong ones have less than half of the weight (`median`, `centered_clip`), less than a
quarter (`trimmed_mean`), or are at most b of n >= 2b + 3 (`krum`, `multi_krum`). No rule tolerates colluding ones that
are no further out than the honest ones are from each other (ALIE, Baruch et al. 2019; IPM, Xie et al. 2019).

`mean`, `median` and `trimmed_mean` give the same bits on every machine. The others use norms, whose last digits differ
between machines: another reducer may get another digest. The digest that the roster votes for counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from statistics import median_low
from typing import Final, TypeAlias

import torch

from protocols.base import Vector
from protocols.registry import require_known
from protocols.vectors.views import LARGEST_FLOAT32, norm, weighted_mean

TRIM_SHARE = 0.25
REACH = 0.5
"""τ of `centered_clip`, as a multiple of the median distance from the current estimate. From 1.5 on, outliers pull it.
"""
CLIP_STEPS = 5
KRUM_LEAST = 5
"""With fewer than 2·1 + 3 contributions Krum tolerates no wrong one; the coordinate median, which does, replaces it."""

MEASURED_SLACK = 1.4
"""Limit of a received chunk's norm: this multiple of the median norm of the chunks, times the sender's allowance. With
eight honest peers the largest norm was 1.16 times the median in chunks of 14,000 elements, 1.41 times in chunks of
1,024: a vector's norm is not spread evenly over its parts."""
PAIR_SLACK = 2.0
"""The same for two contributions, as a multiple of the smaller norm: it cannot be known which of the two is wrong."""
MEASURED_ELEMENTS = 64  # shorter chunks are not measured: the norm of fewer numbers says little
ESTIMATE_ERROR = 0.01  # largest error of a norm from `vectors.estimated_norm`, as a share of it
NAMED_SHARE = 0.5  # a member whose contribution is clipped to less than this share of its norm is reported
NAMED_DISTANCE = 3.0
"""The same if its distance from the coordinate median is more than this multiple of the median distance. With honest
peers of which half were ten times slower, the largest such multiple was 2."""

_PIECE = 1 << 14  # columns sorted at a time


Rule: TypeAlias = Callable[[torch.Tensor, Sequence[float], Vector], None]
"""Aggregates contributions, finite float32 (n, d) on the CPU with n >= 1, into a vector (d), which must not overlap
them. `mean` may overwrite them. Each has a weight, positive and finite, in any unit; otherwise `ValueError`."""


def mean(contributions: torch.Tensor, weights: Sequence[float], into: Vector) -> None:
    weighted_mean(contributions.unbind(), weights, into)


def median(contributions: torch.Tensor, weights: Sequence[float], into: Vector) -> None:
    """The coordinate-wise weighted median: the midpoint of the lower and the upper one."""
    scaled = _scaled_weights(contributions, weights, into)
    half = math.fsum(scaled) / 2
    for piece, values, reached in _ranked(contributions, scaled):
        lower = (reached < half).sum(0, keepdim=True)
        upper = (reached <= half).sum(0, keepdim=True)
        middle = values.gather(0, lower).mul_(0.5).add_(values.gather(0, upper).mul_(0.5))
        into[piece].copy_(middle[0])


def trimmed_mean(
    contributions: torch.Tensor, weights: Sequence[float], into: Vector, share: float = TRIM_SHARE
) -> None:
    scaled = _scaled_weights(contributions, weights, into)
    whole = math.fsum(scaled)
    low, high = share * whole, whole - share * whole
    for piece, values, reached in _ranked(contributions, scaled):
        total, before = torch.zeros(values.shape[1], dtype=torch.float64), torch.tensor(low, dtype=torch.float64)
        for value, up_to in zip(values, reached, strict=True):
            up_to = up_to.clamp(low, high)
            total.add_(value.double().mul_((up_to - before).div_(high - low)))
            before = up_to
        into[piece].copy_(total.clamp_(-LARGEST_FLOAT32, LARGEST_FLOAT32))


def centered_clip(
    contributions: torch.Tensor, weights: Sequence[float], into: Vector, reach: float = REACH, steps: int = CLIP_STEPS
) -> None:
    """`steps` times v <- v + mean_i((x_i - v) · min(1, τ / ‖x_i - v‖)), from the coordinate median.

    In each step, τ is `reach` times the weighted median of the distances ‖x_i - v‖.
    """
    median(contributions, weights, into)
    scaled = _scaled_weights(contributions, weights, into)
    whole = math.fsum(scaled)
    apart, step = torch.empty_like(into), torch.empty_like(into)
    for _ in range(steps):
        far = [norm([_difference(row, into, apart)]) for row in contributions]
        within = reach * _middle(far, scaled)
        step.zero_()
        for row, distance, weight in zip(contributions, far, scaled, strict=True):
            kept = within / distance if distance > within else 1.0
            step.add_(_difference(row, into, apart).mul_(kept * weight / whole))
        into.add_(step).clamp_(-LARGEST_FLOAT32, LARGEST_FLOAT32)


def krum(contributions: torch.Tensor, weights: Sequence[float], into: Vector) -> None:
    """The contribution nearest to its n - (n - 3) // 2 - 2 nearest neighbours; of few contributions, the median."""
    if len(contributions) < KRUM_LEAST:
        return median(contributions, weights, into)
    _scaled_weights(contributions, weights, into)
    into.copy_(contributions[_nearest(contributions)[0]])


def multi_krum(contributions: torch.Tensor, weights: Sequence[float], into: Vector) -> None:
    if len(contributions) < KRUM_LEAST:
        return median(contributions, weights, into)
    _scaled_weights(contributions, weights, into)
    chosen = sorted(_nearest(contributions)[: _neighbours(len(contributions))])
    weighted_mean([contributions[index].clone() for index in chosen], [weights[index] for index in chosen], into)


RULES: Final[dict[str, Rule]] = {
    "mean": mean,
    "centered_clip": centered_clip,
    "trimmed_mean": trimmed_mean,
    "median": median,
    "krum": krum,
    "multi_krum": multi_krum,
}


def _scaled_weights(contributions: torch.Tensor, weights: Sequence[float], into: Vector) -> list[float]:
    """Check the weights, and scale them so that their sum is finite: by a power of two, which rounds nothing."""
    count, size = contributions.shape
    if not count or count != len(weights) or size != len(into):
        raise ValueError(f"{count} contributions of {size} elements with {len(weights)} weights into {len(into)}")
    if not all(weight > 0 and math.isfinite(weight) for weight in weights):
        raise ValueError(f"weights must be positive and finite, not {list(weights)}")
    _, exponent = math.frexp(max(weights))
    return [math.ldexp(weight, -exponent) for weight in weights]


def _ranked(contributions: torch.Tensor, scaled: Sequence[float]) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """For each piece of the columns: the slice, the values in ascending order, the cumulative weights, (n, columns)."""
    each = torch.tensor(scaled, dtype=torch.float64)
    for low in range(0, contributions.shape[1], _PIECE):
        piece = slice(low, low + _PIECE)
        values, order = contributions[:, piece].sort(stable=True, dim=0)
        yield piece, values, each[order].cumsum(0)


def _difference(row: Vector, centre: Vector, into: Vector) -> Vector:
    return torch.sub(row, centre, out=into).clamp_(-LARGEST_FLOAT32, LARGEST_FLOAT32)


def _middle(values: Sequence[float], scaled: Sequence[float]) -> float:
    order = sorted(range(len(values)), key=lambda index: values[index])
    reached = accumulate(scaled[index] for index in order)
    half = math.fsum(scaled) / 2
    return values[next(index for index, sum_ in zip(order, reached, strict=True) if sum_ >= half)]


def _neighbours(count: int) -> int:
    return count - (count - 3) // 2 - 2


def _nearest(contributions: torch.Tensor) -> list[int]:
    """Indices of the rows in Krum's order, the least sum of squared distances first. Equal rows keep their order."""
    count = len(contributions)
    apart = torch.empty(contributions.shape[1])
    squares = [[0.0] * count for _ in range(count)]
    for one in range(count):
        for other in range(one):
            square = norm([_difference(contributions[one], contributions[other], apart)]) ** 2
            squares[one][other] = squares[other][one] = square
    nearest = _neighbours(count)
    scores = [math.fsum(sorted(row[:one] + row[one + 1 :])[:nearest]) for one, row in enumerate(squares)]
    return sorted(range(count), key=lambda index: scores[index])


class RobustAggregator:
    """Averages the chunks of one part, clipped by their measured norms, and names contributions unlike the others."""

    def __init__(
        self, rule: str, allowances: Sequence[float], expected: Sequence[float] | None = None, own: int | None = None
    ) -> None:
        """Each member's norm may exceed the others' by its allowance (`plan`).

        If norms are `expected` (0: unknown), those that arrive are compared as multiples of these. Of two
        contributions, that of the `own` member is the measure.
        """
        self._rule, self._allowances = require_known("robust rule", rule, RULES), allowances
        self._expected, self._own = expected, own
        members = len(allowances)
        self._sent, self._kept, self._apart = [0.0] * members, [0.0] * members, [0.0] * members
        self._counts = [1] * members  # of how many members each one's latest contribution was the mean

    def average(
        self,
        members: Sequence[int],
        norms: Sequence[float],
        contributions: Sequence[Vector],
        weights: Sequence[float],
        into: Vector,
        counts: Sequence[int] | None = None,
    ) -> None:
        """Aggregate one chunk by the rule, as `Rule` does. `norms` are L2. The contributions are overwritten.

        `counts`: of how many members each contribution is the mean, if they are means.
        """
        contributions, measured = tuple(contributions), len(into) >= MEASURED_ELEMENTS
        if measured:
            self._clip(members, norms, contributions, self._limits(members, norms, counts))
        if self._rule == "mean":
            return weighted_mean(contributions, weights, into)
        rows = torch.stack(contributions)
        if measured:
            median(rows, weights, into)
            apart = torch.empty_like(into)
            for member, row, count in zip(members, rows, counts or [1] * len(rows), strict=True):
                self._apart[member] += norm([_difference(row, into, apart)]) ** 2
                self._counts[member] = count
        RULES[self._rule](rows, weights, into)

    def is_clear(self, members: Sequence[int], norms: Sequence[float], counts: Sequence[int] | None = None) -> bool:
        """Whether no contribution is clipped even if these norms are wrong by `ESTIMATE_ERROR`."""
        share = (1 - ESTIMATE_ERROR) / (1 + ESTIMATE_ERROR)
        limits = self._limits(members, norms, counts)
        each = zip(members, norms, limits, strict=True)
        return all(size <= share * limit * self._allowances[member] for member, size, limit in each)

    def _limits(self, members: Sequence[int], norms: Sequence[float], counts: Sequence[int] | None) -> list[float]:
        """The largest norm that each contribution may have, before its allowance.

        Of means, the norm shrinks as members are more, at most by √members, if these differ in all directions. So a
        mean of fewer members may be that much larger than another one, and a mean of more may be as large.
        """
        if self._expected:
            norms = self._measures(members, norms, self._expected)
        if counts is None or len(set(counts)) <= 1:
            return [self._limit(norms)] * len(norms)
        pairs = list(zip(norms, counts, strict=True))
        return [self._limit([norm * math.sqrt(max(1.0, other / count)) for norm, other in pairs]) for count in counts]

    def _measures(self, members: Sequence[int], norms: Sequence[float], expected: Sequence[float]) -> list[float]:
        """By each of these: which norm a contribution of the median declared norm should have. 0: it does not say."""
        found = [norm / expected[each] if expected[each] else 0.0 for each, norm in zip(members, norms, strict=True)]
        if not any(found):
            return list(norms)
        moved = sum(norm > 0 for norm in norms)
        mine = [measure if each == self._own else 0.0 for each, measure in zip(members, found, strict=True)]
        return mine if moved < 3 and any(mine) else found

    @staticmethod
    def _limit(norms: Sequence[float]) -> float:
        moved = [norm for norm in norms if norm > 0]
        return (MEASURED_SLACK if len(moved) > 2 else PAIR_SLACK) * median_low(moved) if moved else 0.0

    def _clip(
        self,
        members: Sequence[int],
        norms: Sequence[float],
        contributions: Sequence[Vector],
        limits: Sequence[float],
    ) -> None:
        for member, size, row, limit in zip(members, norms, contributions, limits, strict=True):
            kept = min(size, limit * self._allowances[member])
            if kept < size:
                row.mul_(kept / size)
            self._sent[member] += size**2
            self._kept[member] += kept**2

    def named(self) -> dict[int, str]:
        found = {}
        for member, (sent, kept) in enumerate(zip(self._sent, self._kept, strict=True)):
            if kept < NAMED_SHARE**2 * sent:
                found[member] = f"sent {math.sqrt(sent / kept):.3g} times what counts"
        # A mean of several counts as far as one of them may be. It is not named: the reducer cannot tell who is wrong.
        far = [math.sqrt(square * count) for square, count in zip(self._apart, self._counts, strict=True)]
        middle = median_low([distance for distance in far if distance > 0] or [0.0])
        for member, distance in enumerate(far):
            if self._counts[member] == 1 and distance > NAMED_DISTANCE * middle:
                found[member] = f"stands apart: {distance / middle:.3g} times as far from the median as most"
        return found
