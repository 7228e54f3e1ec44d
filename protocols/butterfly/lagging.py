"""Which peers a round waits for, because they still fetch what it begins from.

On a slow line a peer may need longer for the mean of a round than the others need for the next one. It would never be
in a round with them. So a round is not called while such a peer fetches from this one: a state or a mean from the only
member of a roster, whose rounds no data phase slows down; from other members, the mean of the last round. Members that
wait train on. They wait only while it fetches, and for a limited time.
"""

from __future__ import annotations

from collections.abc import Collection

from protocols.aio import loop_time
from protocols.base import SLOWEST_BYTES_PER_SECOND, Deadline, PeerId
from protocols.blobs.serving import BlobServer
from protocols.peers.estimates import RecentDict

WAIT_SECONDS = 60.0  # longest time that one round waits
WAIT_SHARE = 0.5  # of the time that the round may last
PAUSE_SECONDS = 10.0  # a peer that has fetched nothing for so long has stalled, or has what it needs
REFILL = 0.1
"""A peer that was waited for gets back this share of the time since, so that it cannot slow the run down for good."""
MAX_PEERS = 64


class LaggingPeers:
    """Kept from round to round. `blobs` serves what others fetch."""

    def __init__(self, blobs: BlobServer, elements: int) -> None:
        """All rounds together wait for a peer as long as a state of so many elements may take, and for one mean."""
        self._blobs = blobs
        self._most_seconds = WAIT_SECONDS + 8 * elements / SLOWEST_BYTES_PER_SECOND
        self._spent: RecentDict[PeerId, float] = RecentDict(MAX_PEERS)
        self._since: dict[PeerId, float] = {}  # when this round began to wait for a peer
        self._until: Deadline = 0.0
        self._began = 0.0
        self._names: Collection[bytes] | None = None

    def begin(self, deadline: Deadline, names: Collection[bytes] | None) -> None:
        """Begin a round, until `deadline` at most, which waits for peers that fetch one of these blobs; None: any."""
        now = loop_time()
        for peer in [*self._spent]:
            if peer not in self._since:
                self._spent[peer] -= REFILL * (now - self._began)
        for peer, since in self._since.items():
            self._spent[peer] = self._spent.get(peer, 0.0) + now - since
        for peer in [peer for peer, spent in self._spent.items() if spent <= 0]:
            del self._spent[peer]
        self._since, self._began, self._names = {}, now, names
        self._until = now + min(WAIT_SECONDS, WAIT_SHARE * (deadline - now))

    def among(self, peers: Collection[PeerId]) -> tuple[PeerId, ...]:
        """Those of these peers to wait for now."""
        now = loop_time()
        return tuple(peer for peer in peers if now < self._until and self._waits_for(peer, now))

    def _waits_for(self, peer: PeerId, now: float) -> bool:
        name, idle_seconds = self._blobs.last_served(peer)
        if idle_seconds >= PAUSE_SECONDS or (self._names is not None and name not in self._names):
            return False
        waited = now - self._since.setdefault(peer, now)
        return self._spent.get(peer, 0.0) + waited < self._most_seconds
