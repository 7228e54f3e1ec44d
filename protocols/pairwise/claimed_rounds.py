"""Estimate the current round of a run without a coordinator, from the rounds that other peers claim. No I/O.

Each peer counts its own rounds, and rounds take different times on different peers. The estimate says how far the
schedule is and when the run is over. A peer that is slower than most follows the others' round; otherwise it would
train on alone after they finish.
"""

from __future__ import annotations

from collections.abc import Collection

from protocols.base import PeerId
from protocols.peers.estimates import PAIRWISE_ROUND, RecentDict

WITNESSES = 15
"""At most this many peers' last claims are kept; the peer that has been silent longest is dropped first."""


class ClaimedRounds:
    """The rounds that other peers claim to have completed."""

    def __init__(self) -> None:
        self._said: RecentDict[PeerId, int] = RecentDict(WITNESSES)

    def hear(self, peer: PeerId, round_number: int) -> None:
        """Record that a peer claims to have completed this round. This replaces its earlier claim."""
        self._said[peer] = round_number

    def round(self, mine: int, others: Collection[PeerId]) -> int:
        """The later of this peer's round and the round that more than half of the others have reached.

        Args:
            others: the live peers. Other peers count only if they were ahead of `mine`: they have ended their run and
                left.
        """
        claims = [each for peer, each in self._said.items() if peer in others or each > mine]
        silent = sum(peer not in self._said for peer in others)
        latest = PAIRWISE_ROUND.latest(claims, len(claims) + silent)
        return mine if latest is None else max(mine, latest)
