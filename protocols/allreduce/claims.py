"""What a slow member costs its group, and how slow it may be. Pure.

The other members are taken to send at one rate, since a peer learns what they declare only when it takes part.
"""

from __future__ import annotations

from protocols.allreduce.clipping import CLAIM_SPREAD
from protocols.allreduce.plan import BUDGET_FLOOR_SECONDS, BUDGET_MULTIPLE, expected_seconds, shares

_BUDGET_SHARE = 0.5


def least_claim(vector_bytes: int, others: float) -> tuple[float, float]:
    """The least bandwidth with which a member is sure to be in time.

    The plan takes a slower member for one at the clamp, the `CLAIM_SPREAD`th part of the others' bandwidth. To be in
    time, it has to send its vector within half of the budget that follows.

    Args:
        others: bandwidth of the other members, bytes/s.

    Returns:
        That bandwidth, bytes/s, and half of the budget in seconds.
    """
    budget_seconds = BUDGET_MULTIPLE * vector_bytes * CLAIM_SPREAD / others + BUDGET_FLOOR_SECONDS
    return vector_bytes / (_BUDGET_SHARE * budget_seconds), _BUDGET_SHARE * budget_seconds


def cost_seconds(claim: float, others: float, vector_bytes: int, members: int) -> float:
    """By how much a member of this bandwidth lengthens the data phase, compared with one like the others."""
    if members < 2:
        return 0.0

    def seconds(mine: float) -> float:
        uplinks = [mine] + [others] * (members - 1)
        return expected_seconds(shares(uplinks, [True] * members), uplinks, vector_bytes)

    return max(0.0, seconds(min(claim, others)) - seconds(others))
