"""Snapshots: immutable copies of the outer state, in chunks that can be verified one by one.

The state root is a hash over the hashes of 1 MiB chunks (`vectors.views.root`), whose list is the index. A joiner
verifies the index against the root in a certificate, then each chunk against the index.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import torch

from protocols.aio import loop_time
from protocols.base import CHUNK_BYTES, BadPayload, Buffer, Compute, Deadline, Vector
from protocols.blobs.serving import Blob
from protocols.history.chain import Chain, state_root
from protocols.registry import CHUNK_ELEMENTS
from protocols.sync.requests import MAX_SNAPSHOTS, SnapshotRef
from protocols.vectors.views import chunk_count, chunk_digests, chunk_range, root_of

SNAPSHOT_ROUNDS = 4
"""Rounds between snapshots.

A snapshot can be served once the next round is decided. It is useful while the means since then are available, so parts
must be kept for at least twice as many rounds.
"""
KEEP_SNAPSHOTS = 2
MAX_PAUSES = 4
"""See `Blob.pauses`. Joiners make progress even if data phases never end."""
LENT = 2  # limit of older snapshots kept for joiners: those that were read most recently
LEND_SECONDS = 300.0
"""How long an older snapshot is kept after it was read: enough for a joiner that was cut off, or restarts."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotIndex:
    """The digests of all chunks of an outer state: `elements` parameters, then as many elements of velocity."""

    elements: int
    digests: tuple[bytes, ...]

    @classmethod
    def of(cls, parameters: Vector, velocity: Vector) -> SnapshotIndex:
        return cls(len(parameters), chunk_digests(parameters) + chunk_digests(velocity))

    def after(self, parameters: Vector, velocity: Vector, part: slice) -> SnapshotIndex:
        """The index after a change of this part of both vectors: only its chunks are read."""
        half, first, last = len(self.digests) // 2, part.start // CHUNK_ELEMENTS, -(-part.stop // CHUNK_ELEMENTS)
        chunks, digests = slice(first * CHUNK_ELEMENTS, last * CHUNK_ELEMENTS), list(self.digests)
        digests[first:last] = chunk_digests(parameters[chunks])
        digests[half + first : half + last] = chunk_digests(velocity[chunks])
        return SnapshotIndex(self.elements, tuple(digests))

    @classmethod
    def unpack(cls, elements: int, data: bytes) -> SnapshotIndex:
        """Read an index from `packed_bytes(elements)` bytes; raises `BadPayload` if there are not so many."""
        if len(data) != cls.packed_bytes(elements):
            raise BadPayload(f"an index of {len(data)} bytes for {elements} elements")
        return cls(elements, tuple(data[at : at + 32] for at in range(0, len(data), 32)))

    @staticmethod
    def packed_bytes(elements: int) -> int:
        return 64 * chunk_count(elements)

    def pack(self) -> bytes:
        return b"".join(self.digests)

    @property
    def parameters_root(self) -> bytes:
        return root_of([(self.elements, self.digests[: len(self.digests) // 2])])

    @property
    def velocity_root(self) -> bytes:
        return root_of([(self.elements, self.digests[len(self.digests) // 2 :])])

    def state_root(self, round_number: int) -> bytes:
        """The root of the outer state before this round."""
        return state_root(self.parameters_root, self.velocity_root, round_number)

    def size(self, chunk: int) -> int:
        return chunk_size(self.elements, chunk)


class SnapshotBuffer(Protocol):
    """A buffer of fixed size for the bytes of a snapshot. Its methods raise OSError if the storage fails."""

    @property
    def fresh(self) -> bool:
        """Whether it is new. If not, it may hold chunks from an earlier download of the same state."""

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into`."""

    def write(self, offset: int, data: Buffer) -> None:
        """Write all of `data` at `offset`."""


MakeBuffer: TypeAlias = Callable[[bytes, int, int], SnapshotBuffer]
"""Allocates a buffer for a snapshot: (lineage, round, bytes) -> buffer. Raises OSError if there is no space."""


class MemoryBuffer:
    """A buffer in memory. It takes no memory until it is written, and is freed with its last reference."""

    fresh = True

    def __init__(self, size: int) -> None:
        self._memory = memoryview(mmap.mmap(-1, max(1, size)))

    def read(self, offset: int, into: memoryview) -> None:
        into[:] = self._memory[offset : offset + len(into)]

    def write(self, offset: int, data: Buffer) -> None:
        self._memory[offset : offset + len(data)] = data


class Snapshot:
    """The outer state at a lineage: filled once, then never changed.

    Its buffer holds the parameters, then the velocity, as little-endian float32. Methods that use it may wait for the
    disk, and raise OSError.
    """

    def __init__(
        self, lineage: bytes, round_number: int, index: SnapshotIndex, buffer: SnapshotBuffer | None = None
    ) -> None:
        """By default it is in memory; else in a buffer of `buffer_bytes(index.elements)`."""
        self.lineage, self.round, self.index = lineage, round_number, index
        self.buffer = buffer or MemoryBuffer(buffer_bytes(index.elements))

    @property
    def fresh(self) -> bool:
        """Whether it starts empty. If not, it may hold chunks, right or wrong, from an earlier download."""
        return self.buffer.fresh

    def fill(self, parameters: Vector, velocity: Vector) -> None:
        """Copy these vectors, float32 (n), into the snapshot. Their index must be `index`."""
        for chunk, piece in self._pieces(parameters, velocity):
            data, held = _scratch(len(piece))
            held.copy_(piece)
            self.put(chunk, data)

    def copy(self, parameters: Vector, velocity: Vector) -> None:
        """Copy the state into these vectors, float32 (n)."""
        for chunk, piece in self._pieces(parameters, velocity):
            data, held = _scratch(len(piece))
            self.buffer.read(self._offset(chunk), data)
            piece.copy_(held)

    def chunk(self, chunk: int) -> bytearray:
        """The bytes of a chunk; raises `BadPayload` if it does not exist."""
        self._require(chunk)
        data = bytearray(self.index.size(chunk))
        self.read_chunk(chunk, memoryview(data))
        return data

    def read_chunk(self, chunk: int, into: memoryview) -> memoryview:
        """Read a chunk into the front of `into`, which holds `CHUNK_BYTES`, and return that part of it."""
        self._require(chunk)
        data = into[: self.index.size(chunk)]
        self.buffer.read(self._offset(chunk), data)
        return data

    def _require(self, chunk: int) -> None:
        if not 0 <= chunk < len(self.index.digests):
            raise BadPayload(f"chunk {chunk} of a snapshot of {len(self.index.digests)}")

    def put(self, chunk: int, data: Buffer) -> None:
        self.buffer.write(self._offset(chunk), data)

    def _offset(self, chunk: int) -> int:
        half = len(self.index.digests) // 2
        return 4 * (chunk // half * self.index.elements + chunk % half * CHUNK_ELEMENTS)

    def _pieces(self, *vectors: Vector) -> Iterator[tuple[int, Vector]]:
        half = len(self.index.digests) // 2
        for number, vector in enumerate(vectors):
            for index in range(half):
                low, high = chunk_range(0, len(vector), index)
                yield number * half + index, vector[low:high]


def buffer_bytes(elements: int) -> int:
    """Size of the outer state with this many parameters."""
    return 8 * elements


def chunk_size(elements: int, chunk: int) -> int:
    low, high = chunk_range(0, elements, chunk % chunk_count(elements))
    return 4 * (high - low)


def _scratch(elements: int) -> tuple[memoryview, Vector]:
    """Memory for this many float32, as bytes and as a vector."""
    data = bytearray(4 * elements)
    return memoryview(data), torch.frombuffer(data, dtype=torch.float32)


@dataclass(slots=True)
class _Lease:
    snapshot: Snapshot
    until: Deadline


class Snapshots:
    """The latest snapshots, which this peer keeps and serves, and older ones that a joiner is still downloading."""

    def __init__(
        self,
        every_rounds: int = SNAPSHOT_ROUNDS,
        keep: int = KEEP_SNAPSHOTS,
        make_buffer: MakeBuffer = lambda lineage, round_number, size: MemoryBuffer(size),
        has_begun: Callable[[bytes, int], bool] = lambda lineage, round_number: False,
    ) -> None:
        """A snapshot is taken before every round whose number is a multiple of `every_rounds`.

        `has_begun` says whether an earlier process left a partial download of the state at a lineage, before a round.
        """
        self.every_rounds, self._keep, self._make_buffer, self.has_begun = every_rounds, keep, make_buffer, has_begun
        # whether this peer has the means since a lineage, without which a snapshot of its state is useless
        self.is_replayable: Callable[[bytes], bool] = lambda lineage: True
        self._held: list[Snapshot] = []
        self._leases: dict[bytes, _Lease] = {}

    def new(self, lineage: bytes, round_number: int, index: SnapshotIndex) -> Snapshot:
        """A snapshot to fill, which is not empty if an earlier download of it was interrupted. Raises OSError."""
        buffer = self._make_buffer(lineage, round_number, buffer_bytes(index.elements))
        return Snapshot(lineage, round_number, index, buffer)

    def put(self, snapshot: Snapshot) -> None:
        """Add a filled snapshot. Above the limit, those of the lowest rounds are dropped."""
        held = [each for each in self._held if each.lineage != snapshot.lineage]
        self._held = sorted([*held, snapshot], key=lambda each: -each.round)[: self._keep]

    def get(self, lineage: bytes) -> Snapshot | None:
        return next((each for each in self._held if each.lineage == lineage), None)

    def drop(self, snapshot: Snapshot) -> None:
        self._held = [each for each in self._held if each is not snapshot]

    def prune(self, chain: Chain) -> None:
        """Drop the snapshots of rounds that the chain does not contain, after it has switched to another branch."""
        self._held = [each for each in self._held if each.lineage in chain]

    def held(self) -> tuple[Snapshot, ...]:
        """The snapshots, newest first, without those that are only lent."""
        return tuple(self._held)

    def served(self) -> tuple[SnapshotRef, ...]:
        """The snapshots to announce to other peers: those held, and older ones that joiners still use."""
        every = dict.fromkeys([*self._held, *self._lent()])
        return tuple(SnapshotRef(each.lineage, each.round) for each in every)[:MAX_SNAPSHOTS]

    def tidy(self) -> None:
        """Release snapshots that no joiner downloads any more. To be called from time to time."""
        self._lent()

    def _lent(self) -> list[Snapshot]:
        now, held = loop_time(), {each.lineage for each in self._held}
        last = sorted(self._leases.items(), key=lambda each: -each[1].until)
        leases = [(key, lease) for key, lease in last if lease.until > now]
        lent = [(key, lease) for key, lease in leases if key not in held and self.is_replayable(key)][:LENT]
        self._leases = dict([*((key, lease) for key, lease in leases if key in held), *lent])
        return [lease.snapshot for _, lease in lent]

    def blob(self, lineage: bytes, compute: Compute) -> Blob | None:
        """The snapshot at a lineage as a blob to serve, which prolongs its lease with each chunk."""
        lease = self._leases.get(lineage)
        snapshot = self.get(lineage) or (lease.snapshot if lease else None)
        if snapshot is None:
            return None
        scratch = memoryview(bytearray(CHUNK_BYTES))

        async def read(chunk: int) -> memoryview | None:
            until = loop_time() + LEND_SECONDS
            self._leases.setdefault(lineage, _Lease(snapshot, until)).until = until
            try:
                return await compute.run(partial(snapshot.read_chunk, chunk, scratch), CHUNK_BYTES)
            except OSError as error:
                log.warning("the snapshot before round %d is lost: %s", snapshot.round + 1, error.strerror or error)
                self.drop(snapshot)
                self._leases.pop(lineage, None)
                return None

        return Blob(snapshot.index.pack(), read, pauses=MAX_PAUSES, large=True)
