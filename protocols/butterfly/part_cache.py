"""Reduced parts by digest, of the round under way and of the last decided ones, served to peers that missed one.

Parts of the present and the previous round are in memory. Those of earlier rounds move to a store, if there is one, and
are served from there while no data phase needs the link.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from protocols import wire
from protocols.aio import Gate, peer_timeout, progress_timeout
from protocols.allreduce.chunk_pool import ChunkPool
from protocols.allreduce.parts import ReducedPart, receive_reduced
from protocols.base import REQUESTER_IDLE_SECONDS, BadPayload, Buffer, Deadline, Host, PeerGone, PeerId, Stream
from protocols.butterfly.part_store import PartStore, Stored
from protocols.streams.endpoint import StreamLimiter

PARTS = "starling/parts/1"
GIVE_WAY_SECONDS = 5.0
"""Longest time that a chunk of a past round waits for a data phase to end, since its requester has a deadline."""
_LIMIT = 256


class PartCache:
    """Parts by the lineage that their round extends, and by digest. It serves complete parts only.

    Attributes:
        past: store of the parts of decided rounds; None if there is none.
        gate: parts of past rounds are not served while it is closed.
        pool: lends the memory of parts, and gets it back when they are dropped.
    """

    def __init__(self, host: Host, past: PartStore | None = None, gate: Gate | None = None) -> None:
        """
        Args:
            gate: the gate of `past`; None for a new one.
        """
        self.past, self.gate, self.pool = past, gate or Gate(), ChunkPool()
        self._parts: dict[bytes, dict[bytes, ReducedPart]] = {}
        self._waiting: dict[bytes, None] = {}  # lineages of decided rounds that are to be stored
        self._limiter = StreamLimiter()
        host.transport.serve(PARTS, self._serve)

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
        """Begin a round: drop the parts of all other rounds, and stored parts of these, unless they are to stay
        `in_memory`.
        """
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
        """Drop all other parts of one round."""
        parts = self._parts.get(lineage, {})
        self._parts[lineage] = {digest: part for digest, part in parts.items() if digest in digests}

    async def _serve(self, peer: PeerId, stream: Stream) -> None:
        with self._limiter.one_for(peer) as served:
            if served:
                await self._answer(peer, stream)

    async def _answer(self, peer: PeerId, stream: Stream) -> None:
        async with peer_timeout(REQUESTER_IDLE_SECONDS, peer, "it asks for a part"):
            wanted = wire.expect(await stream.receive(_LIMIT), wire.WantPart)
        part = self._find(wanted.digest)
        async with peer_timeout(REQUESTER_IDLE_SECONDS, peer, "it takes a part"):
            await stream.send(wire.Availability(part is not None))
        if part:
            await self._give(stream, part)

    async def _give(self, stream: Stream, part: ReducedPart | Stored) -> None:
        assert part.result is not None
        for index in range(part.chunks):
            data: Buffer | None = part.chunk(index) if isinstance(part, ReducedPart) else await self._read(part, index)
            if data is None:
                return
            async with progress_timeout(REQUESTER_IDLE_SECONDS, stream, "it takes a part"):
                await stream.send(wire.Reduced(index, part.masks[index], len(data)), data)
        await stream.send(part.done or wire.PartDone(0, 0, part.result, b""))

    async def _read(self, part: Stored, index: int) -> Buffer | None:
        """A chunk of a past round; None if its file fails."""
        await self.gate.passed(GIVE_WAY_SECONDS)
        return await self.past.read(part, index) if self.past else None


async def fetch_part(
    host: Host, peer: PeerId, wanted: wire.PartDigest, part: ReducedPart, deadline: Deadline
) -> ReducedPart:
    """Fetch a part from a peer that may have it. The `done` of the result is the peer's claim, and not verified.

    Args:
        wanted: digest that the part must have.
        part: an empty part, which is filled and returned. If this fails, its content is undefined.

    Raises:
        PeerGone: the peer cannot be reached or does not have the part.
        PeerSilent: the stream broke off.
        BadPayload: the peer sent another part.
    """
    async with host.transport.open(peer, PARTS, deadline) as stream:
        await stream.send(wire.WantPart(wanted.digest))
        if not wire.expect(await stream.receive(_LIMIT), wire.Availability).here:
            raise PeerGone(peer, "does not have the part")
        done = await receive_reduced(stream, part, host.compute)
    if part.result != wanted:
        raise BadPayload("a part with another digest than the requested one")
    part.done = replace(done, result=wanted) if done.signature else None
    return part
