"""Serves snapshots to a few joiners at a time, in chunks that they request, while training continues.

Rounds have priority: during the data phase of a round, joiners have to wait. A snapshot stays available while a joiner
downloads it and for some time after, even if newer snapshots have replaced it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from protocols import wire
from protocols.aio import Gate, loop_time, peer_timeout, progress_timeout
from protocols.base import CHUNK_BYTES, REQUESTER_IDLE_SECONDS, BadPayload, Compute, Deadline, PeerId, Stream
from protocols.sync.requests import MAX_SNAPSHOTS, Busy, SnapshotIndexHeader, SnapshotRef, WantChunk, WantSnapshot
from protocols.sync.snapshot import Snapshot, Snapshots

log = logging.getLogger(__name__)

JOINERS = 3
BUSY_SECONDS = 5.0
"""How soon a joiner that this peer cannot serve may ask again."""
LENT = 2
"""Limit of older snapshots kept for joiners: those that were read most recently."""
LEND_SECONDS = 300.0
"""How long an older snapshot is kept after it was read: enough for a joiner that was cut off, or restarts."""
PUT_OFF_SECONDS = 4.0
"""Interval at which a joiner that waits for the end of a data phase gets a `Busy` message."""
MAX_PAUSES = 4
"""After this many `Busy` messages the joiner gets one chunk. So joiners make progress even if data phases never end."""
_LIMIT = 256


@dataclass(slots=True)
class _Lease:
    snapshot: Snapshot
    until: Deadline


class SnapshotServer:
    """Serves the snapshots that a peer keeps, and older ones that a joiner is still downloading.

    Args:
        gate: while it is closed, nothing is served.
        follows: whether this peer has the means since a lineage, without which a snapshot of its state is useless.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        compute: Compute,
        gate: Gate,
        follows: Callable[[bytes], bool] = lambda lineage: True,
    ) -> None:
        self._snapshots, self._compute, self._gate, self._follows = snapshots, compute, gate, follows
        self._joiners: list[PeerId] = []
        self._loans: dict[bytes, _Lease] = {}

    @property
    def joiners(self) -> int:
        """Number of joiners that download now."""
        return len(self._joiners)

    def kept(self) -> tuple[SnapshotRef, ...]:
        """The snapshots to announce to other peers."""
        held = self._snapshots.kept()
        lent = [SnapshotRef(each.snapshot.lineage, each.snapshot.round) for each in self._lent()]
        return (*held, *(each for each in lent if each not in held))[:MAX_SNAPSHOTS]

    def tidy(self) -> None:
        """Release snapshots that no joiner downloads any more. To be called from time to time."""
        self._lent()

    def _lent(self) -> list[_Lease]:
        """The older snapshots that joiners still use. Releases the other ones."""
        now, held = loop_time(), {each.lineage for each in self._snapshots.held()}
        last = sorted(self._loans.values(), key=lambda loan: -loan.until)
        loans = [each for each in last if each.until > now and each.snapshot.lineage not in held]
        lent = [each for each in loans if self._follows(each.snapshot.lineage)][:LENT]
        self._loans = {
            key: loan for key, loan in self._loans.items() if loan.until > now and (key in held or loan in lent)
        }
        return lent

    def _lend(self, snapshot: Snapshot) -> None:
        until = loop_time() + LEND_SECONDS
        self._loans.setdefault(snapshot.lineage, _Lease(snapshot, until)).until = until

    async def serve(self, stream: Stream, wanted: WantSnapshot) -> None:
        """Serve a stream on which a joiner has asked for a snapshot, until the stream ends.

        Raises:
            BadPayload: the joiner asks for a chunk that does not exist, or for all chunks more than twice.
            PeerSilent: the joiner has what it wanted, or is gone.
        """
        loan = self._loans.get(wanted.lineage)
        snapshot = self._snapshots.get(wanted.lineage) or (loan.snapshot if loan else None)
        if snapshot is None:
            return await stream.send(wire.Availability(False))
        if stream.peer in self._joiners or len(self._joiners) >= JOINERS:
            return await stream.send(Busy(BUSY_SECONDS))
        self._joiners.append(stream.peer)
        try:
            await self._hand_out(stream, snapshot)
        finally:
            self._joiners.remove(stream.peer)
            self.tidy()

    async def _hand_out(self, stream: Stream, snapshot: Snapshot) -> None:
        index, scratch = snapshot.index, memoryview(bytearray(CHUNK_BYTES))
        async with progress_timeout(REQUESTER_IDLE_SECONDS, stream, "it receives an index"):
            await stream.send(SnapshotIndexHeader(index.elements), index.pack())
        for _ in range(2 * len(index.digests)):
            async with peer_timeout(REQUESTER_IDLE_SECONDS, stream.peer, "it asks for a chunk"):
                asked = wire.expect(await stream.receive(_LIMIT), WantChunk)
            self._lend(snapshot)
            await self._give_way(stream)
            data = await self._read(snapshot, asked.index, scratch)
            if data is None:
                return
            async with progress_timeout(REQUESTER_IDLE_SECONDS, stream, "it receives a chunk"):
                await stream.send(wire.Chunk(asked.index, len(data)), data)
        raise BadPayload(f"asks for {2 * len(index.digests)} chunks, twice all there are")

    async def _give_way(self, stream: Stream) -> None:
        """Wait while a round needs the link. `Busy` messages show the joiner that this peer is still alive."""
        for _ in range(MAX_PAUSES):
            if await self._gate.passed(PUT_OFF_SECONDS):
                return
            async with peer_timeout(REQUESTER_IDLE_SECONDS, stream.peer, "it receives a message"):
                await stream.send(Busy(PUT_OFF_SECONDS))

    async def _read(self, snapshot: Snapshot, chunk: int, scratch: memoryview) -> memoryview | None:
        """Read a chunk into `scratch`. None if its file cannot be read; the snapshot is then served no longer."""
        try:
            return await self._compute.run(partial(snapshot.read_chunk, chunk, scratch), CHUNK_BYTES)
        except OSError as error:
            log.warning("the snapshot before round %d is lost: %s", snapshot.round + 1, error.strerror or error)
            self._snapshots.drop(snapshot)
            self._loans.pop(snapshot.lineage, None)
            return None
