"""Serves blobs: large data that other peers ask for by name, and verify chunk by chunk.

The digests of a blob's chunks are its index. A peer that knows a digest of the whole asks several holders by name, and
verifies the index that they send, then each chunk (`protocols.blobs.download`). It needs no holder to be honest.

Rounds have priority: some blobs wait while a data phase begins (`Blob.pauses`). If it lasts, they are sent one chunk at
a time. A joiner of a run whose rounds always fill the lines would otherwise never catch up.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeAlias

from protocols import wire
from protocols.aio import Gate, loop_time, peer_timeout, progress_timeout
from protocols.base import REQUESTER_IDLE_SECONDS, BadPayload, Buffer, Header, Host, PeerId, Stream
from protocols.peers.estimates import RecentDict
from protocols.streams.endpoint import RoundAccounting, StreamLimiter
from protocols.wire import blob, digest, real, register, uint

BLOBS = "starling/blobs/1"

DIGEST_BYTES = 32
MAX_NOTE_BYTES = 512
MAX_BUSY_SECONDS = 600.0
LARGE_AT_ONCE = 3  # peers that may fetch a large blob at a time, each one of them
MAX_PEERS = 64  # limit of peers whose last blob is noted
BUSY_SECONDS = 5.0  # how soon a peer that has to wait for a large blob may ask again
PUT_OFF_SECONDS = 4.0  # interval at which a peer that waits for the end of a data phase gets a `Busy` message
LIMIT = 1024  # limit of the bytes of a header on these streams


@dataclass(frozen=True, slots=True)
class WantBlob(Header):
    """Asks for the index of a blob: the lineage of a state, or the digest of a part."""

    name: bytes = digest()


@dataclass(frozen=True, slots=True)
class Busy(Header):
    """The sender serves other peers: try again after this many seconds. In place of a chunk: the chunk comes later."""

    seconds: float = real(0, MAX_BUSY_SECONDS)


@dataclass(frozen=True, slots=True)
class BlobIndex(Header):
    """Answers `WantBlob`, as `Availability(False)` does; the digests of the chunks follow, 32 bytes each.

    `note` is what the holder claims about the blob besides, in the blob's own format.
    """

    chunks: int = uint(1 << 32)
    note: bytes = blob(MAX_NOTE_BYTES)


@dataclass(frozen=True, slots=True)
class WantChunk(Header):
    """Asks for one chunk of the stream's blob. The answer is a `wire.Chunk`, perhaps after some `Busy`."""

    index: int = uint(1 << 32)


