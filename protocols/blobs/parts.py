"""Reduced parts by digest: those that this peer keeps and serves to peers that missed them, and their download."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

from protocols import wire
from protocols.aio import Gate
from protocols.allreduce.parts import ChunkPool, ReducedPart, chunk_digest, part_digest
from protocols.base import BadPayload, Buffer, Compute, Host, PeerError, PeerId
from protocols.blobs.download import BlobDownload
from protocols.blobs.serving import DIGEST_BYTES, Blob, BlobServer
from protocols.streams.chunks import PartLayout
from protocols.streams.endpoint import RoundAccounting

log = logging.getLogger(__name__)

T = TypeVar("T")

PAST_PAUSES = 1  # of a past round's chunks, as a data phase begins: their requester has a deadline
STORE_ROUNDS = 64
PARTS_AT_ONCE = 8  # parts of a round that are fetched concurrently: each takes three round trips
LEAST_ROUNDS = 16
"""Rounds that are kept however large they are. A state takes eight bytes an element, a mean about one. So a peer that
can follow the rounds at all fetches a snapshot in less than eight rounds; it was at most five rounds old at the start.
"""
LIMIT_BYTES = 4 << 30
GIVE_WAY_SECONDS = 10.0
"""Longest time that each piece waits for a data phase before it is written. Longer, and parts fill the memory."""


class DiskBuffer(Protocol):
    """Disk space of fixed size. Its calls block, and raise OSError if the file fails."""

    def read(self, offset: int, into: memoryview) -> None: ...

    def write(self, offset: int, data: Buffer) -> None: ...


class Stored(PartLayout):
    """A part in the store. Its bytes can be read as long as this object exists, even after its round was dropped."""

    def __init__(self, part: ReducedPart, buffer: DiskBuffer, offset: int) -> None:
        super().__init__(part.codec, part.low, part.high, part.chunk_elements)
        self.masks, self.clusters, self.members = part.masks, part.clusters, part.members
        self.digests, self.result, self.done = part.digests, part.result, part.done
        self._pool, self._buffer, self._offset = part.pool, buffer, offset

    def chunk(self, index: int) -> bytearray:
        """Read the encoded bytes of a chunk. Blocks until the disk answers. Raises OSError."""
        data = bytearray(self.size(index))
        self._read(index, memoryview(data))
        return data

    def _read(self, index: int, into: memoryview) -> None:
        self._buffer.read(self._offset + self.place(index), into)

    def load(self) -> ReducedPart:
        """Read the whole part into memory. Blocks and raises as `chunk` does."""
        held = ReducedPart(self.codec, self.low, self.high, self.chunk_elements, self._pool)
        for index in range(self.chunks):
            self._read(index, held.chunk(index))
        held.masks, held.clusters, held.members = self.masks, self.clusters, self.members
        held.digests, held.result, held.done = self.digests, self.result, self.done
        return held


@dataclass(slots=True)
class _Round:
    buffer: DiskBuffer
    size_bytes: int
    parts: dict[bytes, Stored] = field(default_factory=dict)
    # chunks that are not written yet: part, index of the chunk, offset in the buffer
    pieces: deque[tuple[ReducedPart, int, int]] = field(default_factory=deque)


class PartStore:
    """Parts on disk by the lineage that their round extends, and by digest. The oldest rounds are dropped first.

    It is for peers whose snapshot takes longer than parts stay in memory. If the disk fails, the round is not kept,
    which harms only peers that would have asked for it.
    """

    def __init__(
        self,
        make_buffer: Callable[[int], DiskBuffer],
        compute: Compute,
        gate: Gate,
        limit_bytes: int = LIMIT_BYTES,
        most_rounds: int = STORE_ROUNDS,
        least_rounds: int = LEAST_ROUNDS,
    ) -> None:
        """`make_buffer` allocates a number of bytes, or raises OSError. While `gate` is closed, little is written."""
        self._make_buffer, self._compute, self._gate = make_buffer, compute, gate
        self._limit_bytes, self._most, self._least = limit_bytes, most_rounds, least_rounds
        self._rounds: dict[bytes, _Round] = {}
        self._begun: dict[bytes, _Round] = {}  # at most one, which is being written or continues at the next `put`
        self._failing = False

    def __contains__(self, lineage: bytes) -> bool:
        return lineage in self._rounds

    @property
    def rounds(self) -> int:
        return len(self._rounds)

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self._rounds.values())

    def get(self, digest: bytes) -> Stored | None:
        return next((each.parts[digest] for each in self._rounds.values() if digest in each.parts), None)

    async def read(self, part: Stored, index: int) -> Buffer | None:
        """Read a chunk of a stored part. If its file fails, drop the round and return None."""
        return await self._on_disk(part, partial(part.chunk, index), part.size(index))

    async def load(self, part: Stored) -> ReducedPart | None:
        return await self._on_disk(part, part.load, part.size_bytes)

    async def put(self, lineage: bytes, parts: Sequence[ReducedPart]) -> bool:
        """Write a round's sealed parts, or continue a write that was cancelled. False if the disk fails."""
        try:
            if lineage not in self._begun:
                self._begun = {lineage: await self._begin(parts)}
            each = self._begun[lineage]
            while each.pieces:
                await self._gate.passed(GIVE_WAY_SECONDS)
                part, index, place = each.pieces[0]
                await self._compute.run(partial(each.buffer.write, place, part.chunk(index)), part.size(index))
                each.pieces.popleft()
        except OSError as error:
            self._begun = {}
            self._on_write_error(error)
            return False
        self._failing, self._begun = False, {}
        self._rounds[lineage] = each
        self._trim()
        return True

    async def _on_disk(self, part: Stored, work: Callable[[], T], cost_bytes: int) -> T | None:
        try:
            return await self._compute.run(work, cost_bytes)
        except OSError as error:
            log.warning("cannot read the parts of a past round, so they are dropped: %s", error.strerror or error)
            self._rounds = {key: each for key, each in self._rounds.items() if part not in each.parts.values()}
            return None

    async def _begin(self, parts: Sequence[ReducedPart]) -> _Round:
        size_bytes = sum(part.size_bytes for part in parts)
        each = _Round(await self._compute.run(lambda: self._make_buffer(max(1, size_bytes)), 0), size_bytes)
        offset = 0
        for part in parts:
            assert part.result is not None
            each.parts[part.result.digest] = Stored(part, each.buffer, offset)
            each.pieces.extend((part, index, offset + part.place(index)) for index in range(part.chunks))
            offset += part.size_bytes
        return each

    def _trim(self) -> None:
        while len(self._rounds) > self._least and (
            len(self._rounds) > self._most or self.size_bytes > self._limit_bytes
        ):
            del self._rounds[next(iter(self._rounds))]

    def _on_write_error(self, error: OSError) -> None:
        """Log the first of several failures in a row. Drop the oldest round, to make space for the next one."""
        if not self._failing:
            log.warning("cannot store a round's parts for peers that come later: %s", error.strerror or error)
        self._failing = True
        if self._rounds:
            del self._rounds[next(iter(self._rounds))]


