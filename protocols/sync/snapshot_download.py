"""Downloads a snapshot from several donors at once, none of which is trusted.

Every donor first sends the index, which must match the state root in the chain's certificates. Then all donors take
chunks from one queue (`protocols.sync.chunk_scheduler`). Another attempt fetches only the chunks that have not arrived.
So does a restarted peer, if the snapshot's buffer has survived.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from protocols import wire
from protocols.aio import Notifier, loop_time, peer_timeout, task_group
from protocols.base import (
    CHUNK_BYTES,
    SLOWEST_BYTES_PER_SECOND,
    BadPayload,
    Deadline,
    Head,
    Header,
    PeerError,
    PeerId,
    ProtocolError,
    Stream,
)
from protocols.streams.chunks import due
from protocols.sync.chunk_scheduler import ChunkScheduler, DonorRate
from protocols.sync.context import SyncContext
from protocols.sync.requests import Busy, WantChunk, WantSnapshot
from protocols.sync.requests import SnapshotIndexHeader as Shown
from protocols.sync.snapshot import Snapshot, SnapshotIndex

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_DONORS = 16
CHUNK_SECONDS = 30.0
"""A donor that sends nothing for this long has stalled."""
STALL_SECONDS = 60.0
"""Past its deadline, a download continues while data arrives at least this often.

