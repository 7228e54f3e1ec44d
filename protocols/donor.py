"""Handing out snapshots: to a few joiners at a time, in chunks that they ask for, while training goes on."""

from __future__ import annotations

import logging
from functools import partial

from protocols import wire
from protocols.base import CHUNK_BYTES, BadPayload, Compute, PeerId, Stream
from protocols.requests import Busy, Index, WantChunk, WantSnapshot
from protocols.snapshot import Snapshot, Snapshots
from protocols.tasks import within

log = logging.getLogger(__name__)

JOINERS = 3
BUSY_SECONDS = 5.0
"""Whom we cannot serve is told to come again after so long."""
IDLE_SECONDS = 30.0
"""A joiner that asks for nothing, or takes nothing of what it asked for, for so long gives up its place."""
_LIMIT = 256


class Donor:
    """Serves the snapshots that a peer keeps. One that is being handed out stays until its joiners have done."""

    def __init__(self, snapshots: Snapshots, compute: Compute) -> None:
        self._snapshots, self._compute = snapshots, compute
        self._joiners: list[PeerId] = []

    async def serve(self, stream: Stream, wanted: WantSnapshot) -> None:
        """Answer a stream on which a snapshot was asked for, until it ends.

        Raises:
            BadPayload: it asks for what there is not, or for everything many times over.
            PeerSilent: the joiner has what it wanted, or is gone.
        """
        snapshot = self._snapshots.get(wanted.lineage)
        if snapshot is None:
            return await stream.send(wire.Having(False))
        if stream.peer in self._joiners or len(self._joiners) >= JOINERS:
            return await stream.send(Busy(BUSY_SECONDS))
        self._joiners.append(stream.peer)
        try:
            await self._hand_out(stream, snapshot)
        finally:
            self._joiners.remove(stream.peer)

    async def _hand_out(self, stream: Stream, snapshot: Snapshot) -> None:
        index = snapshot.index
        async with within(IDLE_SECONDS, stream.peer, "it takes an index"):
            await stream.send(Index(index.elements), index.pack())
        for _ in range(2 * len(index.digests)):
            async with within(IDLE_SECONDS, stream.peer, "it asks for a chunk"):
                asked = wire.expect(await stream.receive(_LIMIT), WantChunk)
            data = await self._read(snapshot, asked.index)
            if data is None:
                return
            async with within(IDLE_SECONDS, stream.peer, "it takes a chunk"):
                await stream.send(wire.Chunk(asked.index, len(data)), data)
        raise BadPayload(f"asks for {2 * len(index.digests)} chunks, twice all there are")

    async def _read(self, snapshot: Snapshot, chunk: int) -> bytearray | None:
        """A chunk's bytes; None where its file fails: it is handed out no more then."""
        try:
            return await self._compute.run(partial(snapshot.chunk, chunk), CHUNK_BYTES)
        except OSError as error:
            log.warning("the snapshot before round %d is lost: %s", snapshot.round + 1, error.strerror or error)
            self._snapshots.drop(snapshot)
            return None