class PartCache:
    """Parts by the lineage that their round extends, and by digest. It serves complete parts, as blobs.

    Parts of the present and the previous round are in memory. Those of earlier rounds move to the store `past`, if
    there is one, and are served from there while no data phase needs the link. `pool` lends the memory of parts.
    """

    def __init__(self, host: Host, past: PartStore | None = None, gate: Gate | None = None) -> None:
        """`gate` is that of `past`; None for a new one."""
        self.past, self.pool, self.blobs = past, ChunkPool(), BlobServer(host, gate)
        self.gate = self.blobs.gate
        self.blobs.add(self._blob)
        self._parts: dict[bytes, dict[bytes, ReducedPart]] = {}
        self._waiting: dict[bytes, None] = {}  # lineages of decided rounds that are to be stored

    def get(self, digest: bytes) -> ReducedPart | None:
        """The part with this digest, if it is in memory."""
        return next((parts[digest] for parts in self._parts.values() if digest in parts), None)

    def __contains__(self, digest: bytes) -> bool:
        return self._find(digest) is not None

    def _find(self, digest: bytes) -> ReducedPart | Stored | None:
        return self.get(digest) or (self.past.get(digest) if self.past else None)

    async def load(self, digest: bytes) -> ReducedPart | None:
        """The part with this digest, from memory or from the store; None if it is in neither."""
        part = self._find(digest)
        return await self.past.load(part) if self.past and isinstance(part, Stored) else self.get(digest)

    def put(self, lineage: bytes, part: ReducedPart) -> None:
        """Keep a sealed part of the round that extends a lineage."""
        assert part.result is not None
        self._parts.setdefault(lineage, {})[part.result.digest] = part

    def of(self, lineage: bytes) -> tuple[bytes, ...]:
        """Digests of the parts of the round that extends a lineage, as far as they are in memory."""
        return tuple(self._parts.get(lineage, ()))

    def keep(self, lineages: Collection[bytes], in_memory: Collection[bytes] = ()) -> None:
        """Begin a round: drop the parts of all other rounds, and stored ones of these unless they stay `in_memory`."""
        self.pool.next_round()
        stored = self.past or ()
        self._parts = {
            lineage: parts
            for lineage, parts in self._parts.items()
            if lineage in lineages and (lineage in in_memory or lineage not in stored)
        }
        self._waiting = {lineage: None for lineage in self._waiting if lineage in self._parts}

    def decided(self, lineage: bytes, digests: Collection[bytes]) -> None:
        """Note that a round is decided: drop its other parts, and let `save` store these."""
        self.retain(lineage, digests)
        if self.past and self._parts[lineage] and lineage not in self.past:
            self._waiting[lineage] = None

    async def save(self) -> None:
        """Store the rounds that wait for it. If it is cancelled, the next call continues where it stopped."""
        while self.past and self._waiting:
            lineage = next(iter(self._waiting))
            await self.past.put(lineage, list(self._parts[lineage].values()))
            self._waiting.pop(lineage, None)

    def retain(self, lineage: bytes, digests: Collection[bytes]) -> None:
        parts = self._parts.get(lineage, {})
        self._parts[lineage] = {digest: part for digest, part in parts.items() if digest in digests}

    def _blob(self, digest: bytes) -> Blob | None:
        part = self._find(digest)
        if part is None:
            return None
        note = b""
        if part.done:  # the index and the name say what the part is
            note = wire.encode(replace(part.done, result=wire.PartDigest(digest, ())))
        index, pauses = b"".join(part.digests), 0 if isinstance(part, ReducedPart) else PAST_PAUSES

        async def read(chunk: int) -> Buffer | None:
            if isinstance(part, ReducedPart):
                data: Buffer | None = part.chunk(chunk)
            else:
                data = await self.past.read(part, chunk) if self.past else None
            return data if data is None or not part.clusters else part.members[chunk] + data

        return Blob(index, read, note, pauses)


