"""The peers that this peer knows: a table of bounded size, however many peers others introduce."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from node.membership.addresses import sound
from node.membership.peer_record import PeerRecord
from protocols.base import PeerId

MAX_CONTACTS = 256
MAX_OUTSIDERS = 192
"""Live peers that are not wanted. The remaining places are for the roster and for peers not yet contacted."""
MAX_TOLD_OF = 32
"""Peers introduced by one other peer that have never answered."""
MAX_PEER_CHARACTERS = 64


class PeerTable:
    def __init__(
        self,
        me: PeerId,
        wanted: Callable[[], Iterable[PeerId]],
        on_forget: Callable[[PeerRecord], None] = lambda contact: None,
    ) -> None:
        self._me, self._wanted, self._on_forget = me, wanted, on_forget
        self._contacts: dict[PeerId, PeerRecord] = {}

    def __iter__(self) -> Iterator[PeerRecord]:
        return iter(tuple(self._contacts.values()))

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._contacts

    def get(self, peer: PeerId) -> PeerRecord | None:
        return self._contacts.get(peer)

    def wants(self, peer: PeerId) -> bool:
        return peer in set(self._wanted())

    def add(self, peer: PeerId, addresses: Sequence[str] = (), told_by: PeerId = "") -> PeerRecord | None:
        """Add addresses to a peer's record, and create the record if needed; None if there is no place for it."""
        if peer == self._me or len(peer) > MAX_PEER_CHARACTERS or not peer.isascii():
            return None
        contact = self._contacts.get(peer)
        if contact is None:
            if not self._has_room(peer, told_by):
                return None
            contact = self._contacts[peer] = PeerRecord(peer, told_by=told_by)
        contact.addresses = sound((*addresses, *contact.addresses))
        return contact

    def forget(self, contact: PeerRecord) -> None:
        if self._contacts.pop(contact.peer, None):
            self._on_forget(contact)

    def _has_room(self, peer: PeerId, told_by: PeerId) -> bool:
        wanted = set(self._wanted())
        outsiders = [each for each in self if each.peer not in wanted]
        if told_by and sum(each.told_by == told_by and each.hello is None for each in outsiders) >= MAX_TOLD_OF:
            return False
        if peer not in wanted and sum(each.live for each in outsiders) >= MAX_OUTSIDERS:
            return False
        if len(self._contacts) < MAX_CONTACTS:
            return True
        hopeless = [each for each in outsiders if not each.live] or (outsiders if peer in wanted else [])
        if hopeless:
            self.forget(max(hopeless, key=lambda each: each.failures))
        return bool(hopeless)
