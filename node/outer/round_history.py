"""Where a peer stands in its run, for code to which it does not matter how the peer averages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from protocols.base import Head, Member, RoundKey


class RoundHistory(Protocol):
    """`protocols.history.chain.Chain`, or `LocalHistory` where no anchor is shared."""

    @property
    def head(self) -> Head:
        """What the next round extends."""

    @property
    def trained(self) -> int:
        """Rounds of training so far; a run has a set number of them."""

    def members(self, limit: int) -> Iterable[Member]:
        """The members that it knows, the latest first."""


class LocalHistory:
    """The rounds of one peer by itself: a roster of this peer, and roots of its states as lineages.

    Attributes:
        key: of the next round.
    """

    def __init__(self, me: Member, key: RoundKey) -> None:
        """
        Args:
            key: of the first round; its lineage is not known before the state is hashed.
        """
        self.key = key
        self._me = me

    def move_to(self, key: RoundKey) -> None:
        """Set the key of the next round: this peer stands before another round, or at another state."""
        self.key = key

    @property
    def head(self) -> Head:
        return Head(self.key, (self._me,), self.key.lineage, self.key.lineage)

    @property
    def trained(self) -> int:
        return self.key.round

    def members(self, limit: int) -> tuple[Member, ...]:
        return ()