It ends in any case after the time that it would take at the slowest rate.
"""
LOOK_SECONDS = 10.0
"""Interval at which to look for further donors."""
FAILURES = 3
"""A donor is dropped after it has broken off this many times."""
BUSY_LIMIT_SECONDS = 10.0
"""The longest wait that a donor may ask for."""
RETRY_DONOR_SECONDS = 1.0
BUSY_ANSWERS = 20
"""Limit of attempts with a busy donor, and of `Busy` messages for one chunk."""
WAIT_SECONDS = 20.0
"""How long a stream stays open while there is nothing to request on it."""
_LIMIT = 256


class StateUnavailable(ProtocolError):
    """No peer that was asked has what is needed, or can prove that it is right."""


class SnapshotDownload:
    """The download of one snapshot.

    Attributes:
        at: the head whose state is downloaded.
        bytes_received: bytes of chunks, including bad and duplicate ones.
        brought: bytes of verified chunks by donor, including duplicate ones.
    """

    _now = staticmethod(loop_time)

    def __init__(self, context: SyncContext, at: Head) -> None:
        """Create the download.

        Args:
            at: the head. Its state root is that of the certificates, or the one that most donors show.
        """
        self.at, self.bytes_received = at, 0
        self.brought: dict[PeerId, int] = {}
        self._context, self._host, self._sync_progress = context, context.host, context.sync_progress
        self._elements = context.elements
        self._snapshot: Snapshot | None = None
        self._missing: set[int] = set()
        self._scheduler = ChunkScheduler((), self._now)
        self._beginning = asyncio.Lock()
        self._moved = self._until = float("-inf")
        self._notifier = Notifier()

    @property
    def complete(self) -> bool:
        return self._snapshot is not None and not self._missing

    @property
    def begun(self) -> bool:
        """Whether any of it has arrived."""
        return self._snapshot is not None and len(self._missing) < len(self._snapshot.index.digests)

    @property
    def missing_bytes(self) -> int:
        if self._snapshot is None:
            return 8 * self._elements
        return sum(self._snapshot.index.size(index) for index in self._missing)

    async def run(self, donors: Callable[[], Sequence[PeerId]], deadline: Deadline) -> Snapshot:
        """Fetch what is missing. A donor that lies, stalls or dies is reported and dropped; new donors are added.

        Args:
            donors: returns the donors that are known at present.
            deadline: past it, the download continues only while it makes progress.

        Raises:
            StateUnavailable: the donors did not send the whole snapshot.
        """
        self._queue_missing()
        self._until = deadline + 8 * self._elements / SLOWEST_BYTES_PER_SECOND
        self._moved = float("-inf")
        asked, before = 0, self.bytes_received
        async with task_group() as group:
            jobs: dict[PeerId, asyncio.Task[None]] = {}
            try:
                while not self.complete and self._now() < (until := self._ends(deadline)):
                    for donor in donors():
                        if donor not in jobs and len(jobs) < MAX_DONORS:
                            jobs[donor] = group.create_task(self._ask(donor))
                            jobs[donor].add_done_callback(lambda _: self._notifier.notify())
                    asked = len(jobs)
                    if all(job.done() for job in jobs.values()):
                        break
                    await self._notifier.reached(
                        lambda: self.complete or all(job.done() for job in jobs.values()),
                        min(until, self._now() + LOOK_SECONDS),
                    )
            finally:
                for job in jobs.values():
                    job.cancel()
                self._context.snapshot_bytes += self.bytes_received - before
        if self._snapshot is None or not self.complete:
            raise StateUnavailable(f"no snapshot before round {self.at.key.round + 1} from {asked} donors")
        log.info("the state before round %d is here, brought by %s", self.at.key.round + 1, self._shares())
        return self._snapshot

    def _shares(self) -> str:
        """For the log: the share of the bytes received that each donor sent."""
        whole = sum(self.brought.values())
        order = sorted(self.brought.items(), key=lambda each: -each[1])
        return ", ".join(f"…{peer[-6:]} {100 * size // whole} %" for peer, size in order) or "an earlier process"

    def _ends(self, deadline: Deadline) -> Deadline:
        return min(self._until, max(deadline, self._moved + STALL_SECONDS))

    async def _ask(self, donor: PeerId) -> None:
        """Fetch chunks from one donor until none are left, or it has failed or was busy too often."""
        failures = busy = 0
        rate = DonorRate()
        while not self.complete and failures < FAILURES and busy < BUSY_ANSWERS:
            try:
                async with self._context.open(donor, self._until) as stream:
                    busy_seconds = await self._take(stream, rate)
            except (BadPayload, StateUnavailable):
                return
            except PeerError as error:
                self._context.accounting.name(donor, f"lost as a donor: {error.why}")
                failures, busy_seconds, rate = failures + 1, RETRY_DONOR_SECONDS, DonorRate()
            else:
                busy += busy_seconds > 0
            await asyncio.sleep(busy_seconds)
            while self._snapshot and not self.complete and not await self._more(rate):
                pass

    async def _take(self, stream: Stream, rate: DonorRate) -> float:
        """Request chunks on one stream until none are left.

        Returns:
            Seconds to wait before asking again, if the donor is busy; else 0.
        """
        index = await shown_index(stream, self.at.key.lineage, self._elements)
        if isinstance(index, Busy):
            return min(max(RETRY_DONOR_SECONDS, index.seconds), BUSY_LIMIT_SECONDS)
        await self._check(index)
        self._sync_progress.donors += 1
        try:
            await self._chunks(stream, rate)
        finally:
            self._sync_progress.donors -= 1
        return 0.0

    # -- beginning ----------------------------------------------------------------------------------------------------

    async def _check(self, index: SnapshotIndex) -> None:
        at = self.at
        root = await self._host.compute.run(lambda: index.state_root(at.key.round), 32 * len(index.digests))
        if root != at.state_root:
            raise BadPayload("an index that does not make the state root")
        async with self._beginning:  # other donors send the same index
            if self._snapshot is None:
                snapshot = await self._stored(
                    lambda: self._context.snapshots.new(at.key.lineage, at.key.round, index), 0
                )
                self._missing.update(range(len(index.digests)))
                if not snapshot.fresh:
                    await self._find(snapshot)
                self._snapshot = snapshot
                self._queue_missing()
                self._moved = self._now()
                self._notifier.notify()

    async def _find(self, snapshot: Snapshot) -> None:
        """Mark the chunks that an earlier download has left as present."""
        for chunk in sorted(self._missing):
            if await self._stored(partial(_holds, snapshot, chunk), snapshot.index.size(chunk)):
                self._missing.discard(chunk)
        if here := len(snapshot.index.digests) - len(self._missing):
            log.info("%d of %d MiB of the state are here already", here, len(snapshot.index.digests))

    # -- chunks -------------------------------------------------------------------------------------------------------

    async def _chunks(self, stream: Stream, rate: DonorRate) -> None:
        """Request and receive chunks until none are left. While one is verified and written, the next one arrives."""
        mine: deque[int] = deque()
        arriving, stored = (memoryview(bytearray(CHUNK_BYTES)) for _ in range(2))
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
                if storing:  # a donor that breaks off is judged by what it has sent
                    await storing

    def _hand_over(self, storing: asyncio.Task[None], index: int, rate: DonorRate) -> None:
        """Leave a chunk that has arrived to the task that stores it."""
        self._scheduler.arrived(index)
        # Not at the task's own end: if it is cancelled before it begins, none of its code runs.
        storing.add_done_callback(lambda _: self._release(index, rate))

    async def _request(self, stream: Stream, mine: deque[int], rate: DonorRate) -> None:
        """Request chunks ahead, as many as the donor's rate suggests."""
        while len(mine) < min(rate.window, self._scheduler.share(self._sync_progress.donors)):
            if (index := self._scheduler.claim(rate, len(mine))) is None:
                return
            mine.append(index)
            await stream.send(WantChunk(index))

    async def _more(self, rate: DonorRate) -> bool:
        """Wait at most `WAIT_SECONDS` until there is a chunk to request. Returns whether there is, or all have arrived.

        A chunk that becomes overdue at another donor causes no notification, so the wait ends when it does.
        """
        until = min(self._until, self._now() + WAIT_SECONDS)
        while not self.complete and self._now() < until:
            if self._scheduler.next(rate) is not None:
                return True
            await self._notifier.reached(
                lambda: self.complete or self._scheduler.next(rate) is not None,
                min(until, self._scheduler.next_at(rate)),
            )
        return self.complete

    def _release(self, index: int, rate: DonorRate) -> None:
        self._scheduler.release(index, rate)
        self._notifier.notify()

    async def _receive(self, stream: Stream, index: int, into: memoryview, rate: DonorRate) -> memoryview:
        """Receive a chunk into the front of `into`, and return that part of it."""
        assert self._snapshot is not None
        began, size = self._now(), self._snapshot.index.size(index)
        data = into[:size]
        # Not `receive_chunk`: a donor may defer a chunk, and each piece of it shows that the donor has not stalled.
        header, put_off = await self._header(stream)
        due(header, wire.Chunk, index, size)
        for start in range(0, size, rate.piece_bytes):
            async with peer_timeout(CHUNK_SECONDS, stream.peer, "it sends a chunk"):
                await stream.receive_into(data[start : start + rate.piece_bytes])
            self._moved = self._now()
        self.bytes_received += size
        self._sync_progress.came(size)
        if not put_off:
            rate.took(self._now() - began)
        return data

    async def _store(self, donor: PeerId, index: int, data: memoryview) -> None:
        """Verify a chunk and write it."""
        assert self._snapshot is not None
        await self._stored(partial(_put, self._snapshot, index, data), 2 * len(data))
        self.brought[donor] = self.brought.get(donor, 0) + len(data)
        if index in self._missing:  # otherwise another donor has sent it as well
            self._missing.discard(index)
            self._sync_progress.bytes_here += len(data)

    async def _header(self, stream: Stream) -> tuple[Header, bool]:
        """Receive the next header that is not `Busy`, and whether the donor deferred the chunk first."""
        for put_off in range(BUSY_ANSWERS):
            async with peer_timeout(CHUNK_SECONDS, stream.peer, "it sends a chunk"):
                answer = await stream.receive(_LIMIT)
            if not isinstance(answer, Busy):
                return answer, put_off > 0
        raise BadPayload(f"puts off one chunk {BUSY_ANSWERS} times")

    def _queue_missing(self) -> None:
        """Queue the missing chunks, and report how much is missing."""
        self._scheduler = ChunkScheduler(self._missing, self._now)
        self._missing = self._scheduler.missing
        self._sync_progress.bytes_whole = 8 * self._elements
        self._sync_progress.bytes_here = self._sync_progress.bytes_whole - self.missing_bytes

    async def _stored(self, work: Callable[[], T], cost_bytes: int) -> T:
        try:
            return await self._host.compute.run(work, cost_bytes)
        except OSError as error:
            log.warning("cannot store the state that is being fetched: %s", error.strerror or error)
            raise StateUnavailable("a snapshot cannot be stored") from error


