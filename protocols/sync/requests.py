"""Messages between peers outside of rounds: heads, decided rounds, and states."""

# ruff: noqa: RUF009 - a field's bound is its default

from __future__ import annotations

from dataclasses import dataclass

from protocols.base import Header, Member, RoundKey
from protocols.wire import blob, digest, flag, list_of, one, real, register, uint

SYNC = "starling/sync/1"

MAX_LOCATOR = 64
MAX_TRAIL = 256
"""Limit of certificates in one answer."""
MAX_SNAPSHOTS = 6
MAX_BUSY_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class SnapshotRef:
    """A snapshot that a peer serves: the state at this lineage, before this round."""

    lineage: bytes = digest()
    round: int = uint(1 << 40)


@dataclass(frozen=True, slots=True)
class HeadAnnouncement(Header):
    """The sender's head and its snapshots; answered with the same message.

    Attributes:
        key: of the sender's next round.
        sender: the sending member.
        kept: snapshots, newest first; then those that are only kept because a joiner still downloads them.
    """

    key: RoundKey = one(RoundKey)
    sender: Member = one(Member)
    kept: tuple[SnapshotRef, ...] = list_of(one(SnapshotRef), MAX_SNAPSHOTS)


@dataclass(frozen=True, slots=True)
class SignedStateRef:
    """A state that the sender serves: its root, the round that follows it, and the sender's signature of both."""

    root: bytes = digest()
    round: int = uint(1 << 40)
    signature: bytes = blob(128)


@dataclass(frozen=True, slots=True)
class StateAdvert(Header):
    """The sender's round and the states that it serves; answered with the same message.

    Attributes:
        key: of the sender's next round.
        sender: the sending member.
        states: those that it serves, newest first.
        whole: whether it has a state; if not, it is looking for one.
    """

    key: RoundKey = one(RoundKey)
    sender: Member = one(Member)
    states: tuple[SignedStateRef, ...] = list_of(one(SignedStateRef), MAX_SNAPSHOTS)
    whole: bool = flag()


@dataclass(frozen=True, slots=True)
class CertificatesRequest(Header):
    """Asks for the certificates after the first of these lineages that the receiver's chain holds."""

    locator: tuple[bytes, ...] = list_of(digest(), MAX_LOCATOR)


@dataclass(frozen=True, slots=True)
class Certificates(Header):
    """`count` certificates follow, each in its own header (`protocols.consensus.messages.Certificate`).

    Attributes:
        ancestor: the lineage that they follow; zeros if the sender has none of those in the locator.
        more: whether there are more; ask again from the last one.
    """

    ancestor: bytes = digest()
    count: int = uint(MAX_TRAIL)
    more: bool = flag()


@dataclass(frozen=True, slots=True)
class WantSnapshot(Header):
    """Asks for the snapshot of the state that a lineage names."""

    lineage: bytes = digest()


@dataclass(frozen=True, slots=True)
class Busy(Header):
    """The sender serves other peers: try again after this many seconds. In place of a chunk: the chunk comes later."""

    seconds: float = real(0, MAX_BUSY_SECONDS)


@dataclass(frozen=True, slots=True)
class SnapshotIndexHeader(Header):
    """Answers `WantSnapshot`. Digests of the chunks follow, 32 bytes each: of the parameters, then of the velocity."""

    elements: int = uint(1 << 48)


@dataclass(frozen=True, slots=True)
class WantChunk(Header):
    """Asks for one chunk of the snapshot of this stream. The answer is a `wire.Chunk`, perhaps after some `Busy`."""

    index: int = uint(1 << 32)


MESSAGES: tuple[type[Header], ...] = (
    HeadAnnouncement,
    CertificatesRequest,
    Certificates,
    WantSnapshot,
    Busy,
    SnapshotIndexHeader,
    WantChunk,
)
register(32, MESSAGES)
register(160, (StateAdvert,))
