"""How much of what a member declares may count: weights, and the factors that reduce norms. Pure.

A norm counts up to the median norm. A member that trained on more tokens than the median member may have a norm that is
larger in proportion: as many steps in one direction would make it so large, and honest norms lie below. Among equal
members, liars then pull no harder than others, and need a majority to turn the mean. Without the allowance, honest fast
members would be cut to the length of slow ones, which stops a swarm of unequal members from learning.

All of this follows from the offers in the plan, so every reducer scales a contribution in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

CLAIM_SPREAD = 16.0
"""Tokens count up to this multiple of the lower median, bandwidths within this factor of it.

Honest peers differ tenfold, and no claim may gain more. It is the lower median, so that of two claims the smaller one
is the measure."""
NAMED_FACTOR = 0.5
"""A member whose norm is clipped by a smaller factor is blamed. Half of all honest members are a little above the
median."""


def weights(tokens: Sequence[int], spread: float = CLAIM_SPREAD) -> tuple[float, ...]:
    """Token weights, none above `spread` times the lower median of the positive ones."""
    brought = [count for count in tokens if count > 0]
    if not brought:
        return tuple(0.0 for _ in tokens)
    cap = spread * median_low(brought)
    return tuple(float(min(count, cap)) for count in tokens)


def allowances(weights: Sequence[float]) -> tuple[float, ...]:
    """How many median norms each member's norm may reach: its weight in median weights, at least 1."""
    positive = [weight for weight in weights if weight > 0]
    middle = median_low(positive) if positive else 1.0
    return tuple(max(1.0, weight / middle) for weight in weights)


def median_norm(norms: Sequence[float]) -> float:
    """The lower median of the positive norms; 0 if there is none."""
    positive = [norm for norm in norms if norm > 0]
    return median_low(positive) if positive else 0.0


def clip_factors(norms: Sequence[float], allowances: Sequence[float]) -> tuple[float, ...]:
    """Factors in (0, 1] that reduce each norm to at most the median norm times its allowance."""
    middle = median_norm(norms)
    return tuple(
        min(1.0, allowance * middle / norm) if norm > 0 else 1.0
        for norm, allowance in zip(norms, allowances, strict=True)
    )
