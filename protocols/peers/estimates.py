"""What a peer estimates of other peers: a moving average, a bounded dict, the round of the swarm. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TypeVar

from protocols.base import PeerId

WITNESSES = 15
"""At most this many peers' claims are kept by `ClaimedRounds`; that of the peer silent longest is dropped first."""

K = TypeVar("K")
V = TypeVar("V")


def ewma(mean: float, observed: float, gain: float) -> float:
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
        rounds = sorted(claims, reverse=True)
        needed = self.quorum(len(rounds), peers)
        return rounds[needed - 1] if 0 < needed <= len(rounds) else None


MORE_THAN_HALF = math.nextafter(1 / 2, 1)  # two of three peers, three of four

MOSHPIT_ROUND = RoundEstimator(1 / 3, 2)
"""A peer that is behind moves on to this round. Peers ahead of it, fewer than a quorum, wait for the others."""
PAIRWISE_ROUND = RoundEstimator(MORE_THAN_HALF, 2)
"""A peer that is slower than most moves on to this round, so that it ends its run with the others."""
DONOR_ROUND = RoundEstimator(MORE_THAN_HALF, 1)
"""A joiner fetches no state of a later round. If only one peer has a state, the joiner fetches that one."""


class ClaimedRounds:
    """The rounds that other peers claim to have completed, in a run without a coordinator.

    A peer that is slower than most follows the others' round; otherwise it would train on alone after they finish.
    """

    def __init__(self) -> None:
        self._said: RecentDict[PeerId, int] = RecentDict(WITNESSES)

    def hear(self, peer: PeerId, round_number: int) -> None:
        self._said[peer] = round_number

    def round(self, mine: int, others: Collection[PeerId]) -> int:
        """The later of this peer's round and the one that more than half of the other live peers have reached."""
        claims = [each for peer, each in self._said.items() if peer in others or each > mine]
        silent = sum(peer not in self._said for peer in others)
        latest = PAIRWISE_ROUND.latest(claims, len(claims) + silent)
        return mine if latest is None else max(mine, latest)
