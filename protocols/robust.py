"""What a reducer does with contributions that it does not trust: rules that bear some wrong ones. Pure.

    mean            the weighted mean: one contribution can move it anywhere; norms are clipped before it (`plan`)
    centered_clip   from the coordinate median, five steps of the mean of what is within reach of it, the rest drawn in
                    (Karimireddy et al. 2021, arXiv 2012.10333, algorithm 2)
    trimmed_mean    of each coordinate, without the quarter of the weight that is lowest and the quarter that is highest
                    (Yin et al. 2018, arXiv 1803.01498)
    median          of each coordinate (the same)
    krum            the one contribution that is nearest to its neighbours (Blanchard et al. 2017, arXiv 1703.02757)
    multi_krum      the mean of the nearest (the same, section 4)

A weight is a number of voices: weight 2 is as good as two equal contributions, except that Krum looks for the nearest
one without regard to weights. Less than half of the voices wrong, and the result of `median` and `centered_clip` stays
among the others; for `trimmed_mean` that is less than a quarter, for the Krums b of n >= 2b + 3. None of them finds the
mean of the honest exactly, and none bears contributions that are wrong together and yet no further out than the honest
ones are from each other (ALIE, Baruch et al. 2019; IPM, Xie et al. 2019).

`mean`, `median` and `trimmed_mean` give the same bits on every machine. The others compare and multiply by norms, whose
last digits differ between machines: a part that is reduced again elsewhere may then have another digest, as it has when
other contributions were in; what counts is the one that is voted on.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from statistics import median_low
from typing import Final, Protocol

import torch

from protocols.base import Vector
from protocols.limits import LARGEST_FLOAT32
from protocols.vectors import norm, weighted_mean

TRIM_SHARE = 0.25
REACH = 0.5
"""τ of `centered_clip`, in median distances from where it stands: while less than half of the voices are wrong, the
median distance is at most an honest one. Between .25 and 1 it matters little; from 1.5 on, what is far out draws the
centre towards itself, which makes it less far out."""
CLIP_STEPS = 5
KRUM_LEAST = 5
"""Of fewer contributions than 2·1 + 3, Krum bears no wrong one: there the coordinate median stands in, which does."""

MEASURED_SLACK = 1.4
"""What arrives may have this multiple of the median norm of what arrived, times its sender's allowance: norms are not
spread alike over the parts of a vector. Those of eight honest peers came to 1.16 times the median in chunks of 14,000
elements; of 1,024 elements one in a thousand came to 1.41."""
PAIR_SLACK = 2.0
"""And of two, this multiple of the smaller one: which of them is wrong nobody can say."""
MEASURED_ELEMENTS = 64
"""The norm of fewer numbers says little."""
NAMED_SHARE = 0.5
"""Who is clipped to less than this share of its norm is named."""
NAMED_DISTANCE = 3.0
"""And who is so many times as far from the coordinate median as most: of honest peers, half of them ten
times slower, the furthest came to twice."""

_PIECE = 1 << 14  # columns that are sorted at a time


class Rule(Protocol):
    def __call__(self, contributions: torch.Tensor, weights: Sequence[float], into: Vector) -> None:
        """Aggregate into `into` (d), which overlaps nothing. Finite contributions give a finite result.

        Args:
            contributions: float32 (n, d) on the CPU, n >= 1, rows contiguous, finite; may be destroyed by `mean`.
            weights: one for each row, positive and finite, in any unit.

        Raises:
            ValueError: counts or sizes differ, or a weight is not positive and finite.
        """


def mean(contributions: torch.Tensor, weights: Sequence[float], into: Vector) -> None:
    """`vectors.weighted_mean`."""
    weighted_mean(contributions.unbind(), weights, into)


def median(contributions: torch.Tensor, weights: Sequence[float], into: Vector) -> None:
    """Of each coordinate, the middle of its lower and its upper weighted median."""
    voices = _voices(contributions, weights, into)
    half = math.fsum(voices) / 2
    for piece, values, reached in _ranked(contributions, voices):
        lower = (reached < half).sum(0, keepdim=True)
        upper = (reached <= half).sum(0, keepdim=True)
        middle = values.gather(0, lower).mul_(0.5).add_(values.gather(0, upper).mul_(0.5))
        into[piece].copy_(middle[0])


def trimmed_mean(
    contributions: torch.Tensor, weights: Sequence[float], into: Vector, share: float = TRIM_SHARE
) -> None:
    """Of each coordinate, the weighted mean without `share` (below .5) of the weight at either end; a contribution on
    the border counts with what is left of its weight."""
    voices = _voices(contributions, weights, into)
    whole = math.fsum(voices)
    low, high = share * whole, whole - share * whole
    for piece, values, reached in _ranked(contributions, voices):
        total, before = torch.zeros(values.shape[1], dtype=torch.float64), torch.tensor(low, dtype=torch.float64)
        for value, up_to in zip(values, reached, strict=True):
            up_to = up_to.clamp(low, high)
            total.add_(value.double().mul_((up_to - before).div_(high - low)))
            before = up_to
        into[piece].copy_(total.clamp_(-LARGEST_FLOAT32, LARGEST_FLOAT32))


def centered_clip(
    contributions: torch.Tensor, weights: Sequence[float], into: Vector, reach: float = REACH, steps: int = CLIP_STEPS
) -> None:
    """v <- v + mean_i((x_i - v) · min(1, τ / ‖x_i - v‖)), from the coordinate median; τ is `reach` times the weighted
    median of the distances ‖x_i - v‖, anew in each step."""
    median(contributions, weights, into)
    voices = _voices(contributions, weights, into)
    whole = math.fsum(voices)
    apart, step = torch.empty_like(into), torch.empty_like(into)
    for _ in range(steps):
        far = [norm([_difference(row, into, apart)]) for row in contributions]
        within = reach * _middle(far, voices)
        step.zero_()
        for row, distance, voice in zip(contributions, far, voices, strict=True):
            kept = within / distance if distance > within else 1.0
            step.add_(_difference(row, into, apart).mul_(kept * voice / whole))
        into.add_(step).clamp_(-LARGEST_FLOAT32, LARGEST_FLOAT32)


def krum(contributions: torch.Tensor, weights: Sequence[float], into: Vector) -> None:
    """The contribution with the least sum of squared distances to its n - b - 2 nearest neighbours, b = (n - 3) // 2,
    the most that Krum can bear; of fewer than `KRUM_LEAST`, the coordinate median."""
    if len(contributions) < KRUM_LEAST:
        return median(contributions, weights, into)
    _voices(contributions, weights, into)
    into.copy_(contributions[_nearest(contributions)[0]])


def multi_krum(contributions: torch.Tensor, weights: Sequence[float], into: Vector) -> None:
    """The weighted mean of the n - b - 2 contributions that Krum would take first; of few, as in `krum`."""
    if len(contributions) < KRUM_LEAST:
        return median(contributions, weights, into)
    _voices(contributions, weights, into)
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


def known(name: str) -> str:
    """The name itself.

    Raises:
        ValueError: there is no such rule; one line that names those there are.
    """
    if name in RULES:
        return name
    near = difflib.get_close_matches(name.lower().replace("-", "_"), RULES, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown robust rule {name[:40]!r}: there are {', '.join(RULES)}{hint}")


def _voices(contributions: torch.Tensor, weights: Sequence[float], into: Vector) -> list[float]:
    """The weights, checked, and scaled by a power of two, which rounds nothing, so that their sum is finite."""
    count, size = contributions.shape
    if not count or count != len(weights) or size != len(into):
        raise ValueError(f"{count} contributions of {size} elements with {len(weights)} weights into {len(into)}")
    if not all(weight > 0 and math.isfinite(weight) for weight in weights):
        raise ValueError(f"weights are positive and finite, not {list(weights)}")
    _, exponent = math.frexp(max(weights))
    return [math.ldexp(weight, -exponent) for weight in weights]


def _ranked(contributions: torch.Tensor, voices: Sequence[float]) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Piece by piece of the columns: which; their values in ascending order, the voices reached with each; (n, c)."""
    each = torch.tensor(voices, dtype=torch.float64)
    for low in range(0, contributions.shape[1], _PIECE):
        piece = slice(low, low + _PIECE)
        values, order = contributions[:, piece].sort(stable=True, dim=0)
        yield piece, values, each[order].cumsum(0)


