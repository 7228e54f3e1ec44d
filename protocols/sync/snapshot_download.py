"""The download of a snapshot. A restarted peer fetches only what is missing, if the snapshot's buffer has survived."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence

from protocols.base import BadPayload, Deadline, Head, PeerError, PeerId, ProtocolError
from protocols.blobs.download import BlobDownload
from protocols.sync.context import SyncContext
from protocols.sync.snapshot import Snapshot, SnapshotIndex, chunk_size
from protocols.vectors.views import chunk_count

log = logging.getLogger(__name__)

SILENCE_SECONDS = 30.0  # A donor that sends nothing for this long has stalled


class StateUnavailable(ProtocolError):
    """No peer that was asked has what is needed, or can prove that it is right."""


class SnapshotDownload(BlobDownload):
    """The download of the state at a head, whose root is that of the certificates, or that most donors show."""

    def __init__(self, context: SyncContext, at: Head) -> None:
        chunks = 2 * chunk_count(context.elements)
        super().__init__(
            context.host,
            context.accounting,
            name=at.key.lineage,
            chunks=chunks,
            silence_seconds=SILENCE_SECONDS,
            on_lost=self._name_lost,
            on_received=context.sync_progress.record_arrival,
        )
        self.at, self._context = at, context
        self._snapshot: Snapshot | None = None

    async def fetch(self, donors: Callable[[], Sequence[PeerId]], deadline: Deadline) -> Snapshot:
        """Fetch what is missing. Past the deadline, it continues while it makes progress. Raises `StateUnavailable`."""
        before, number = self.bytes_received, self.at.key.round + 1
        self._context.sync_progress.download = self
        try:
            complete = await self.run(donors, deadline, extend=True)
        finally:
            self._context.snapshot_bytes += self.bytes_received - before
        if not complete or self._snapshot is None:
            raise StateUnavailable(f"no snapshot before round {number} from {self.asked} donors")
        whole, order = sum(self.brought.values()), sorted(self.brought.items(), key=lambda each: -each[1])
        shares = ", ".join(f"…{peer[-6:]} {100 * size // whole} %" for peer, size in order) or "an earlier process"
        log.info("the state before round %d has arrived, brought by %s", number, shares)
        return self._snapshot

    def size(self, chunk: int) -> int:
        return chunk_size(self._context.elements, chunk)

    def begin(self, index: bytes, note: bytes) -> bool:
        key, shown = self.at.key, SnapshotIndex.unpack(self._context.elements, index)
        if shown.state_root(key.round) != self.at.state_root:
            raise BadPayload("an index that does not make the state root")
        if self._snapshot is None:
            self._snapshot = self._context.snapshots.new(key.lineage, key.round, shown)
        return not self._snapshot.buffer.fresh

    def holds(self, chunk: int) -> bool:
        assert self._snapshot is not None
        return hashlib.sha256(self._snapshot.chunk(chunk)).digest() == self._snapshot.index.digests[chunk]

    def put(self, chunk: int, data: memoryview) -> None:
        assert self._snapshot is not None
        if hashlib.sha256(data).digest() != self._snapshot.index.digests[chunk]:
            raise BadPayload(f"chunk {chunk} of a snapshot with another digest than its index has")
        self._snapshot.put(chunk, data)

    def _name_lost(self, donor: PeerId, error: PeerError | BadPayload) -> None:
        if isinstance(error, PeerError):
            self._context.accounting.name(donor, f"lost as a donor: {error.why}")
