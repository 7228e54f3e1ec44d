"""The peers to ask for heads and states: live peers, former members, callers, and hints that may be wrong. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from protocols.base import DISTRUST_SECONDS, Members, PeerId
from protocols.history.chain import Chain
from protocols.peers.estimates import RecentDict
from protocols.sync.requests import SnapshotRef

MAX_CONTACTS = 64


class SyncPeers:
    """The peers that may have a later head than this peer, and the snapshots that they announced. All is bounded.

    Args:
        chain: its former members are asked too; None if there is no chain.
        hints: bootstrap addresses and peers from a directory.
        now: the loop's time, seconds.
    """

    def __init__(
        self,
        me: PeerId,
        members: Members,
        chain: Chain | None,
        hints: Callable[[], Iterable[PeerId]],
        now: Callable[[], float],
    ) -> None:
        self._me, self._members, self._chain, self._hints, self._now = me, members, chain, hints, now
        self._callers: deque[PeerId] = deque(maxlen=MAX_CONTACTS // 4)
        self._distrusted: RecentDict[PeerId, float] = RecentDict(MAX_CONTACTS)
        self._snapshots: RecentDict[PeerId, tuple[SnapshotRef, ...]] = RecentDict(MAX_CONTACTS)

    def called(self, peer: PeerId) -> bool:
        """Note that a peer has an unknown head. Returns whether to have it proved."""
        if self.trusts(peer) and peer not in self._callers:
            self._callers.append(peer)
        return self.trusts(peer)

    def has(self, peer: PeerId, kept: tuple[SnapshotRef, ...]) -> None:
        """Record the snapshots that a peer claims to serve."""
        self._snapshots[peer] = kept

    def distrust(self, peer: PeerId) -> None:
        """Ask this peer for nothing for `DISTRUST_SECONDS`, since it broke a rule."""
        self._distrusted[peer] = self._now() + DISTRUST_SECONDS

    def trusts(self, peer: PeerId) -> bool:
        return self._distrusted.get(peer, 0.0) <= self._now()

    def stock(self) -> dict[bytes, list[PeerId]]:
        """Lineage -> the peers that claim to serve its state."""
        found: dict[bytes, list[PeerId]] = {}
        for peer in self.others(self._snapshots):
            for kept in self._snapshots[peer]:
                found.setdefault(kept.lineage, []).append(peer)
        return found

    def everybody(self) -> list[PeerId]:
        """All peers to ask."""
        live = [member.peer for member in self._members.live()]
        return self.others(self._callers, live[: MAX_CONTACTS // 2], self._past(), self._hints())

    def outsiders(self) -> list[PeerId]:
        """The peers that a round does not reach: evicted members and hints."""
        roster = {member.peer for member in self._chain.head.roster} if self._chain else set()
        return [peer for peer in self.others(self._past(), self._hints()) if peer not in roster]

    def others(self, *groups: Iterable[PeerId]) -> list[PeerId]:
        """The peers of these groups, each once and in order, without this peer and distrusted ones."""
        every = dict.fromkeys(peer for group in groups for peer in group)
        return [peer for peer in every if peer != self._me and self.trusts(peer)][:MAX_CONTACTS]

    def _past(self) -> list[PeerId]:
        return [member.peer for member in self._chain.members(MAX_CONTACTS // 2)] if self._chain else []
