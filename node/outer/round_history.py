"""A peer's position in its run, for code that is independent of the protocol."""

from __future__ import annotations

from typing import TypeAlias

from protocols.base import Head, Member, RoundKey
from protocols.history.chain import Chain


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


RoundHistory: TypeAlias = Chain | LocalHistory
"""A peer's position in its run: `LocalHistory` where no anchor is shared."""
