"""What a peer estimates of other peers: a moving average, a bounded dict, the round of the swarm. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def ewma(mean: float, observed: float, gain: float) -> float:
    """Update an exponentially weighted moving average with an observation of weight `gain`."""
    return (1 - gain) * mean + gain * observed


class RecentDict(OrderedDict[K, V]):
    """A dict of at most `limit` entries. Beyond the limit, the entry that was set longest ago is dropped."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)

    def put_newest(self, key: K, new: Callable[[], V]) -> V:
        """Return the entry of this key, created if missing, and mark it as the one that was set last."""
        self[key] = entry = self[key] if key in self else new()
        return entry


@dataclass(frozen=True, slots=True)
class RoundEstimator:
    """Finds the latest round that a quorum of peers has reached, by their own claims. No single claim is trusted."""

    quorum_share: float  # least share of the claims
    min_witnesses: int  # least number of claims, or all peers if there are fewer

    def quorum(self, claims: int, peers: int) -> int:
        """How many of these claims a quorum needs among `peers` peers, including those without a claim."""
        return max(math.ceil(self.quorum_share * claims), min(self.min_witnesses, peers))

    def latest(self, claims: Iterable[int], peers: int) -> int | None:
        """The latest round that a quorum has reached, or None."""
        rounds = sorted(claims, reverse=True)
        needed = self.quorum(len(rounds), peers)
        return rounds[needed - 1] if 0 < needed <= len(rounds) else None


MORE_THAN_HALF = math.nextafter(1 / 2, 1)
"""Two of three peers, three of four."""

MOSHPIT_ROUND = RoundEstimator(1 / 3, 2)
"""A peer that is behind moves on to this round. Peers ahead of it, fewer than a quorum, wait for the others."""
PAIRWISE_ROUND = RoundEstimator(MORE_THAN_HALF, 2)
"""A peer that is slower than most moves on to this round, so that it ends its run with the others."""
DONOR_ROUND = RoundEstimator(MORE_THAN_HALF, 1)
"""A joiner fetches no state of a later round. If only one peer has a state, the joiner fetches that one."""
