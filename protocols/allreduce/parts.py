"""What the data phase works on: parts of the encoded mean, their chunks, digests and memory.

Only the digests of a round's parts are BLAKE3, which is four to five times as fast as SHA-256 (O'Connor et al. 2020,
"BLAKE3: one function, fast everywhere") and releases the GIL, too. State roots, snapshots and run ids are SHA-256.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blake3 import blake3

from protocols import wire
from protocols.allreduce.clustered_plan import ResolvedClusters
from protocols.allreduce.plan import ResolvedPlan
from protocols.base import BadPayload, Buffer, Deadline, Host, RoundKey, Settings, Stream, Vector
from protocols.consensus.record import Record
from protocols.registry import CHUNK_ELEMENTS
from protocols.streams.chunks import PartLayout
from protocols.vectors.codec import Codec
from protocols.vectors.views import VectorView


def chunk_digest(mask: int, data: Buffer, members: Buffer = b"") -> bytes:
    """The digest of a reduced chunk: its data, and whose contributions it holds. `members`: as in `wire.Reduced`."""
    hasher = blake3(mask.to_bytes(4, "little"))
    hasher.update(members)
    hasher.update(data)
    return hasher.digest()


def part_digest(low: int, high: int, masks: Sequence[int], digests: Sequence[bytes]) -> wire.PartDigest:
    """The digest of the part [low, high) with these chunks. It covers the range: equal bytes elsewhere differ."""
    runs = tuple(wire.ChunkSpan(len(list(group)), mask) for mask, group in itertools.groupby(masks))
    place = low.to_bytes(8, "little") + high.to_bytes(8, "little")
    return wire.PartDigest(blake3(place + b"".join(digests)).digest(), runs)


class ReducedPart(PartLayout):
    """One reduced part, encoded: filled chunk by chunk, then sealed."""

    def __init__(
        self,
        codec: Codec,
        low: int,
        high: int,
        chunk_elements: int = CHUNK_ELEMENTS,
        pool: ChunkPool | None = None,
    ) -> None:
        super().__init__(codec, low, high, chunk_elements)
        self.pool = pool or ChunkPool()
        self.masks: list[int] = []  # of the contributors of each chunk that is in
        self.clusters = 0  # of a clustered round: bit i of a mask stands for cluster i
        self.members: list[bytes] = []  # of a clustered round: beside each of the masks, as in `wire.Reduced`
        self.result: wire.PartDigest | None = None  # digest of the part, once all chunks are in
        self.done: wire.PartDone | None = None  # as the reducer signed it, if the peer that sent it kept that
        self.digests: tuple[bytes, ...] = ()  # of its chunks, once all of them are in
        self._memory: list[memoryview | None] = [None] * self.chunks

    def chunk(self, index: int) -> memoryview:
        """The encoded bytes of a chunk: memory to write to, undefined at first."""
        memory = self._memory[index]
        if memory is None:
            memory = self._memory[index] = self.pool.take(self.size(index))
        return memory

    def append(self, mask: int, members: bytes = b"") -> None:
        """Note whose contributions the next chunk holds."""
        assert self.result is None, "a part that is whole is filled again"
        if self.clusters:
            self.members.append(members)
        self.masks.append(mask)

    def digest_of(self, index: int, mask: int, members: bytes = b"") -> bytes:
        return chunk_digest(mask, self.chunk(index), members)

    def seal(self, digests: Sequence[bytes]) -> wire.PartDigest:
        """Set `result`, from the digests of all chunks and their `masks`, and return it."""
        self.digests = tuple(digests)
        self.result = part_digest(self.low, self.high, self.masks, digests)
        return self.result

    def decode(self, into: VectorView | None) -> None:
        """Decode the part into its range of a vector, or only check that it decodes; raises BadPayload if not."""
        for index, _, _, (scratch,) in self.pieces(1):
            self.decode_chunk(index, into, scratch)

    def decode_chunk(self, index: int, into: VectorView | None, scratch: Vector) -> None:
        """Decode one chunk, as `decode` does. `scratch` has at least its elements, undefined afterwards."""
        low, high = self.elements(index)
        there = into.window(low, high) if into and not self.codec.in_place else None
        if there is not None:
            return self.codec.decode(self.chunk(index), there)
        vector = self.decoded(index, scratch)
        if into:
            into.write(low, vector)

    def decoded(self, index: int, scratch: Vector) -> Vector:
        """Decode one chunk, as `decode` does. The result may be the part's own memory: do not change it."""
        low, high = self.elements(index)
        data = self.chunk(index)
        vector = self.vector_for(data, scratch[: high - low])
        self.codec.decode(data, vector)
        return vector


@dataclass(frozen=True, slots=True)
class PartFormat:
    """How the vectors of a run are encoded and cut into chunks, and the pool of the chunks' memory."""

    codec: Codec
    chunk_elements: int
    pool: ChunkPool

    @classmethod
    def of(cls, settings: Settings, codec: Codec, pool: ChunkPool) -> PartFormat:
        """The format that these settings name. Raises ValueError if the chunk length does not fit the codec's grain."""
        if settings.chunk_elements % codec.grain:
            chunk = f"chunks of {settings.chunk_elements} elements"
            raise ValueError(f"{chunk} with codec {codec.name}: take a multiple of {codec.grain}")
        return cls(codec, settings.chunk_elements, pool)

    def contribution(self, low: int, high: int) -> PartLayout:
        """Layout of a contribution to the part [low, high). Its codec may differ from that of the reduced part."""
        return PartLayout(self.codec, low, high, self.chunk_elements)

    def part(self, low: int, high: int, members: int) -> ReducedPart:
        """An empty reduced part for a mean of at most this many contributions."""
        return ReducedPart(self.codec.reduced(members), low, high, self.chunk_elements, self.pool)

    def part_of(self, record: Record, index: int) -> ReducedPart:
        """An empty part like this one of a record that has `bounds`."""
        low, high = record.bounds[index : index + 2]
        part = self.part(low, high, record.contributors)
        part.clusters = len(record.clusters)
        return part


