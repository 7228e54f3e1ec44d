"""How much of what a member declares may count: weights, and the factors that bring norms down. Pure.

A norm counts up to the median norm. Who has trained on more tokens than the median member may bring a norm that is
larger in proportion: that many steps in one direction would make it so large, and honest ones lie below. Of members
alike, liars then pull no harder than others, and need a majority to turn the mean; without the allowance, honest fast
members would be cut to the length of slow ones, which stops a swarm of unequal members from learning.

All of it follows from the offers in the plan, so that every reducer scales a contribution alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

CLAIM_SPREAD = 16.0
"""Tokens count up to this multiple of the lower median, bandwidths within this factor of it: honest peers differ
tenfold, and no claim may buy more. The lower median, so that of two claims the smaller is the measure."""
NAMED_FACTOR = 0.5
"""Whose norm is clipped by more than this is named: half of all honest members are above the median, by a little."""


def weights(tokens: Sequence[int], spread: float = CLAIM_SPREAD) -> tuple[float, ...]:
    """Token weights, none above `spread` times the median of those that bring any."""
    brought = [count for count in tokens if count > 0]
    if not brought:
        return tuple(0.0 for _ in tokens)
    cap = spread * median_low(brought)
    return tuple(float(min(count, cap)) for count in tokens)


def allowances(weights: Sequence[float]) -> tuple[float, ...]:
    """By how much each member's norm may exceed the median norm: its weight in median weights, at least 1."""
    positive = [weight for weight in weights if weight > 0]
    middle = median_low(positive) if positive else 1.0
    return tuple(max(1.0, weight / middle) for weight in weights)


def median_norm(norms: Sequence[float]) -> float:
    """The lower median of those that moved; 0 if nobody has."""
    positive = [norm for norm in norms if norm > 0]
    return median_low(positive) if positive else 0.0


def clip_factors(norms: Sequence[float], allowances: Sequence[float]) -> tuple[float, ...]:
    """Factors in (0, 1] that bring each norm down to the median norm times its allowance."""
    middle = median_norm(norms)
    return tuple(
        min(1.0, allowance * middle / norm) if norm > 0 else 1.0
        for norm, allowance in zip(norms, allowances, strict=True)
    )