register(35, (WantBlob, Busy, BlobIndex, WantChunk))


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob to serve on one stream."""

    index: bytes
    read: Callable[[int], Awaitable[Buffer | None]]  # the chunk; None: it cannot be read, and the stream ends
    note: bytes = b""
    pauses: int = 0  # how often PUT_OFF_SECONDS it waits from the begin of a data phase
    large: bool = False  # few peers at a time may fetch it


FindBlob: TypeAlias = Callable[[bytes], Blob | None]


class BlobServer:
    """Serves the blobs that others add, while `gate` is open or for a while longer (`Blob.pauses`)."""

    def __init__(self, host: Host, gate: Gate | None = None) -> None:
        self.gate, self.accounting = gate or Gate(), RoundAccounting()
        self._find: list[FindBlob] = []
        self._limiter = StreamLimiter()
        self._fetching: list[PeerId] = []
        self._open = Counter[PeerId]()  # streams on which a peer is sent a blob
        self._served: RecentDict[PeerId, tuple[bytes, float]] = RecentDict(MAX_PEERS)  # the last blob, and when
        self._sending = asyncio.Lock()  # of chunks in a data phase
        host.transport.serve(BLOBS, self._serve)

    def add(self, find: FindBlob) -> None:
        self._find.append(find)

    @property
    def fetching(self) -> int:
        return len(self._fetching)

    def last_served(self, peer: PeerId) -> tuple[bytes, float]:
        """Name of the blob that a peer was served last, and for how many seconds it has not been served since."""
        name, at = self._served.get(peer, (b"", -math.inf))
        return name, 0.0 if self._open[peer] else loop_time() - at

    @contextmanager
    def _noted(self, peer: PeerId, name: bytes) -> Iterator[None]:
        self._served[peer] = name, loop_time()
        self._open[peer] += 1
        try:
            yield
        finally:
            self._open[peer] -= 1
            self._open += Counter()  # drops peers without a stream
            self._served[peer] = name, loop_time()

    async def _serve(self, peer: PeerId, stream: Stream) -> None:
        with self._limiter.one_for(peer) as served:
            if served:
                async with self.accounting.counting(stream):
                    await self._answer(stream)

    async def _answer(self, stream: Stream) -> None:
        async with peer_timeout(REQUESTER_IDLE_SECONDS, stream.peer, "it asks for a blob"):
            name = wire.expect(await stream.receive(LIMIT), WantBlob).name
        found = next((each for find in self._find if (each := find(name))), None)
        if found is None:
            return await stream.send(wire.Availability(False))
        if not found.large:
            with self._noted(stream.peer, name):
                return await self._send(stream, found)
        if stream.peer in self._fetching or len(self._fetching) >= LARGE_AT_ONCE:
            return await stream.send(Busy(BUSY_SECONDS))
        self._fetching.append(stream.peer)
        try:
            with self._noted(stream.peer, name):
                await self._send(stream, found)
        finally:
            self._fetching.remove(stream.peer)

    async def _send(self, stream: Stream, found: Blob) -> None:
        """Send the index, then the chunks that the peer asks for, until it ends the stream."""
        chunks = len(found.index) // DIGEST_BYTES
        async with progress_timeout(REQUESTER_IDLE_SECONDS, stream, "it receives an index"):
            await stream.send(BlobIndex(chunks, found.note), found.index)
        for _ in range(2 * chunks + 1):
            async with peer_timeout(REQUESTER_IDLE_SECONDS, stream.peer, "it asks for a chunk"):
                asked = wire.expect(await stream.receive(LIMIT), WantChunk).index
            if asked >= chunks:
                raise BadPayload(f"asks for chunk {asked} of {chunks}")
            await self._give_way(stream, found.pauses)
            if (data := await found.read(asked)) is None:
                return
            async with (
                self._turn(stream, found.pauses if self.gate.closed else 0),
                progress_timeout(REQUESTER_IDLE_SECONDS, stream, "it receives a chunk"),
            ):
                await stream.send(wire.Chunk(asked, len(data)), data)
        raise BadPayload(f"asks for {2 * chunks} chunks, twice all there are")

    async def _give_way(self, stream: Stream, pauses: int) -> None:
        """Wait while a data phase begins."""
        while (left_seconds := pauses * PUT_OFF_SECONDS - self.gate.closed_seconds) > 0:
            if await self.gate.passed(min(left_seconds, PUT_OFF_SECONDS)):
                return
            await self._put_off(stream)

    @asynccontextmanager
    async def _turn(self, stream: Stream, pauses: int) -> AsyncIterator[None]:
        """Let one chunk after another be sent. None waits longer than `pauses`: a requester may be slow to receive."""
        is_mine = False
        for _ in range(pauses):
            with suppress(TimeoutError):
                async with asyncio.timeout(PUT_OFF_SECONDS):
                    is_mine = await self._sending.acquire()
                    break
            await self._put_off(stream)
        try:
            yield
        finally:
            if is_mine:
                self._sending.release()

    async def _put_off(self, stream: Stream) -> None:
        """Show the other peer that this one is still alive."""
        async with peer_timeout(REQUESTER_IDLE_SECONDS, stream.peer, "it receives a message"):
            await stream.send(Busy(PUT_OFF_SECONDS))
