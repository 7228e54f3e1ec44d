"""Messages between peers outside of rounds: heads, decided rounds, and adverts of states."""

# ruff: noqa: RUF009 - a field's bound is its default

from __future__ import annotations

from dataclasses import dataclass

from protocols.base import Header, Member, RoundKey
from protocols.wire import blob, digest, flag, list_of, one, register, uint

SYNC = "starling/sync/1"

MAX_LOCATOR = 64
MAX_TRAIL = 256  # limit of certificates in one answer
MAX_SNAPSHOTS = 6


@dataclass(frozen=True, slots=True)
class SnapshotRef:
    """A snapshot that a peer serves: the state at this lineage, before this round."""

    lineage: bytes = digest()
    round: int = uint(1 << 40)


@dataclass(frozen=True, slots=True)
class HeadAnnouncement(Header):
    """The sender's head and its snapshots; answered with the same message."""

    key: RoundKey = one(RoundKey)  # of the sender's next round
    sender: Member = one(Member)
    # newest first; then those that are only kept because a joiner still downloads them
    kept: tuple[SnapshotRef, ...] = list_of(one(SnapshotRef), MAX_SNAPSHOTS)


@dataclass(frozen=True, slots=True)
class SignedStateRef:
    """A state that the sender serves: its root, the round that follows it, and the sender's signature of both."""

    root: bytes = digest()
    round: int = uint(1 << 40)
    signature: bytes = blob(128)


@dataclass(frozen=True, slots=True)
class StateAdvert(Header):
    """The sender's round and the states that it serves, newest first; answered with the same message."""

    key: RoundKey = one(RoundKey)  # of the sender's next round
    sender: Member = one(Member)
    states: tuple[SignedStateRef, ...] = list_of(one(SignedStateRef), MAX_SNAPSHOTS)
    whole: bool = flag()  # whether it has a state; if not, it is looking for one


@dataclass(frozen=True, slots=True)
class CertificatesRequest(Header):
    """Asks for the certificates after the first of these lineages that the receiver's chain holds."""

    locator: tuple[bytes, ...] = list_of(digest(), MAX_LOCATOR)


@dataclass(frozen=True, slots=True)
class Certificates(Header):
    """`count` certificates follow, each in its own header (`protocols.consensus.messages.Certificate`)."""

    ancestor: bytes = digest()  # the lineage that they follow; zeros if the sender has none of those in the locator
    count: int = uint(MAX_TRAIL)
    more: bool = flag()  # ask again from the last one


register(32, (HeadAnnouncement, CertificatesRequest, Certificates))
register(160, (StateAdvert,))
