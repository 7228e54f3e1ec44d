"""Fetching a snapshot from several donors at once, none of which is trusted.

Every donor first shows the index, which must make the state root that the chain's certificates carry. Then all take
chunks from one queue. What a donor was asked for and did not bring goes back to the queue; when the queue is empty,
whoever is free asks for what another has been slow to bring.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from protocols import wire
from protocols.base import (
    CHUNK_BYTES,
    BadPayload,
    Deadline,
    Head,
    Host,
    PeerError,
    PeerId,
    ProtocolError,
    Stream,
)
from protocols.post import Ledger
from protocols.requests import SYNC, Busy, WantChunk, WantSnapshot
from protocols.requests import Index as Shown
from protocols.snapshot import Index, Snapshot, Snapshots
from protocols.tasks import Bell, together, within

T = TypeVar("T")

MAX_DONORS = 16
WINDOW = 4
"""Chunks that one donor is asked for ahead of what it has brought: a round trip must not stop the flow."""
CHUNK_SECONDS = 30.0
"""A donor that brings no chunk for so long has stalled."""
SLOW_SECONDS = 5.0
"""What a donor has been asked for so long ago, another may be asked for as well."""
FAILURES = 3
"""So often may a donor break off."""
BUSY_LIMIT_SECONDS = 10.0
"""A donor may send us away for so long at most."""
PAUSE_SECONDS = 1.0
BUSY_ANSWERS = 20
"""So often is one that is busy asked again."""
_LIMIT = 256


class Unavailable(ProtocolError):
    """Nobody whom we could ask has what is needed, or is able to show that it is right."""


class Download:
    """One snapshot on its way.

    Attributes:
        bytes_received: of chunks, the bad and the doubled among them.
    """

    def __init__(self, host: Host, ledger: Ledger, snapshots: Snapshots, at: Head, elements: int) -> None:
        """
        Args:
            snapshots: makes room for it.
            at: the head whose state is wanted; its state root as certificates have it.
            elements: of the parameters, n.
        """
        self.bytes_received = 0
        self._host, self._ledger, self._snapshots = host, ledger, snapshots
        self._at, self._elements = at, elements
        self._snapshot: Snapshot | None = None
        self._queue: deque[int] = deque()
        self._asked: dict[int, list[float]] = {}  # chunk -> when donors were asked who are bringing it
        self._missing: set[int] = set()
        self._bell = Bell()

    @property
    def complete(self) -> bool:
        return self._snapshot is not None and not self._missing

    async def run(self, donors: Sequence[PeerId], deadline: Deadline) -> Snapshot:
        """Fetch it; a donor that lies, stalls or dies is named and left.

        Raises:
            Unavailable: these donors did not bring all of it before the deadline.
        """
        async with together() as group:
            jobs = [group.create_task(self._ask(donor, deadline)) for donor in donors[:MAX_DONORS]]
            for job in jobs:
                job.add_done_callback(lambda _: self._bell.ring())
            try:
                await self._bell.until(lambda: self.complete or all(job.done() for job in jobs), deadline)
            except TimeoutError:
                pass
            finally:
                for job in jobs:
                    job.cancel()
        if self._snapshot is None or not self.complete:
            raise Unavailable(f"no snapshot before round {self._at.key.round} from {len(donors)} donors")
        return self._snapshot

    async def _ask(self, donor: PeerId, deadline: Deadline) -> None:
        """Take chunks from one donor, until there is nothing left to take or it has failed too often."""
        failures = busy = 0
        while not self.complete and failures < FAILURES and busy < BUSY_ANSWERS:
            try:
                async with (
                    self._host.transport.open(donor, SYNC, deadline) as stream,
                    self._ledger.counting(stream),
                ):
                    busy_seconds = await self._take(stream)
            except (BadPayload, Unavailable):
                return
            except PeerError as error:
                self._ledger.name(donor, f"lost as a donor: {error.why}")
                failures, busy_seconds = failures + 1, PAUSE_SECONDS
            else:
                busy += busy_seconds > 0
            await asyncio.sleep(busy_seconds)
            while self._snapshot and not self.complete and self._next(()) is None:
                with suppress(TimeoutError):
                    until = min(deadline, asyncio.get_running_loop().time() + SLOW_SECONDS)
                    await self._bell.until(lambda: bool(self._queue) or self.complete, until)

    async def _take(self, stream: Stream) -> float:
        """Serve ourselves on one stream, until there is nothing left to ask for.

        Returns:
            Seconds to wait, if it is busy.
        """
        async with within(CHUNK_SECONDS, stream.peer, "it shows an index"):
            await stream.send(WantSnapshot(self._at.key.lineage))
            answer = await stream.receive(_LIMIT)
            if isinstance(answer, Busy):
                return min(max(PAUSE_SECONDS, answer.seconds), BUSY_LIMIT_SECONDS)
            if isinstance(answer, wire.Having) and not answer.here:
                raise Unavailable("the snapshot has made room for a later one")
            shown = wire.expect(answer, Shown)
            if shown.elements != self._elements:
                raise BadPayload(f"a snapshot of {shown.elements} elements where the run has {self._elements}")
            data = bytearray(Index.packed_bytes(shown.elements))
            await stream.receive_into(memoryview(data))
        await self._check(Index.unpack(shown.elements, bytes(data)))
        await self._chunks(stream)
        return 0.0

    async def _check(self, index: Index) -> None:
        at = self._at
        root = await self._host.compute.run(lambda: index.state_root(at.key.round), 32 * len(index.digests))
        if root != at.state_root:
            raise BadPayload("an index that does not make the state root")
        if self._snapshot is not None:
            return
        snapshot = await self._stored(lambda: self._snapshots.new(at.key.lineage, at.key.round, index), 0)
        if self._snapshot is None:  # still: others bring the same index
            self._snapshot = snapshot
            self._queue.extend(range(len(index.digests)))
            self._missing.update(self._queue)

    async def _chunks(self, stream: Stream) -> None:
        mine: deque[int] = deque()
        scratch = memoryview(bytearray(CHUNK_BYTES))
        try:
            while not self.complete:
                while len(mine) < WINDOW and (index := self._claim(mine)) is not None:
                    mine.append(index)
                    await stream.send(WantChunk(index))
                if not mine:
                    return
                await self._receive(stream, mine[0], scratch)
                self._release(mine.popleft())
        finally:
            for index in mine:
                self._release(index)

    def _next(self, mine: Collection[int]) -> int | None:
        """The next chunk for one donor to bring: one that nobody was asked for, or only one other, long ago."""
        if self._queue:
            return self._queue[0]
        late = asyncio.get_running_loop().time() - SLOW_SECONDS
        slow = (index for index, asked in self._asked.items() if len(asked) == 1 and asked[0] <= late)
        return next((index for index in slow if index in self._missing and index not in mine), None)

    def _claim(self, mine: Collection[int]) -> int | None:
        index = self._next(mine)
        if index is None:
            return None
        if self._queue:
            self._queue.popleft()
        self._asked.setdefault(index, []).append(asyncio.get_running_loop().time())
        return index

    def _release(self, index: int) -> None:
        self._asked[index].pop()
        if not self._asked[index]:
            del self._asked[index]
            if index in self._missing:
                self._queue.append(index)
        self._bell.ring()

    async def _receive(self, stream: Stream, index: int, scratch: memoryview) -> None:
        assert self._snapshot is not None
        size = self._snapshot.index.size(index)
        data = scratch[:size]
        async with within(CHUNK_SECONDS, stream.peer, "it brings a chunk"):
            header = wire.expect(await stream.receive(_LIMIT), wire.Chunk)
            if (header.index, header.size) != (index, size):
                raise BadPayload(f"chunk {header.index} of {header.size} bytes where {index} of {size} is due")
            await stream.receive_into(data)
        self.bytes_received += size
        await self._stored(partial(_put, self._snapshot, index, data), 2 * size)
        self._missing.discard(index)

    async def _stored(self, work: Callable[[], T], cost_bytes: int) -> T:
        try:
            return await self._host.compute.run(work, cost_bytes)
        except OSError as error:
            raise Unavailable(f"there is nowhere to put a snapshot: {error.strerror or error}") from error


def _put(snapshot: Snapshot, index: int, data: memoryview) -> None:
    """Put a chunk in that is the one of the index: twice if two brought it, and the same bytes then.

    Raises:
        BadPayload: it is another.
        OSError: it cannot be put there.
    """
    if hashlib.sha256(data).digest() != snapshot.index.digests[index]:
        raise BadPayload(f"chunk {index} of a snapshot with another digest than its index has")
    snapshot.put(index, data)
