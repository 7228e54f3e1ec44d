"""How far a run without a coordinator is: what most of the peers say that a peer has heard from. Pure.

A round is a peer's own, and how long one takes differs from peer to peer. The number says how far the schedule is, and
when the run is over: a peer that is slower than most goes by theirs, or it would train on alone when they are done.
"""

from __future__ import annotations

from collections.abc import Collection

from protocols.base import PeerId
from protocols.estimates import RecentDict
from protocols.round_estimator import PAIRWISE_ROUND

WITNESSES = 15
"""The last claims of so many peers are known; the peer that has been quiet longest is forgotten first."""


class ClaimedRounds:
    """The rounds that other peers have come to the end of, as each of them claims."""

    def __init__(self) -> None:
        self._said: RecentDict[PeerId, int] = RecentDict(WITNESSES)

    def hear(self, peer: PeerId, round_number: int) -> None:
        """A peer says that it has come to the end of that round: this replaces what it said before."""
        self._said[peer] = round_number

    def round(self, mine: int, others: Collection[PeerId]) -> int:
        """The round that this peer is in, or the later one that more than half of the others have come to.

        Args:
            others: the live ones. Of the rest only those count that were ahead: they have ended their run, and left.
        """
        claims = [each for peer, each in self._said.items() if peer in others or each > mine]
        silent = sum(peer not in self._said for peer in others)
        latest = PAIRWISE_ROUND.latest(claims, len(claims) + silent)
        return mine if latest is None else max(mine, latest)