def _difference(row: Vector, centre: Vector, into: Vector) -> Vector:
    """row - centre, held at the largest float32."""
    return torch.sub(row, centre, out=into).clamp_(-LARGEST_FLOAT32, LARGEST_FLOAT32)


def _middle(values: Sequence[float], voices: Sequence[float]) -> float:
    """The lower weighted median."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    reached = accumulate(voices[index] for index in order)
    half = math.fsum(voices) / 2
    return values[next(index for index, sum_ in zip(order, reached, strict=True) if sum_ >= half)]


def _neighbours(count: int) -> int:
    return count - (count - 3) // 2 - 2


def _nearest(contributions: torch.Tensor) -> list[int]:
    """Rows by their sum of squared distances to their neighbours, least first; of equals, the first."""
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
    """Averages the chunks of one part, and says whose contribution was not like the others'.

    Declared norms were brought down already, by factors that all reducers share; here is what was really sent. Norms
    and distances are those of the chunk: who is honest in one part and not in another counts in the one.
    """

    def __init__(self, rule: str, allowances: Sequence[float]) -> None:
        """
        Args:
            allowances: of each member, see `plan.Terms`.

        Raises:
            ValueError: there is no such rule.
        """
        self._rule, self._allowances = known(rule), allowances
        members = len(allowances)
        self._sent, self._kept, self._apart = [0.0] * members, [0.0] * members, [0.0] * members

    def average(
        self,
        who: Sequence[int],
        norms: Sequence[float],
        contributions: torch.Tensor,
        weights: Sequence[float],
        into: Vector,
    ) -> None:
        """One chunk by the rule; as `Rule`. The contributions are destroyed.

        Args:
            who: the member behind each row.
            norms: of each row.
        """
        measured = contributions.shape[1] >= MEASURED_ELEMENTS
        if measured:
            self._bring_down(who, norms, contributions)
        if measured and self._rule != "mean":
            median(contributions, weights, into)
            apart = torch.empty_like(into)
            for member, row in zip(who, contributions, strict=True):
                self._apart[member] += norm([_difference(row, into, apart)]) ** 2
        RULES[self._rule](contributions, weights, into)

    def _bring_down(self, who: Sequence[int], norms: Sequence[float], contributions: torch.Tensor) -> None:
        moved = [norm for norm in norms if norm > 0]
        limit = (MEASURED_SLACK if len(moved) > 2 else PAIR_SLACK) * median_low(moved) if moved else 0.0
        for member, size, row in zip(who, norms, contributions, strict=True):
            kept = min(size, limit * self._allowances[member])
            if kept < size:
                row.mul_(kept / size)
            self._sent[member] += size**2
            self._kept[member] += kept**2

    def named(self) -> dict[int, str]:
        """Member -> what was wrong with its contribution, in one line."""
        found = {}
        for member, (sent, kept) in enumerate(zip(self._sent, self._kept, strict=True)):
            if kept < NAMED_SHARE**2 * sent:
                found[member] = f"sent {math.sqrt(sent / kept):.3g} times what counts"
        far = [math.sqrt(square) for square in self._apart]
        middle = median_low([distance for distance in far if distance > 0] or [0.0])
        for member, distance in enumerate(far):
            if distance > NAMED_DISTANCE * middle:
                found[member] = f"stands apart: {distance / middle:.3g} times as far from the median as most"
        return found
