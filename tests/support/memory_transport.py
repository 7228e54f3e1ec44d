"""Transports in one process whose streams end in `node.streams.serving.Serving`, as those of libp2p do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from node.streams.serving import Access, OpenAccess, Serving
from node.streams.traffic import StreamTraffic, Traffic
from protocols.base import Buffer, Deadline, Handler, NotAccepted, PeerGone, PeerId, Stream
from protocols.streams.framing import opened


class MemoryPipe:
    def __init__(self) -> None:
        self.moved_bytes = 0
        self.received = 0
        self.other: MemoryPipe
        self._reader = asyncio.StreamReader()

    def belong_to(self, traffic: StreamTraffic) -> None:
        pass

    async def write(self, *pieces: Buffer) -> None:
        if self._reader.at_eof() or self.other._reader.at_eof():
            raise ConnectionResetError("closed")
        self.other._reader.feed_data(b"".join(pieces))

    async def read_into(self, buffer: memoryview) -> None:
        try:
            buffer[:] = await self._reader.readexactly(len(buffer))
        except asyncio.IncompleteReadError:
            raise EOFError from None
        self.received += len(buffer)

    async def close(self, seconds: float) -> None:
        self.other._reader.feed_eof()

    async def reset(self) -> None:
        self.abort()

    def abort(self) -> None:
        self._reader.feed_eof()
        self.other._reader.feed_eof()


class MemoryNetwork:
    def __init__(self) -> None:
        self.transports: dict[PeerId, MemoryTransport] = {}
        self.cut: set[frozenset[PeerId]] = set()  # pairs that do not reach each other


class MemoryTransport:
    """`protocols.base.Transport`, with the parts of `LibP2PTransport` that admission uses."""

    def __init__(self, network: MemoryNetwork, me: PeerId) -> None:
        self.me, self._network = me, network
        self.serving = Serving(64, 32, Traffic())
        self.access: Access = OpenAccess()
        self.pipes: list[tuple[PeerId, MemoryPipe]] = []  # of streams from and to others
        network.transports[me] = self

    def serve(self, method: str, handler: Handler) -> None:
        self.serving.serve(method, handler)

    def restrict(self, access: Access) -> None:
        self.access = self.serving.access = access

    def expel(self, peer: PeerId) -> None:
        self.serving.expel(peer)
        self.cut_off(peer)

    def cut_off(self, peer: PeerId) -> None:
        for _, pipe in [each for each in self.pipes if each[0] == peer]:
            pipe.abort()

    @asynccontextmanager
    async def open(self, peer: PeerId, method: str, deadline: Deadline) -> AsyncIterator[Stream]:
        await self.access.before(peer, method, deadline)
        try:
            pipe = await self.ask(peer, method)
        except NotAccepted:
            if not await self.access.refused(peer, method, deadline):
                raise
            pipe = await self.ask(peer, method)
        try:
            yield await opened(peer, pipe, deadline)
        except BaseException:
            pipe.abort()
            raise
        await pipe.close(1.0)

    async def ask(self, peer: PeerId, method: str) -> MemoryPipe:
        """A stream that the other side has accepted, whatever `access` says."""
        if frozenset((self.me, peer)) in self._network.cut or peer not in self._network.transports:
            raise PeerGone(peer, "cannot be reached")
        mine, theirs = MemoryPipe(), MemoryPipe()
        mine.other, theirs.other = theirs, mine
        other = self._network.transports[peer]
        self.pipes.append((peer, mine))
        other.pipes.append((self.me, theirs))
        other.serving.take(self.me, theirs)
        try:
            await self.serving.ask(peer, mine, method)
        except (EOFError, OSError):
            raise NotAccepted(peer, f"did not accept {method}, and sent {mine.received} bytes") from None
        return mine
