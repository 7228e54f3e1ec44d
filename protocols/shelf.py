"""Reduced parts by digest: of the round under way and of the last rounds decided, served to whoever missed one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from protocols import wire
from protocols.base import BadPayload, Deadline, Host, PeerGone, PeerId, Stream
from protocols.codec import Codec
from protocols.parts import HeldPart, chunk_digest, seal
from protocols.tasks import within

PARTS = "starling/parts/1"
IDLE_SECONDS = 30.0
"""Who asks for nothing, or takes nothing of what it asked for, for so long is sent away."""
MAX_STREAMS = 64
"""Served at a time; whoever comes then finds the stream closed."""
_LIMIT = 256


class Shelf:
    """Parts by the lineage that their round extends and by their digest. What is served is complete, and stays so."""

    def __init__(self, host: Host) -> None:
        self._parts: dict[bytes, dict[bytes, HeldPart]] = {}
        self._serving = 0
        host.transport.serve(PARTS, self._serve)

    def get(self, digest: bytes) -> HeldPart | None:
        """The part with this digest, if we have it."""
        return next((parts[digest] for parts in self._parts.values() if digest in parts), None)

    def put(self, lineage: bytes, part: HeldPart) -> None:
        """Take a sealed part of the round that extends a lineage."""
        assert part.result is not None
        self._parts.setdefault(lineage, {})[part.result.digest] = part

    def of(self, lineage: bytes) -> tuple[bytes, ...]:
        """Digests of the parts of one round."""
        return tuple(self._parts.get(lineage, ()))

    def keep(self, lineages: Collection[bytes]) -> None:
        """Drop the parts of all other rounds."""
        self._parts = {lineage: parts for lineage, parts in self._parts.items() if lineage in lineages}

    def retain(self, lineage: bytes, digests: Collection[bytes]) -> None:
        """Drop all other parts of one round."""
        parts = self._parts.get(lineage, {})
        self._parts[lineage] = {digest: part for digest, part in parts.items() if digest in digests}

    async def _serve(self, peer: PeerId, stream: Stream) -> None:
        if self._serving >= MAX_STREAMS:
            return
        self._serving += 1
        try:
            async with within(IDLE_SECONDS, peer, "it asks for a part"):
                wanted = wire.expect(await stream.receive(_LIMIT), wire.WantPart)
            part = self.get(wanted.digest)
            async with within(IDLE_SECONDS, peer, "it takes a part"):
                await stream.send(wire.Having(part is not None))
            if part:
                await self._give(stream, part)
        finally:
            self._serving -= 1

    async def _give(self, stream: Stream, part: HeldPart) -> None:
        assert part.result is not None
        for index in range(part.chunks):
            data = part.chunk(index)
            async with within(IDLE_SECONDS, stream.peer, "it takes a part"):
                await stream.send(wire.Reduced(index, part.masks[index], len(data)), data)
        await stream.send(part.done or wire.PartDone(0, 0, part.result, b""))


async def fetch_part(
    host: Host, peer: PeerId, wanted: wire.Part, codec: Codec, span: tuple[int, int, int], deadline: Deadline
) -> HeldPart:
    """Get a part from a peer that may have it. `done` of what is returned is the peer's word, and not verified.

    Args:
        wanted: what it must turn out to be.
        span: element range [low, high) of the part, and elements of a chunk.

    Raises:
        PeerGone: the peer cannot be reached or does not have it.
        PeerSilent: the stream broke off.
        BadPayload: what came is not what was wanted.
    """
    part = HeldPart(codec, *span)
    async with host.transport.open(peer, PARTS, deadline) as stream:
        await stream.send(wire.WantPart(wanted.digest))
        if not wire.expect(await stream.receive(_LIMIT), wire.Having).here:
            raise PeerGone(peer, "does not have the part")
        masks, digests = [], []
        for index in range(part.chunks):
            header = wire.expect(await stream.receive(_LIMIT), wire.Reduced)
            data = part.chunk(index)
            if (header.index, header.size) != (index, len(data)):
                raise BadPayload(f"chunk {header.index} of {header.size} bytes where {index} of {len(data)} is due")
            await stream.receive_into(data)
            masks.append(header.mask)
            digests.append(await host.compute.run(partial(chunk_digest, header.mask, data), len(data)))
        done = wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), wire.PartDone)
    if seal(part.low, part.high, masks, digests) != wanted:
        raise BadPayload("a part whose digest is not the one that was asked for")
    part.masks, part.result = masks, wanted
    part.done = replace(done, result=wanted) if done.signature else None
    return part
