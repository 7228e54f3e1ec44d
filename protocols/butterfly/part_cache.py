"""Reduced parts by digest: of the round under way and of the last rounds decided, served to whoever missed one.

Those of the round under way and of the one before are in memory. What was decided before that moves to a store, if
there is one, and goes out from there when nothing else needs the link.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from protocols import wire
from protocols.aio import peer_timeout
from protocols.allreduce.parts import ReducedPart
from protocols.base import BadPayload, Buffer, Deadline, Host, PeerGone, PeerId, Stream
from protocols.butterfly.part_store import PartStore, Stored
from protocols.chunks import receive_reduced
from protocols.codec import Codec
from protocols.gate import Gate
from protocols.limits import REQUESTER_IDLE_SECONDS
from protocols.stream_limiter import StreamLimiter

PARTS = "starling/parts/1"
GIVE_WAY_SECONDS = 5.0
"""A chunk of a past round waits so long for a data phase: who asked for it has a deadline."""
_LIMIT = 256


class PartCache:
    """Parts by the lineage that their round extends and by their digest. What is served is complete, and stays so.

    Attributes:
        past: where decided rounds go; None: nowhere.
        gate: past rounds are not handed out while it is closed.
    """

    def __init__(self, host: Host, past: PartStore | None = None, gate: Gate | None = None) -> None:
        """
        Args:
            gate: that of `past`; None: one of its own.
        """
        self.past, self.gate = past, gate or Gate()
        self._parts: dict[bytes, dict[bytes, ReducedPart]] = {}
        self._waiting: dict[bytes, None] = {}  # decided, and to be stored
        self._limiter = StreamLimiter()
        host.transport.serve(PARTS, self._serve)

    def get(self, digest: bytes) -> ReducedPart | None:
        """The part with this digest, if we have it in memory."""
        return next((parts[digest] for parts in self._parts.values() if digest in parts), None)

    def __contains__(self, digest: bytes) -> bool:
        return self._find(digest) is not None

    def _find(self, digest: bytes) -> ReducedPart | Stored | None:
        return self.get(digest) or (self.past.get(digest) if self.past else None)

    async def load(self, digest: bytes) -> ReducedPart | None:
        """The part with this digest, if we have it anywhere."""
        part = self._find(digest)
        return await self.past.load(part) if self.past and isinstance(part, Stored) else self.get(digest)

    def put(self, lineage: bytes, part: ReducedPart) -> None:
        """Take a sealed part of the round that extends a lineage."""
        assert part.result is not None
        self._parts.setdefault(lineage, {})[part.result.digest] = part

    def of(self, lineage: bytes) -> tuple[bytes, ...]:
        """Digests of the parts of one round."""
        return tuple(self._parts.get(lineage, ()))

    def keep(self, lineages: Collection[bytes], in_memory: Collection[bytes] = ()) -> None:
        """Drop the parts of all other rounds; of these, but for some, what is stored is in memory no more."""
        stored = self.past or ()
        self._parts = {
            lineage: parts
            for lineage, parts in self._parts.items()
            if lineage in lineages and (lineage in in_memory or lineage not in stored)
        }
        self._waiting = {lineage: None for lineage in self._waiting if lineage in self._parts}

    def decided(self, lineage: bytes, digests: Collection[bytes]) -> None:
        """A round is over: these are its parts, and to be stored."""
        self.retain(lineage, digests)
        if self.past and self._parts[lineage] and lineage not in self.past:
            self._waiting[lineage] = None

    async def save(self) -> None:
        """Store what waits for it. Cut short, it goes on where it was when it is called again."""
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
            async with peer_timeout(REQUESTER_IDLE_SECONDS, stream.peer, "it takes a part"):
                await stream.send(wire.Reduced(index, part.masks[index], len(data)), data)
        await stream.send(part.done or wire.PartDone(0, 0, part.result, b""))

    async def _read(self, part: Stored, index: int) -> Buffer | None:
        """A chunk of a past round; None where its file fails."""
        await self.gate.passed(GIVE_WAY_SECONDS)
        return await self.past.read(part, index) if self.past else None


async def fetch_part(
    host: Host, peer: PeerId, wanted: wire.PartDigest, codec: Codec, span: tuple[int, int, int], deadline: Deadline
) -> ReducedPart:
    """Get a part from a peer that may have it. `done` of what is returned is the peer's word, and not verified.

    Args:
        wanted: what it must turn out to be.
        span: element range [low, high) of the part, and elements of a chunk.

    Raises:
        PeerGone: the peer cannot be reached or does not have it.
        PeerSilent: the stream broke off.
        BadPayload: what came is not what was wanted.
    """
    part = ReducedPart(codec, *span)
    async with host.transport.open(peer, PARTS, deadline) as stream:
        await stream.send(wire.WantPart(wanted.digest))
        if not wire.expect(await stream.receive(_LIMIT), wire.Availability).here:
            raise PeerGone(peer, "does not have the part")
        done = await receive_reduced(stream, part, host.compute)
    if part.result != wanted:
        raise BadPayload("a part whose digest is not the one that was asked for")
    part.done = replace(done, result=wanted) if done.signature else None
    return part
