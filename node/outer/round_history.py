"""Where a peer stands in its run, as far as those must know who do not care how it averages."""

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
        """Rounds of training so far: what a run is long."""

    def members(self, limit: int) -> Iterable[Member]:
        """Whom it knows as members, the latest first."""


class LocalHistory:
    """The rounds of one peer, in which nobody else has a voice: a roster of itself, and roots of states as lineages.

    Attributes:
        key: of the next round.
    """

    def __init__(self, me: Member, key: RoundKey) -> None:
        """
        Args:
            key: of the first round; what its lineage is shows when the state is hashed.
        """
        self.key = key
        self._me = me

    @property
    def head(self) -> Head:
        return Head(self.key, (self._me,), self.key.lineage, self.key.lineage)

    @property
    def trained(self) -> int:
        return self.key.round

    def members(self, limit: int) -> tuple[Member, ...]:
        return ()
