"""Fetches the mean of a round that was decided without this peer: its parts, by digest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from protocols import wire
from protocols.aio import loop_time, task_group
from protocols.allreduce.parts import PartFormat, ReducedPart
from protocols.base import (
    SLOWEST_BYTES_PER_SECOND,
    BadPayload,
    Deadline,
    PeerError,
    PeerGone,
    PeerId,
    StoppedHere,
    Vector,
)
from protocols.butterfly.part_cache import PartCache, fetch_part
from protocols.consensus.record import Record
from protocols.sync.context import SyncContext
from protocols.sync.snapshot_download import StateUnavailable
from protocols.vectors.codec import codec
from protocols.vectors.views import VectorView

AT_ONCE = 4
"""Parts of a round that are fetched concurrently."""
PART_SECONDS = 20.0
"""Time for a source to send a part, in addition to the part's time at the slowest rate."""
MAX_SOURCES = 16
MAX_FAILURES = 64
"""Limit of sources whose failures are counted."""

MakePart = Callable[[], ReducedPart]


class RoundReplayer:
    """Fetches means of past rounds."""

    def __init__(self, context: SyncContext, part_cache: PartCache) -> None:
        self._context, self._part_cache = context, part_cache
        self._format = PartFormat.of(context.settings, codec(context.settings.codec), part_cache.pool)
        self._failures: dict[PeerId, int] = {}

    @property
    def mean_bytes(self) -> int:
        """Approximate bytes to fetch for the mean of one round, if its members were those that are live now."""
        members = len(self._context.host.members.live())
        return self._format.codec.reduced(members).encoded_bytes(self._context.elements)

    async def parts(self, record: Record, sources: Sequence[PeerId], deadline: Deadline) -> list[ReducedPart]:
        """Fetch the parts of the mean of a decided round that has one.

        Args:
            sources: peers to ask.

        Raises:
            StateUnavailable: a part cannot be fetched from these peers, or does not fit into the mean.
        """
        bounds, sources = record.bounds, sources[:MAX_SOURCES]
        if not record.tiles(self._context.elements):
            raise StateUnavailable(f"the record of round {record.round} has parts that do not make up its mean")
        turn = asyncio.Semaphore(AT_ONCE)

        async def one(place: int, part: wire.PartDigest) -> ReducedPart:
            first = place % max(1, len(sources))
            make_empty = partial(self._format.part, bounds[place], bounds[place + 1], len(record.peers))
            async with turn:
                order = sorted((*sources[first:], *sources[:first]), key=lambda peer: self._failures.get(peer, 0))
                return await self._part(part, make_empty, order, deadline)

        async with task_group() as group:
            jobs = [
                group.create_task(one(place, part))
                for place, part in enumerate(record.parts)
                if bounds[place] < bounds[place + 1]
            ]
        return [job.result() for job in jobs]

    async def decode(self, parts: Sequence[ReducedPart], into: Vector) -> None:
        """Decode the mean that these parts form into `into`.

        Raises:
            StateUnavailable: it does not decode; `into` is then undefined.
        """
        target = VectorView([into])
        for part in parts:
            try:
                await self._context.host.compute.run(partial(part.decode, target), 4 * (part.high - part.low))
            except BadPayload as error:  # a quorum signed it, so the peer that sent it is not to blame
                raise StateUnavailable(f"a decided part does not decode: {error}") from None

    async def _part(
        self, part: wire.PartDigest, make_empty: MakePart, sources: Sequence[PeerId], deadline: Deadline
    ) -> ReducedPart:
        if sum(run.count for run in part.runs) != make_empty().chunks:
            raise StateUnavailable("the record has a part whose number of chunks does not fit its elements")
        held = await self._part_cache.load(part.digest)
        return held or await self._fetch(part, make_empty, sources, deadline)

    async def _fetch(
        self, part: wire.PartDigest, make_empty: MakePart, sources: Sequence[PeerId], deadline: Deadline
    ) -> ReducedPart:
        for source in sources:
            empty = make_empty()
            size = empty.size_bytes
            until = loop_time() + PART_SECONDS + size / SLOWEST_BYTES_PER_SECOND
            try:
                held = await fetch_part(self._context.host, source, part, empty, min(deadline, until))
            except BadPayload as error:
                self._fail(source, f"refused: {error}")
            except (PeerGone, StoppedHere):
                continue
            except PeerError as error:
                self._fail(source, f"lost as a source: {error.why}")
            else:
                self._context.part_bytes += size
                self._context.sync_progress.record_arrival(size)
                return held
        raise StateUnavailable(f"none of {len(sources)} peers asked has a part that is needed")

    def _fail(self, source: PeerId, why: str) -> None:
        """Report a source, and ask it last from now on."""
        self._context.accounting.name(source, why)
        self._failures[source] = self._failures.get(source, 0) + 1
        if len(self._failures) > MAX_FAILURES:
            del self._failures[next(iter(self._failures))]