class PartDownload(BlobDownload):
    """The download of a part of a decided or proposed mean into `part`, which is undefined until it is complete.

    The `done` of the part is then what a holder claims, and not verified.
    """

    attempts, at_once = 1, 3

    def __init__(
        self,
        host: Host,
        accounting: RoundAccounting,
        *,
        wanted: wire.PartDigest,
        part: ReducedPart,
        silence_seconds: float,
        on_lost: Callable[[PeerId, PeerError | BadPayload], None] = lambda holder, error: None,
        on_received: Callable[[int], None] = lambda size: None,
    ) -> None:
        super().__init__(
            host,
            accounting,
            name=wanted.digest,
            chunks=part.chunks,
            silence_seconds=silence_seconds,
            on_lost=on_lost,
            on_received=on_received,
        )
        self.part, self._wanted = part, wanted

    def size(self, chunk: int) -> int:
        return 4 * self.part.clusters + self.part.size(chunk)

    def begin(self, index: bytes, note: bytes) -> bool:
        part, wanted = self.part, self._wanted
        digests = tuple(index[at : at + DIGEST_BYTES] for at in range(0, len(index), DIGEST_BYTES))
        if sum(run.count for run in wanted.runs) != self.chunks:
            raise BadPayload("a part whose chunks do not fit its elements")
        masks = [run.mask for run in wanted.runs for _ in range(run.count)]
        if part_digest(part.low, part.high, masks, digests) != wanted:
            raise BadPayload("a part with another digest than the requested one")
        part.masks, part.digests, part.result = masks, digests, wanted
        if part.clusters and not part.members:  # other holders send the same index while chunks are here already
            part.members = [b""] * len(masks)
        done = wire.expect(wire.decode(note), wire.PartDone) if note else None
        part.done = replace(done, result=wanted) if done and done.signature else None
        return False

    def put(self, chunk: int, data: memoryview) -> None:
        if chunk_digest(self.part.masks[chunk], data) != self.part.digests[chunk]:
            raise BadPayload(f"chunk {chunk} of a part with another digest than its index has")
        members = 4 * self.part.clusters  # the digest covers them and the elements alike
        if members:
            self.part.members[chunk] = bytes(data[:members])
        self.part.chunk(chunk)[:] = data[members:]
