"""Records of decided rounds. Each extends its parent, and its hash is the new lineage. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from protocols.base import BadPayload, Contribution, Head, Header, LinkFault, Member, PeerId
from protocols.wire import (
    MAX_ROSTER,
    PartDigest,
    digest,
    from_canonical_bytes,
    last,
    list_of,
    one,
    optional,
    peer_id,
    uint,
)
from protocols.wire import canonical_bytes as _body


class Kind(IntEnum):
    MEAN = 0
    SKIP = 1
    FORK = 2


@dataclass(frozen=True, slots=True)
class ClusterDigest:
    """The offer of a cluster, and the number of its members (`protocols.allreduce.clustered_plan`)."""

    digest: bytes = digest()
    size: int = uint(MAX_ROSTER)


@dataclass(frozen=True, slots=True)
class Record(Header):
    parent: bytes = digest()
    state_root: bytes = digest()  # of the outer state that the parent led to
    round: int = uint(1 << 40)
    kind: int = uint(2)
    plan: bytes = digest()  # the parts belong to it, and are in its order; none if nothing was averaged
    parts: tuple[PartDigest, ...] = list_of(one(PartDigest), MAX_ROSTER)
    roster: tuple[Member, ...] = list_of(one(Member), MAX_ROSTER)  # its votes count in the next round
    peers: tuple[PeerId, ...] = optional(peer_id(), MAX_ROSTER)  # bit i of a chunk's mask stands for `peers[i]`
    bounds: tuple[int, ...] = optional(uint(1 << 48), MAX_ROSTER + 1)  # part i is [bounds[i], bounds[i+1])
    complaints: tuple[LinkFault, ...] = optional(one(LinkFault), MAX_ROSTER)
    # of a clustered round: bit i of a chunk's mask stands for `clusters[i]`, which `peers[i]` leads
    clusters: tuple[ClusterDigest, ...] = last(list_of(one(ClusterDigest), MAX_ROSTER), ())

    @property
    def contributors(self) -> int:
        """How many peers the mean may hold."""
        return sum(cluster.size for cluster in self.clusters) or len(self.peers)

    @property
    def averaged(self) -> bool:
        """Whether this record changes the outer state: a MEAN, or a FORK that took one over."""
        return bool(self.parts)

    @property
    def idle(self) -> bool:
        """Whether nothing was trained for it: a FORK without a mean, or a SKIP without a plan (all members rested)."""
        return not self.parts and (self.kind == Kind.FORK or (self.kind == Kind.SKIP and self.plan == bytes(32)))

    def tiles(self, elements: int) -> bool:
        """Whether the parts cover a vector of this length, one after the other and without gaps."""
        bounds = self.bounds
        if len(bounds) != len(self.parts) + 1 or list(bounds) != sorted(bounds):
            return False
        return (bounds[0], bounds[-1]) == (0, elements)


def extend(head: Head, kind: Kind, roster: Iterable[Member], plan: bytes = bytes(32)) -> Record:
    """A record that extends a head without a change of state."""
    return Record(
        parent=head.key.lineage,
        state_root=head.state_root,
        round=head.key.round,
        kind=kind,
        plan=plan,
        parts=(),
        roster=tuple(sorted(roster)),
        complaints=head.complaints,
    )


def encode(record: Record) -> bytes:
    return _body(record)


def decode(data: bytes) -> Record:
    record: Record = from_canonical_bytes(Record, data)
    if encode(record) != data:
        raise BadPayload("a record that is not in canonical form")
    return record


def lineage(record: bytes) -> bytes:
    """Hash of an encoded record, which is the lineage that begins with it."""
    return hashlib.sha256(b"starling record" + record).digest()


def genesis(run: bytes, scope: str = "run") -> bytes:
    """The lineage that a scope of a run starts from. The scope "run", the only one without stages, is not hashed."""
    name = b"" if scope == "run" else scope.encode()
    return hashlib.sha256(b"starling genesis" + run + name).digest()


def coordinators(line: bytes, roster: Sequence[Member]) -> tuple[PeerId, ...]:
    """Coordinators of ballots 0, 1, …: the roster, ordered by hashes so that no member can choose the order."""
    return drawn(line, (member.peer for member in roster))


def coordinator(line: bytes, roster: Sequence[Member], ballot: int) -> PeerId:
    return coordinators(line, roster)[ballot % len(roster)]


def drawn(seed: bytes, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """These peers in an order that follows from the seed. Peers with seeds of their own do not all ask the same one."""
    return tuple(sorted(peers, key=lambda peer: hashlib.sha256(seed + peer.encode()).digest()))


def contributions(peers: Sequence[PeerId], parts: Sequence[PartDigest]) -> dict[PeerId, Contribution]:
    """How many chunks of each peer the mean holds. Bit i of a chunk's mask stands for `peers[i]`."""
    runs = [run for part in parts for run in part.runs]
    chunks = sum(run.count for run in runs)
    counted = [sum(run.count for run in runs if run.mask >> bit & 1) for bit in range(len(peers))]
    return {peer: Contribution(count, chunks) for peer, count in zip(peers, counted, strict=True)}
