"""A peer's position in its run, for code that is independent of the protocol."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from protocols.base import Head, Member, RoundKey


class RoundHistory(Protocol):
    """`protocols.history.chain.Chain`, or `LocalHistory` where no anchor is shared."""

    @property
    def head(self) -> Head:
        """The tip, which the next round extends."""

    @property
    def lacks_state(self) -> bool:
        """Whether this peer does not have the state at the head."""

    @property
    def trained(self) -> int:
        """Number of training rounds so far. A run has a fixed number of them."""

    def members(self, limit: int) -> Iterable[Member]:
        """At most `limit` members of past rosters, the latest first."""


class LocalHistory:
    """The rounds of one peer with independent state: its roster is this peer, its lineages are its state roots."""

    def __init__(self, me: Member, key: RoundKey, lacks_state: bool = False) -> None:
        """`key` is that of the first round; its lineage is not known before the state is hashed.

        A newcomer `lacks_state`: it must fetch its first state, and serve none before.
        """
        self.key = key  # of the next round
        self.lacks_state = lacks_state
        self._me = me

    @property
    def head(self) -> Head:
        return Head(self.key, (self._me,), self.key.lineage, self.key.lineage)

    @property
    def trained(self) -> int:
        return self.key.round

    def members(self, limit: int) -> tuple[Member, ...]:
        return ()
