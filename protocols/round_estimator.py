"""Which round a swarm without a coordinator is in, by the rounds that its peers claim. Pure.

No peer is believed alone: a quorum of the claims has to be for a round or a later one before others go by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundEstimator:
    """Finds the latest round that a quorum of peers has reached.

    Attributes:
        quorum_share: of the claims, at least this share has to be for the round or a later one.
        min_witnesses: so many in any case, or all peers where there are fewer.
    """

    quorum_share: float
    min_witnesses: int

    def quorum(self, claims: int, peers: int) -> int:
        """How many of so many claims have to be for a round.

        Args:
            peers: how many there are, those without a claim included.
        """
        return max(math.ceil(self.quorum_share * claims), min(self.min_witnesses, peers))

    def latest(self, claims: Iterable[int], peers: int) -> int | None:
        """The latest round that a quorum has reached; None: there is none. `peers` as in `quorum`."""
        rounds = sorted(claims, reverse=True)
        needed = self.quorum(len(rounds), peers)
        return rounds[needed - 1] if 0 < needed <= len(rounds) else None


MORE_THAN_HALF = math.nextafter(1 / 2, 1)
"""Of three peers two, of four three."""

MOSHPIT_ROUND = RoundEstimator(1 / 3, 2)
"""A peer that is behind goes to this round. Peers that are ahead of it, and fewer than that, wait."""
PAIRWISE_ROUND = RoundEstimator(MORE_THAN_HALF, 2)
"""A peer that is slower than most goes to this round, and ends its run with the others."""
DONOR_ROUND = RoundEstimator(MORE_THAN_HALF, 1)
"""A newcomer fetches no state that is later. If only one peer has a state, the newcomer takes that one."""
