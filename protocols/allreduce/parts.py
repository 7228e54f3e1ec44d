"""What the data phase works on: parts of the encoded mean, their chunks, and their digests.

Only the digests of a round's parts are BLAKE3, which is four to five times as fast as SHA-256 (O'Connor et al. 2020,
"BLAKE3: one function, fast everywhere") and releases the GIL, too. State roots, snapshots and run ids are SHA-256.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from blake3 import blake3

from protocols import wire
from protocols.allreduce.chunk_pool import ChunkPool
from protocols.allreduce.plan import ResolvedPlan
from protocols.base import BadPayload, Buffer, Compute, Deadline, PeerId, RoundKey, Settings, Signer, Stream, Vector
from protocols.registry import CHUNK_ELEMENTS
from protocols.streams.chunks import HEADER_LIMIT, due
from protocols.vectors.codec import Codec
from protocols.vectors.layout import PartLayout
from protocols.vectors.views import VectorView


def chunk_digest(mask: int, data: Buffer) -> bytes:
    """Digest of one reduced chunk, from which its part's digest is made.

    Args:
        mask: bit mask of the chunk's contributors.
    """
    hasher = blake3(mask.to_bytes(4, "little"))
    hasher.update(data)
    return hasher.digest()


def part_digest(low: int, high: int, masks: Sequence[int], digests: Sequence[bytes]) -> wire.PartDigest:
    """The digest of the part [low, high) with these chunks. It covers the range: equal bytes elsewhere differ."""
    runs = tuple(wire.ChunkSpan(len(list(group)), mask) for mask, group in itertools.groupby(masks))
    place = low.to_bytes(8, "little") + high.to_bytes(8, "little")
    return wire.PartDigest(blake3(place + b"".join(digests)).digest(), runs)


class ReducedPart(PartLayout):
    """One reduced part, encoded: filled chunk by chunk, then sealed.

    Attributes:
        pool: lends the memory of its chunks.
        masks: for each chunk that is in, a bit mask of its contributors.
        result: digest of the part; None until all chunks are in.
        done: the digest as the reducer signed it; None if the part came from a peer that did not keep the signature.
    """

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
        self.masks: list[int] = []
        self.result: wire.PartDigest | None = None
        self.done: wire.PartDone | None = None
        self._memory: list[memoryview | None] = [None] * self.chunks

    def chunk(self, index: int) -> memoryview:
        """The encoded bytes of a chunk: memory to write to, with undefined content at first."""
        memory = self._memory[index]
        if memory is None:
            memory = self._memory[index] = self.pool.take(self.size(index))
        return memory

    def digest_of(self, index: int, mask: int) -> bytes:
        """Digest of a chunk with these contributors, for `seal`."""
        return chunk_digest(mask, self.chunk(index))

    def seal(self, digests: Sequence[bytes]) -> wire.PartDigest:
        """Set `result`, from the digests of all chunks and their `masks`, and return it."""
        self.result = part_digest(self.low, self.high, self.masks, digests)
        return self.result

    def decode(self, into: VectorView | None) -> None:
        """Decode the part into its range of a vector; with None, only check that it decodes.

        Raises:
            BadPayload: a chunk does not decode to finite numbers.
        """
        for index, _, _, (scratch,) in self.pieces(1):
            self.decode_chunk(index, into, scratch)

    def decode_chunk(self, index: int, into: VectorView | None, scratch: Vector) -> None:
        """Decode one chunk, as `decode` does. `scratch` has at least the chunk's elements; its content is undefined
        afterwards.
        """
        low, high = self.elements(index)
        there = into.window(low, high) if into and not self.codec.in_place else None
        if there is not None:
            return self.codec.decode(self.chunk(index), there)
        vector = self.decoded(index, scratch)
        if into:
            into.write(low, vector)

    def decoded(self, index: int, scratch: Vector) -> Vector:
        """Decode one chunk, and return its elements, which the caller must not change: they are in the part's own
        memory or in `scratch`.

        Raises:
            BadPayload: the chunk does not decode to finite numbers.
        """
        low, high = self.elements(index)
        data = self.chunk(index)
        vector = self.vector_for(data, scratch[: high - low])
        self.codec.decode(data, vector)
        return vector


@dataclass(frozen=True, slots=True)
class PartFormat:
    """How the vectors of a run are encoded and cut into chunks, and where this peer has the memory from.

    Attributes:
        codec: of contributions; that of a mean follows from it.
        pool: lends the memory of chunks.
    """

    codec: Codec
    chunk_elements: int
    pool: ChunkPool

    @classmethod
    def of(cls, settings: Settings, codec: Codec, pool: ChunkPool) -> PartFormat:
        """The format that these settings name, with this codec.

        Raises:
            ValueError: the chunk length is not a multiple of the codec's grain.
        """
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


@dataclass(frozen=True, slots=True)
class ReduceJob:
    """One member's data phase, as its contributing and its reducing side need it.

    Attributes:
        mine: this member's vectors, unchanged until the data phase ends.
        into: where the mean is written, chunk by chunk as it comes in.
        silent: a contributor that has not opened its stream by then is left out.
        patience_seconds: time that a reducer has to answer a stream.
        deadline: end of the data phase.
        progress: called for every chunk.
    """

    key: RoundKey
    resolved: ResolvedPlan
    me: PeerId
    mine: VectorView
    into: VectorView
    format: PartFormat
    compute: Compute
    signer: Signer
    silent: Deadline
    patience_seconds: float
    deadline: Deadline
    progress: Callable[[], None]

    def part(self, index: int) -> ReducedPart:
        """An empty reduced part."""
        return self.format.part(*self.resolved.part(index), len(self.resolved.peers))

    def handed_in(self, index: int) -> PartLayout:
        """Layout of a contribution to a part."""
        return self.format.contribution(*self.resolved.part(index))

    def message(self, done: wire.PartDone) -> bytes:
        """The bytes that the reducer of a part signed."""
        return part_message(self.key, self.resolved.digest, done)


def part_message(key: RoundKey, plan: bytes, done: wire.PartDone) -> bytes:
    """The bytes that a reducer signs, for a part of the plan with this digest."""
    return b"starling part" + wire.canonical_bytes(key) + plan + wire.canonical_bytes(replace(done, signature=b""))


async def send_encoded(stream: Stream, part: ReducedPart) -> None:
    """Send a part that is already encoded.

    Raises:
        PeerSilent: the stream ended.
    """
    for index in range(part.chunks):
        data = part.chunk(index)
        await stream.send(wire.Chunk(index, len(data)), data)


async def receive_reduced(
    stream: Stream,
    part: ReducedPart,
    compute: Compute,
    into: VectorView | None = None,
    allowed: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> wire.PartDone:
    """Receive reduced chunks into `part`, and set its `masks` and `result` accordingly.

    Args:
        into: takes the decoded elements; None: they are not decoded.
        allowed: mask of the contributors that the first chunk may hold; a later chunk may hold only those of the
            previous chunk. None: no restriction.
        progress: called after every chunk.

    Returns:
        The sender's statement of what the part is. It is neither verified nor compared with `part.result`.

    Raises:
        BadPayload: another message or chunk came, a chunk holds a contributor that it may not, or does not decode.
        PeerSilent: the stream ended.
    """
    digests: list[bytes] = []
    scratch = part.scratch_vector() if into else None

    def accept(index: int) -> bytes:
        if scratch is not None:
            part.decode_chunk(index, into, scratch)
        return part.digest_of(index, part.masks[index])

    for index in range(part.chunks):
        data = part.chunk(index)
        header = due(await stream.receive(HEADER_LIMIT), wire.Reduced, index, len(data))
        if allowed is not None:
            if header.mask & ~allowed:
                raise BadPayload(f"reduced chunk {index} holds a contributor that is excluded or unknown")
            allowed = header.mask
        await stream.receive_into(data)
        part.masks.append(header.mask)
        digests.append(await compute.run(partial(accept, index), (2 if into else 1) * len(data)))
        progress()
    done = wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), wire.PartDone)
    part.seal(digests)
    return done