async def shown_index(stream: Stream, lineage: bytes, elements: int) -> SnapshotIndex | Busy:
    """Ask a donor for the snapshot at a lineage. Returns its index, or how long to wait.

    Raises:
        StateUnavailable: the donor does not have this snapshot.
        BadPayload: the index is malformed, or of another model.
        PeerSilent: the donor did not answer in time.
    """
    async with peer_timeout(CHUNK_SECONDS, stream.peer, "it sends an index"):
        await stream.send(WantSnapshot(lineage))
        answer = await stream.receive(_LIMIT)
        if isinstance(answer, Busy):
            return answer
        if isinstance(answer, wire.Availability) and not answer.here:
            raise StateUnavailable("the donor does not have this snapshot any more")
        shown = wire.expect(answer, Shown)
        if shown.elements != elements:
            raise BadPayload(f"a snapshot of {shown.elements} elements where the run has {elements}")
        data = bytearray(SnapshotIndex.packed_bytes(shown.elements))
        await stream.receive_into(memoryview(data))
    return SnapshotIndex.unpack(shown.elements, bytes(data))


def _holds(snapshot: Snapshot, index: int) -> bool:
    return hashlib.sha256(snapshot.chunk(index)).digest() == snapshot.index.digests[index]


def _put(snapshot: Snapshot, index: int, data: memoryview) -> None:
    """Write a chunk that matches the index. If two donors sent it, the same bytes are written twice.

    Raises:
        BadPayload: the chunk does not match the index.
        OSError: the chunk cannot be written.
    """
    if hashlib.sha256(data).digest() != snapshot.index.digests[index]:
        raise BadPayload(f"chunk {index} of a snapshot with another digest than its index has")
    snapshot.put(index, data)
