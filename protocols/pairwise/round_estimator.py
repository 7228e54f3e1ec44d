"""How far a run is in which nobody calls a round: what most of those say whom a peer has heard of. Pure.

A round is a peer's own, and how long one takes differs from peer to peer. The number says how far the schedule is, and
when the run is over: a peer that is slower than most goes by theirs, or it would train on alone when they are done.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from protocols.base import PeerId

WITNESSES = 15
"""The last word of so many peers is known; who has been quiet longest is forgotten first."""
LEAST_WITNESSES = 2
"""So many have to say it, where there are as many others: one liar cannot move the clock."""


class RoundEstimator:
    """The rounds that others have come to the end of, as each of them says."""

    def __init__(self) -> None:
        self._said: OrderedDict[PeerId, int] = OrderedDict()

    def hear(self, peer: PeerId, round_number: int) -> None:
        """A peer says that it has come to the end of that round: this replaces what it said before."""
        self._said[peer] = round_number
        self._said.move_to_end(peer)
        if len(self._said) > WITNESSES:
            self._said.popitem(last=False)

    def round(self, mine: int, others: Collection[PeerId]) -> int:
        """The round that this peer is in, or the later one that more than half of the others have come to.

        Args:
            others: who are live. Of the rest only those count who were ahead: they have come to the end, and left.
        """
        said = sorted((each for peer, each in self._said.items() if peer in others or each > mine), reverse=True)
        here = len(said) + sum(peer not in self._said for peer in others)
        needed = max(len(said), min(LEAST_WITNESSES, here)) // 2
        return max(mine, said[needed]) if needed < len(said) else mine
