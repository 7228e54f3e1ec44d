"""The peers that a peer watches now, those that it greets without watching them, and whom it introduces. No I/O.

The rule is that of `node.membership.watching`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence

from node.membership.hello import MAX_INTRODUCED
from node.membership.peer_record import PeerRecord, PeerTable
from node.membership.watching import MAX_WATCHED, Group, Known, Lot, Role, choose
from protocols.base import PeerId

log = logging.getLogger(__name__)

CHOOSE_SECONDS = 1.0  # between two choices of the peers to watch, if this peer's role stays the same


class WatchChoice:
    """Of the peers in a table. Contains each that is watched: all of them, until they are too many."""

    def __init__(
        self,
        contacts: PeerTable,
        lot: Lot,
        wanted: Callable[[], Iterable[PeerId]],
        role: Callable[[Sequence[Known]], Role] | None = None,
    ) -> None:
        """`role`: as for `Membership`."""
        self._contacts, self._lot, self._wanted = contacts, lot, wanted
        self._role = role or (lambda known: Role((Group(tuple(wanted()), MAX_WATCHED),)))
        self._peers: frozenset[PeerId] | None = None  # None: all
        self._named, self._chosen_at = frozenset[PeerId](), -math.inf
        self._greetings = 0

    def __contains__(self, peer: PeerId) -> bool:
        return self._peers is None or peer in self._peers

    @property
    def is_all(self) -> bool:
        return self._peers is None

    def needed(self) -> set[PeerId]:
        """Peers whose heartbeats this one answers, however many others watch it."""
        return {*self._wanted(), *(self._peers or ())}

    def renew(self, now: float) -> None:
        named = frozenset(self._wanted())
        if named == self._named and now < self._chosen_at + CHOOSE_SECONDS:
            return
        known = [
            Known(each.peer, each.stage, each.placement.member, bool(each.failures) or now < each.crowded_until)
            for each in self._contacts
            if each.hello or each.peer in named
        ]
        self._named, self._chosen_at, before = named, now, self._peers
        self._peers = choose(self._role(known), known, self._lot, before is not None)
        if (before is None) != (self._peers is None):
            count = "all others" if self._peers is None else f"{len(self._peers)} of them"
            log.info("%d peers are known: this one watches %s", len(known), count)

    def next_to_greet(self) -> PeerRecord | None:
        """Of the peers that are known and neither watched nor live, the one that was not tried for longest. First those
        that this one wants and has never met, such as voters: in runs with clusters, they give places to those that
        they have met.
        """
        resting = [each for each in self._contacts if not (each.live or each.peer in self or each.task)]
        wanted = set(self._wanted())

        def order(each: PeerRecord) -> tuple[bool, float, bytes]:
            return bool(each.hello) or each.failures > 0 or each.peer not in wanted, each.tried_at, self._lot(each.peer)

        return min(resting, key=order, default=None)

    def introduced(self, to: PeerId) -> list[PeerRecord]:
        """Live peers to name in a greeting. In a large run these are others each time, half of them wanted ones."""
        others = [each for each in self._contacts if each.live and each.peer != to]
        if self._peers is not None:
            self._greetings += 1
            lot, named = Lot(b"%d" % self._greetings), set(self._wanted())
            others.sort(key=lambda each: lot(each.peer))
            first = [each for each in others if each.peer in named][: MAX_INTRODUCED // 2]
            others = [*first, *(each for each in others if each not in first)]
        return others[:MAX_INTRODUCED]
