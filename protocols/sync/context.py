"""What the parts of one peer's sync service share: the peers to ask, settings and counters."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from protocols.aio import loop_time
from protocols.base import DISTRUST_SECONDS, Deadline, Host, Member, Members, PeerId, Settings, Stream
from protocols.consensus import record as records
from protocols.history.chain import Chain
from protocols.peers.estimates import RecentDict
from protocols.streams.endpoint import RoundAccounting
from protocols.sync.progress import SyncProgress
from protocols.sync.requests import SnapshotRef
from protocols.sync.snapshot import Snapshots

MAX_CONTACTS = 64
ASKED = 8
"""Peers in one look for other heads. The peers of another branch look, too, and both sides learn the other's head."""
TELL_SECONDS = 60.0  # between two lines that tell the operator of peers whose proofs are refused


class SyncPeers:
    """The peers to ask for heads and states: live peers, former members, callers, and hints, any of which may lie."""

    def __init__(
        self, me: PeerId, members: Members, chain: Chain | None, hints: Callable[[], Iterable[PeerId]]
    ) -> None:
        self._me, self._members, self._chain, self._hints = me, members, chain, hints
        self._looks = 0
        self._callers: deque[PeerId] = deque(maxlen=MAX_CONTACTS // 4)
        self._distrusted: RecentDict[PeerId, float] = RecentDict(MAX_CONTACTS)
        self._snapshots: RecentDict[PeerId, tuple[SnapshotRef, ...]] = RecentDict(MAX_CONTACTS)

    def called(self, peer: PeerId) -> bool:
        """Note that a peer has an unknown head. Returns whether to have it proved."""
        if self.trusts(peer) and peer not in self._callers:
            self._callers.append(peer)
        return self.trusts(peer)

    def has(self, peer: PeerId, kept: tuple[SnapshotRef, ...]) -> None:
        self._snapshots[peer] = kept

    def distrust(self, peer: PeerId) -> None:
        """Ask this peer for nothing for `DISTRUST_SECONDS`, since it broke a rule."""
        self._distrusted[peer] = loop_time() + DISTRUST_SECONDS

    def trusts(self, peer: PeerId) -> bool:
        return self._distrusted.get(peer, 0.0) <= loop_time()

    def snapshot_holders(self) -> dict[bytes, list[PeerId]]:
        """Lineage -> the peers that claim to serve its state."""
        found: dict[bytes, list[PeerId]] = {}
        for peer in self.others(self._snapshots):
            for kept in self._snapshots[peer]:
                found.setdefault(kept.lineage, []).append(peer)
        return found

    def all_contacts(self) -> list[PeerId]:
        lot = (self._chain.head.key.lineage if self._chain else b"") + self._me.encode()
        live = records.drawn(lot, (member.peer for member in self._members.live()))[: MAX_CONTACTS // 2]
        return self.others(self._callers, sorted(live), self._past(), self._hints())

    def outsiders(self) -> list[PeerId]:
        """The peers that a round does not reach: evicted members and hints."""
        roster = {member.peer for member in self._chain.head.roster} if self._chain else set()
        return [peer for peer in self.others(self._past(), self._hints()) if peer not in roster]

    def some(self, peers: Sequence[PeerId]) -> list[PeerId]:
        """A few of these peers in their order, others at each call."""
        self._looks += 1
        drawn = records.drawn(b"%d %s" % (self._looks, self._me.encode()), peers)[:ASKED]
        return [peer for peer in peers if peer in drawn]

    def others(self, *groups: Iterable[PeerId]) -> list[PeerId]:
        """These peers, each once and in order, without this peer and distrusted ones."""
        every = dict.fromkeys(peer for group in groups for peer in group)
        return [peer for peer in every if peer != self._me and self.trusts(peer)][:MAX_CONTACTS]

    def _past(self) -> list[PeerId]:
        return [member.peer for member in self._chain.members(MAX_CONTACTS // 2)] if self._chain else []


class SyncContext:
    """Shared by a sync service and its parts. `snapshots` also allocate buffers for those that it fetches."""

    def __init__(
        self,
        host: Host,
        settings: Settings,
        snapshots: Snapshots,
        hints: Callable[[], Iterable[PeerId]],
        chain: Chain | None = None,
    ) -> None:
        self.host, self.settings, self.snapshots = host, settings, snapshots
        self.me, self.elements = Member(host.me, settings.incarnation), sum(settings.elements)
        self.peers = SyncPeers(host.me, host.members, chain, hints)
        self.accounting, self.sync_progress = RoundAccounting(), SyncProgress(loop_time)
        self.snapshot_bytes = 0  # fetched since `take_bytes`, bad and duplicate chunks included
        self.say: Callable[[str], None] = lambda line: None  # shows a line to the operator
        self._told: RecentDict[PeerId, bool] = RecentDict(MAX_CONTACTS)
        self._told_at = -math.inf

    def refuse(self, peer: PeerId, why: str) -> None:
        """Distrust a peer that has not proved what it shows, and tell the operator, once of each peer: the report that
        names it comes after the next round, and a newcomer that waits for a state has none.
        """
        self.peers.distrust(peer)
        if peer not in self._told and loop_time() >= self._told_at + TELL_SECONDS:
            self._told[peer], self._told_at = True, loop_time()
            self.say(
                f"the rounds of peer …{peer[-6:]} are refused ({why}): others are asked; if none has a state for this "
                "peer, start that one again with another --state-dir"
            )

    @asynccontextmanager
    async def open(self, peer: PeerId, method: str, deadline: Deadline) -> AsyncIterator[Stream]:
        """Open a stream to a peer. Its bytes are counted, and a peer that breaks a rule is reported."""
        async with self.host.transport.open(peer, method, deadline) as stream, self.accounting.counting(stream):
            yield stream