@dataclass(frozen=True, slots=True)
class DataPhase:
    key: RoundKey
    resolved: ResolvedPlan
    host: Host
    mine: VectorView  # unchanged until the data phase ends
    into: VectorView  # takes the mean, chunk by chunk as it comes in
    format: PartFormat
    silent: Deadline  # a contributor that has not opened its stream by then is left out
    patience_seconds: float  # time that a reducer has to answer a stream
    deadline: Deadline
    progress: Callable[[], None]  # called for every chunk
    # in a clustered round: the plan of all clusters. `resolved` is that of this peer's own one, which has this index
    clusters: ResolvedClusters | None = None
    cluster: int = 0

    @property
    def whole(self) -> ResolvedPlan | ResolvedClusters:
        """The plan whose peers reduce the parts and are the bits of a reduced chunk's mask."""
        return self.clusters or self.resolved

    def part(self, index: int) -> ReducedPart:
        whole, clusters = self.whole, self.clusters
        part = self.format.part(*whole.part(index), clusters.members if clusters else len(whole.peers))
        part.clusters = len(clusters.peers) if clusters else 0
        return part

    def contribution(self, index: int) -> PartLayout:
        return self.format.contribution(*self.resolved.part(index))

    def message(self, done: wire.PartDone) -> bytes:
        return part_message(self.key, self.resolved.digest, done)

    def check_chunk(self, reduced: wire.Reduced, held: ReducedPart) -> None:
        """Refuse a chunk, which is the next one of `held`, that names an unknown contributor, or one that was left out
        of an earlier chunk: with BadPayload.
        """
        if self.clusters:
            return self.clusters.check_chunk(reduced.mask, reduced.members, held.members[-1] if held.members else b"")
        allowed = held.masks[-1] if held.masks else (1 << len(self.resolved.peers)) - 1
        if reduced.mask & ~allowed or reduced.members:
            raise BadPayload(f"reduced chunk {reduced.index} holds a contributor that is excluded or unknown")

    def check_part(self, index: int, held: ReducedPart, done: wire.PartDone) -> None:
        """Refuse a reducer's statement that is not that of the part held, with BadPayload."""
        peers = self.whole.peers
        if (done.part, done.result) != (index, held.result) or done.reducer >= len(peers):
            raise BadPayload("a part whose digest is not that of its chunks")
        if not self.host.signer.verify(peers[done.reducer], self.message(done), done.signature):
            raise BadPayload("a part with a forged signature")


def part_message(key: RoundKey, plan: bytes, done: wire.PartDone) -> bytes:
    return b"starling part" + wire.canonical_bytes(key) + plan + wire.canonical_bytes(replace(done, signature=b""))


async def send_encoded(stream: Stream, part: ReducedPart) -> None:
    for index in range(part.chunks):
        data = part.chunk(index)
        await stream.send(wire.Chunk(index, len(data)), data)


GRANULE_BYTES = 1 << 18
"""Sizes are rounded up to a multiple of this. So the shorter last chunks of parts, whose lengths differ from round to
round, are recycled as well. What a chunk does not write to takes no memory."""


class ChunkPool:
    """Memory for chunks, recycled from round to round: it lends memory, and takes it back when no view of it is left.

    Fresh memory costs more than hashing or averaging what is written to it, .3 to .5 seconds a gigabyte for page
    faults, and 2 seconds if a hypervisor first has to find the pages.

    Each piece is lent through a new object, which all views of it keep alive: slices of a memoryview, tensors. So
    memory cannot be lent twice while a stream still sends it. Of each size the pool holds at most as many free pieces
    as were taken in the present or the previous round, whichever is more.

    Any thread may take memory, and views may vanish on any thread, in the middle of `take` too. Therefore each step
    that two threads could make at once is one operation of a deque or a list. A wrong count changes only how much stays
    free.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}  # size -> memory of that size
        self._returned: deque[mmap.mmap] = deque()  # free memory that is not in `_free` yet
        self._taken, self._taken_before = Counter[int](), Counter[int]()  # pieces by size, in this round and the last

    @property
    def free_bytes(self) -> int:
        self._collect()
        return sum(size * len(pieces) for size, pieces in list(self._free.items()))

    def take(self, size_bytes: int) -> memoryview:
        """Writable memory with undefined content."""
        self._collect()
        capacity = max(1, -(-size_bytes // GRANULE_BYTES)) * GRANULE_BYTES
        try:
            memory = self._free[capacity].pop()
        except (KeyError, IndexError):
            # Private memory: its page faults cost a third less than those of shared memory, the default.
            memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._taken[capacity] += 1
        lent = (ctypes.c_ubyte * size_bytes).from_buffer(memory)
        weakref.finalize(lent, self._returned.append, memory).atexit = False
        return memoryview(lent).cast("B")

    def next_round(self) -> None:
        """Begin a round: release memory that neither of the last two rounds needed."""
        self._collect()
        self._taken, self._taken_before = Counter(), self._taken
        for size, pieces in list(self._free.items()):
            del pieces[self._taken_before[size] :]

    def _collect(self) -> None:
        """Move returned memory to the free memory, as far as the limit allows; what exceeds it is unmapped."""
        while True:
            try:
                memory = self._returned.popleft()
            except IndexError:
                return
            size = len(memory)
            pieces = self._free.setdefault(size, [])
            if len(pieces) < max(self._taken[size], self._taken_before[size]):
                pieces.append(memory)
