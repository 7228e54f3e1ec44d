"""What peers say to each other outside of rounds: where they stand, what was decided, what state they can hand out."""

# ruff: noqa: RUF009 - a field's bound is its default

from __future__ import annotations

from dataclasses import dataclass

from protocols.base import Header, Member, RoundKey
from protocols.wire import blob, digest, flag, many, one, real, register, uint

SYNC = "starling/sync/1"

MAX_LOCATOR = 64
MAX_TRAIL = 256
"""Certificates in one answer."""
MAX_SNAPSHOTS = 6
MAX_BUSY_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class SnapshotRef:
    """A snapshot that a peer can hand out: of the state that this lineage names, before that round."""

    lineage: bytes = digest()
    round: int = uint(1 << 40)


@dataclass(frozen=True, slots=True)
class HeadAnnouncement(Header):
    """Where its sender stands; answered with the same.

    Attributes:
        key: of the sender's next round.
        sender: in this life.
        kept: snapshots, the newest first; then those that others are still taking.
    """

    key: RoundKey = one(RoundKey)
    sender: Member = one(Member)
    kept: tuple[SnapshotRef, ...] = many(one(SnapshotRef), MAX_SNAPSHOTS)


@dataclass(frozen=True, slots=True)
class SignedStateRef:
    """A state that its peer hands out: its root, the round that it comes before, and the peer's word for that."""

    root: bytes = digest()
    round: int = uint(1 << 40)
    signature: bytes = blob(128)


@dataclass(frozen=True, slots=True)
class StateAdvert(Header):
    """Where its sender stands; answered with the same.

    Attributes:
        key: of the sender's next round.
        sender: in this life.
        states: that it hands out, the newest first.
        whole: whether it has a state; else it looks for one itself.
    """

    key: RoundKey = one(RoundKey)
    sender: Member = one(Member)
    states: tuple[SignedStateRef, ...] = many(one(SignedStateRef), MAX_SNAPSHOTS)
    whole: bool = flag()


@dataclass(frozen=True, slots=True)
class CertificatesRequest(Header):
    """Asks for the certificates after the first of these lineages that the receiver's chain holds."""

    locator: tuple[bytes, ...] = many(digest(), MAX_LOCATOR)


@dataclass(frozen=True, slots=True)
class Certificates(Header):
    """`count` certificates follow, each a header of its own (`protocols.consensus.messages.Certificate`).

    Attributes:
        ancestor: the lineage that they follow; zeros if none of the locator's is held.
        more: there are more of them: ask again from the last.
    """

    ancestor: bytes = digest()
    count: int = uint(MAX_TRAIL)
    more: bool = flag()


@dataclass(frozen=True, slots=True)
class WantSnapshot(Header):
    """Asks for the snapshot of the state at a record hash: answered with `Busy`, `Availability` or
    `SnapshotIndexHeader`."""

    lineage: bytes = digest()


@dataclass(frozen=True, slots=True)
class Busy(Header):
    """Others are being served: come again in so many seconds. In the place of a chunk: it comes, but a little later."""

    seconds: float = real(0, MAX_BUSY_SECONDS)


@dataclass(frozen=True, slots=True)
class SnapshotIndexHeader(Header):
    """The digests of the snapshot's chunks follow, 32 bytes each: the parameters' chunks, then the velocity's."""

    elements: int = uint(1 << 48)


@dataclass(frozen=True, slots=True)
class WantChunk(Header):
    """Asks for one chunk of the snapshot whose index came on this stream: a `wire.Chunk`, perhaps after some `Busy`."""

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
