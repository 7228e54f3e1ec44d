"""Who sees whom in a simulated run: all, or beyond `MAX_WATCHED` peers those that one of the two would watch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from node.membership.watching import Known, Lot, choose, roster_role
from protocols.base import PeerId
from tests.sim.contact import Contacts


class Neighbours:
    """The rule of real peers (`node.membership.watching`), as if each knew all others. Voters stay neighbours of the
    voters, also when they have left the roster.
    """

    def __init__(self, peers: Sequence[PeerId], voters: Iterable[PeerId]) -> None:
        self._peers = tuple(peers)
        self._known = [Known(peer) for peer in peers]
        self._voters: set[PeerId] = set()
        self._of: dict[PeerId, dict[PeerId, None]] | None = None  # in an order that follows from the ids
        if choose(roster_role("", ()), self._known, Lot(b"")) is not None:
            self._of = {peer: {} for peer in peers}
            self._voters.update(voters)
            for peer in peers:
                self._watch(peer)

    def limit(self, contacts: Contacts) -> None:
        """Let peers see their neighbours only. In a large run they greet the others all the same."""
        contacts.near, contacts.greets_others = self.of, self._of is not None

    def of(self, peer: PeerId) -> Iterable[PeerId]:
        return self._peers if self._of is None else self._of[peer]

    def elect(self, roster: Iterable[PeerId]) -> list[PeerId]:
        """Note a roster; returns the peers that have more neighbours now."""
        new = [peer for peer in roster if self._of is not None and peer not in self._voters]
        self._voters.update(new)
        for peer in new:
            self._watch(peer)
        return new

    def tie(self, peer: PeerId, others: Iterable[PeerId]) -> list[PeerId]:
        """Note peers that this one has to see besides (`Butterfly.ties`); returns those that it did not see before."""
        new = [other for other in others if self._of is not None and other not in self._of[peer]]
        for other in new:
            assert self._of is not None
            self._of[peer][other] = self._of[other][peer] = None
        return new

    def _watch(self, peer: PeerId) -> None:
        assert self._of is not None
        for other in sorted(choose(roster_role(peer, self._voters), self._known, Lot(peer.encode())) or ()):
            self._of[peer][other] = self._of[other][peer] = None
