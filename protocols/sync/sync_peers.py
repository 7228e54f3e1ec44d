"""The peers that a peer can ask: live peers, former members, peers that called, and hints that may be wrong. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from protocols.base import Members, PeerId
from protocols.estimates import RecentDict
from protocols.history.chain import Chain
from protocols.limits import DISTRUST_SECONDS
from protocols.sync.requests import SnapshotRef

MAX_CONTACTS = 64


class SyncPeers:
    """The peers that may know more than we do, and what they announced. All of it is bounded.

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
        self._stock: RecentDict[PeerId, tuple[SnapshotRef, ...]] = RecentDict(MAX_CONTACTS)

    def called(self, peer: PeerId) -> bool:
        """Note that a peer came with news; return whether to look into it."""
        if self.trusts(peer) and peer not in self._callers:
            self._callers.append(peer)
        return self.trusts(peer)

    def has(self, peer: PeerId, kept: tuple[SnapshotRef, ...]) -> None:
        """Record which snapshots a peer says that it serves."""
        self._stock[peer] = kept

    def distrust(self, peer: PeerId) -> None:
        """Record that a peer lied."""
        self._distrusted[peer] = self._now() + DISTRUST_SECONDS

    def trusts(self, peer: PeerId) -> bool:
        return self._distrusted.get(peer, 0.0) <= self._now()

    def stock(self) -> dict[bytes, list[PeerId]]:
        """Lineage -> the peers that claim to serve the state that it names."""
        found: dict[bytes, list[PeerId]] = {}
        for peer in self.others(self._stock):
            for kept in self._stock[peer]:
                found.setdefault(kept.lineage, []).append(peer)
        return found

    def everybody(self) -> list[PeerId]:
        """All peers to ask."""
        live = [member.peer for member in self._members.live()]
        return self.others(self._callers, live[: MAX_CONTACTS // 2], self._past(), self._hints())

    def outsiders(self) -> list[PeerId]:
        """The peers that a round does not reach: evicted, or only hinted at."""
        roster = {member.peer for member in self._chain.head.roster} if self._chain else set()
        return [peer for peer in self.others(self._past(), self._hints()) if peer not in roster]

    def others(self, *groups: Iterable[PeerId]) -> list[PeerId]:
        """Each peer once, in this order, without this peer and those that lied recently."""
        every = dict.fromkeys(peer for group in groups for peer in group)
        return [peer for peer in every if peer != self._me and self.trusts(peer)][:MAX_CONTACTS]

    def _past(self) -> list[PeerId]:
        return [member.peer for member in self._chain.members(MAX_CONTACTS // 2)] if self._chain else []
