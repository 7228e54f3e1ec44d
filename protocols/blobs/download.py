"""Fetches a blob from several holders at once, none of which is trusted.

Every holder first sends the index, which must match what the subclass knows of the blob. Then all holders take chunks
from one queue (`protocols.blobs.scheduler`). Another run fetches only the chunks that have not arrived.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import ClassVar, TypeVar

from protocols import wire
from protocols.aio import Notifier, loop_time, peer_timeout, task_group
from protocols.base import (
    SLOWEST_BYTES_PER_SECOND,
    BadPayload,
    Deadline,
    Header,
    Host,
    PeerError,
    PeerId,
    Stream,
)
from protocols.blobs.scheduler import ChunkScheduler, HolderRate
from protocols.blobs.serving import BLOBS, DIGEST_BYTES, LIMIT, BlobIndex, Busy, WantBlob, WantChunk
from protocols.streams.chunks import due
from protocols.streams.endpoint import RoundAccounting

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_HOLDERS = 16
STALL_SECONDS = 60.0
"""A run that may extend its deadline continues past it while data arrives at least this often.

It ends in any case after the time that it would take at the slowest rate.
"""
LOOK_SECONDS = 10.0  # interval at which to look for further holders
BUSY_LIMIT_SECONDS = 10.0  # the longest wait that a holder may ask for
RETRY_SECONDS = 1.0
BUSY_ANSWERS = 20  # limit of attempts with a busy holder, and of `Busy` messages for one chunk
WAIT_SECONDS = 20.0  # how long a stream stays open while there is nothing to request on it


class NotHere(Exception):
    """The holder does not have the blob, or this peer cannot store it."""


class BlobDownload(ABC):
    """The download of one blob. Subclasses verify and keep it; their methods may block, so they run through `Compute`.

    `brought` are bytes of verified chunks by holder, including duplicate ones.
    """

    attempts: ClassVar = 3  # a holder that has broken off this many times is dropped
    at_once: ClassVar = MAX_HOLDERS  # holders asked at a time

    def __init__(
        self,
        host: Host,
        accounting: RoundAccounting,
        *,
        name: bytes,
        chunks: int,
        silence_seconds: float,
        on_lost: Callable[[PeerId, PeerError | BadPayload], None],
        on_received: Callable[[int], None],
    ) -> None:
        """A holder that sends nothing for `silence_seconds` has broken off.

        `on_lost` is called with a holder that has broken off, or broken a rule; of the latter, `accounting` knows.
        `on_received` is called with the size of each chunk that arrives, before it is verified.
        """
        self.name, self.chunks, self.bytes_received, self.holders = name, chunks, 0, 0
        self.brought: dict[PeerId, int] = {}
        self.asked = 0
        self._host, self._accounting, self._silence_seconds = host, accounting, silence_seconds
        self._on_lost, self._on_received = on_lost, on_received
        self._missing = set(range(chunks))
        self._scheduler = ChunkScheduler((), loop_time)
        self._ready, self._beginning = False, asyncio.Lock()
        self._moved = self._until = float("-inf")
        self._notifier = Notifier()

    # -- of each kind of blob -----------------------------------------------------------------------------------------

    @abstractmethod
    def size(self, chunk: int) -> int:
        """The size of a chunk in bytes; no other is larger than chunk 0."""

    @abstractmethod
    def begin(self, index: bytes, note: bytes) -> bool:
        """Verify an index, and make room. Returns whether an earlier process may have left chunks (`holds`).

        Raises BadPayload, and OSError if there is no room.
        """

    def holds(self, chunk: int) -> bool:
        """Whether an earlier process has left this chunk."""
        return False

    @abstractmethod
    def put(self, chunk: int, data: memoryview) -> None:
        """Verify and keep a chunk, perhaps for the second time. Raises BadPayload and OSError."""

    # -- all holders --------------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        return self._ready and not self._missing

    @property
    def begun(self) -> bool:
        return len(self._missing) < self.chunks

    @property
    def size_bytes(self) -> int:
        return sum(map(self.size, range(self.chunks)))

    @property
    def missing_bytes(self) -> int:
        return sum(self.size(chunk) for chunk in self._missing)

    async def run(self, holders: Callable[[], Sequence[PeerId]], deadline: Deadline, extend: bool = False) -> bool:
        """Fetch what is missing from the holders that are known at present; returns whether all of it has arrived.

        A holder that lies, stalls or dies is dropped; new holders are added. With `extend`, the download continues past
        the deadline while it makes progress.
        """
        self._queue_missing()
        self._until = deadline + (self.size_bytes / SLOWEST_BYTES_PER_SECOND if extend else 0.0)
        self._moved = float("-inf")
        async with task_group() as group:
            jobs: dict[PeerId, asyncio.Task[None]] = {}

            def done() -> int:
                return sum(job.done() for job in jobs.values())

            try:
                while not self.complete and loop_time() < (until := self._ends(deadline, extend)):
                    for holder in holders():
                        if holder not in jobs and len(jobs) < MAX_HOLDERS and len(jobs) - done() < self.at_once:
                            jobs[holder] = group.create_task(self._ask(holder))
                            jobs[holder].add_done_callback(lambda _: self._notifier.notify())
                    self.asked, before = len(jobs), done()
                    if before == len(jobs):
                        break
                    await self._notifier.reached(
                        lambda: self.complete or done() > before,  # noqa: B023 - awaited here
                        min(until, loop_time() + LOOK_SECONDS),
                    )
            finally:
                for job in jobs.values():
                    job.cancel()
        return self.complete

    def _ends(self, deadline: Deadline, extend: bool) -> Deadline:
        return min(self._until, max(deadline, self._moved + STALL_SECONDS)) if extend else deadline

    def _queue_missing(self) -> None:
        self._scheduler = ChunkScheduler(self._missing, loop_time)
        self._missing = self._scheduler.missing

    # -- one holder ---------------------------------------------------------------------------------------------------

    async def _ask(self, holder: PeerId) -> None:
        """Fetch chunks from one holder until none are left, or it has failed or was busy too often."""
        failures = busy = 0
        largest_bytes = self.size(0) if self.chunks else 0
        rate = HolderRate(largest_bytes)
        while not self.complete and failures < self.attempts and busy < BUSY_ANSWERS:
            try:
                async with AsyncExitStack() as stack:
                    opening = self._host.transport.open(holder, BLOBS, self._until)
                    async with peer_timeout(self._silence_seconds, holder, "it accepts a stream"):
                        stream = await stack.enter_async_context(opening)
                    await stack.enter_async_context(self._accounting.counting(stream))
                    wait_seconds = await self._take(stream, rate)
            except NotHere:
                return
            except BadPayload as error:
                return self._on_lost(holder, error)
            except PeerError as error:
                self._on_lost(holder, error)
                failures, wait_seconds, rate = failures + 1, RETRY_SECONDS, HolderRate(largest_bytes)
            else:
                busy += wait_seconds > 0
            if failures < self.attempts:
                await asyncio.sleep(wait_seconds)
            while self._ready and not self.complete and loop_time() < self._until and not await self._more(rate):
                pass  # past the deadline `_more` returns at once, and would never let the event loop run

    async def _take(self, stream: Stream, rate: HolderRate) -> float:
        """Request chunks on one stream until none are left. Returns how long to wait if the holder is busy; else 0."""
        shown = await shown_index(stream, self.name, self.chunks, self._silence_seconds)
        if isinstance(shown, Busy):
            return min(max(RETRY_SECONDS, shown.seconds), BUSY_LIMIT_SECONDS)
        async with self._beginning:  # other holders send the same index
            resumes = await self._stored(partial(self.begin, *shown), len(shown[0]))
            if not self._ready:
                if resumes:
                    await self._find()
                self._ready, self._moved = True, loop_time()
                self._queue_missing()
                self._notifier.notify()
        if self.complete:
            return 0.0
        self.holders += 1
        try:
            await self._fetch(stream, rate)
        finally:
            self.holders -= 1
        return 0.0

    async def _find(self) -> None:
        """Mark the chunks that an earlier download has left as present."""
        for chunk in sorted(self._missing):
            if await self._stored(partial(self.holds, chunk), self.size(chunk)):
                self._missing.discard(chunk)
        if here := self.chunks - len(self._missing):
            log.info("%d of %d chunks are on this peer already", here, self.chunks)

    async def _fetch(self, stream: Stream, rate: HolderRate) -> None:
        """Request and receive chunks until none are left. While one is verified and written, the next one arrives."""
        mine: deque[int] = deque()
        arriving, stored = (memoryview(bytearray(self.size(0))) for _ in range(2))
        storing: asyncio.Task[None] | None = None
        async with task_group() as group:
            try:
                while not self.complete:
                    await self._request(stream, mine, rate)
                    if mine:
                        data = await self._receive(stream, mine[0], arriving, rate)
                        if storing:
                            await storing
                        storing = group.create_task(self._store(stream.peer, mine[0], data))
                        self._hand_over(storing, mine.popleft(), rate)
                        arriving, stored = stored, arriving
                    elif not await self._more(rate):
                        return
            finally:
                for index in mine:
                    self._release(index, rate)
                if storing:  # a holder that breaks off is judged by what it has sent
                    await storing

    def _hand_over(self, storing: asyncio.Task[None], index: int, rate: HolderRate) -> None:
        self._scheduler.arrived(index)
        # Not at the task's own end: if it is cancelled before it begins, none of its code runs.
        storing.add_done_callback(lambda _: self._release(index, rate))

    async def _request(self, stream: Stream, mine: deque[int], rate: HolderRate) -> None:
        while len(mine) < max(rate.least, min(rate.window, self._scheduler.share(self.holders))):
            if (index := self._scheduler.claim(rate, len(mine))) is None:
                return
            mine.append(index)
            await stream.send(WantChunk(index))

    async def _more(self, rate: HolderRate) -> bool:
        """Wait at most `WAIT_SECONDS` until there is a chunk to request. Returns whether there is, or all have
        arrived.
        """
        until = min(self._until, loop_time() + WAIT_SECONDS)
        while not self.complete and loop_time() < until:
            if self._scheduler.next(rate) is not None:
                return True
            await self._notifier.reached(
                lambda: self.complete or self._scheduler.next(rate) is not None,
                min(until, self._scheduler.next_at(rate)),
            )
        return self.complete

    def _release(self, index: int, rate: HolderRate) -> None:
        self._scheduler.release(index, rate)
        self._notifier.notify()

    async def _receive(self, stream: Stream, index: int, into: memoryview, rate: HolderRate) -> memoryview:
        """Receive a chunk into the front of `into`, and return that part of it."""
        began, size = loop_time(), self.size(index)
        data = into[:size]
        # Not `receive_chunk`: a holder may defer a chunk, and each piece of it shows that the holder has not stalled.
        header, put_off = await self._header(stream)
        due(header, wire.Chunk, index, size)
        for start in range(0, size, rate.piece_bytes):
            async with peer_timeout(self._silence_seconds, stream.peer, "it sends a chunk"):
                await stream.receive_into(data[start : start + rate.piece_bytes])
            self._moved = loop_time()
        self.bytes_received += size
        self._on_received(size)
        if not put_off:
            rate.record_time(loop_time() - began)
        return data

    async def _header(self, stream: Stream) -> tuple[Header, bool]:
        """Receive the next header that is not `Busy`, and whether the holder deferred the chunk first."""
        for put_off in range(BUSY_ANSWERS):
            async with peer_timeout(self._silence_seconds, stream.peer, "it sends a chunk"):
                answer = await stream.receive(LIMIT)
            if not isinstance(answer, Busy):
                return answer, put_off > 0
        raise BadPayload(f"puts off one chunk {BUSY_ANSWERS} times")

    async def _store(self, holder: PeerId, index: int, data: memoryview) -> None:
        await self._stored(partial(self.put, index, data), 2 * len(data))
        self.brought[holder] = self.brought.get(holder, 0) + len(data)
        self._missing.discard(index)

    async def _stored(self, work: Callable[[], T], cost_bytes: int) -> T:
        try:
            return await self._host.compute.run(work, cost_bytes)
        except OSError as error:
            log.warning("cannot store the state that is being fetched: %s", error.strerror or error)
            raise NotHere from error


async def shown_index(stream: Stream, name: bytes, chunks: int, seconds: float) -> tuple[bytes, bytes] | Busy:
    """Ask for a blob. Returns its index and note, unverified, or how long to wait. Raises PeerError and BadPayload."""
    async with peer_timeout(seconds, stream.peer, "it sends an index"):
        await stream.send(WantBlob(name))
        answer = await stream.receive(LIMIT)
        if isinstance(answer, Busy):
            return answer
        if isinstance(answer, wire.Availability) and not answer.here:
            raise NotHere
        shown = wire.expect(answer, BlobIndex)
        if shown.chunks != chunks:
            raise BadPayload(f"a blob of {shown.chunks} chunks where {chunks} are due")
        data = bytearray(DIGEST_BYTES * chunks)
        await stream.receive_into(memoryview(data))
    return bytes(data), shown.note
