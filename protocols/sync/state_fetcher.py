"""Fetches a state: a snapshot that another peer serves, and the means of the rounds since then."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from protocols import wire
from protocols.aio import loop_time, task_group
from protocols.allreduce.parts import PartFormat, ReducedPart
from protocols.base import BadPayload, Deadline, Head, PeerError, PeerGone, PeerId, StoppedHere, Vector
from protocols.blobs.download import MAX_HOLDERS, NotHere, shown_index
from protocols.blobs.parts import PARTS_AT_ONCE, PartCache, PartDownload
from protocols.blobs.serving import BLOBS, Busy
from protocols.consensus import record as records
from protocols.history.chain import UNSETTLED, Chain, DecidedRound
from protocols.peers.estimates import RecentDict
from protocols.sync.context import SyncContext
from protocols.sync.progress import CatchUpTrend
from protocols.sync.snapshot import Snapshot, SnapshotIndex
from protocols.sync.snapshot_download import SILENCE_SECONDS, SnapshotDownload, StateUnavailable
from protocols.vectors.codec import codec
from protocols.vectors.views import VectorView, chunk_count

PART_SECONDS = 20.0  # A source of a part that sends nothing for this long has stalled
MAX_FAILURES = 64  # limit of sources whose failures are counted
INDEX_SECONDS = 10.0  # time for former members to show which state they hold
MAX_FAILED = 16


class StateFetcher:
    """Fetches the snapshots and the means that lead to the head of a chain."""

    def __init__(self, context: SyncContext, part_cache: PartCache) -> None:
        self.sync_progress, self.trend = context.sync_progress, CatchUpTrend()
        self._context, self._part_cache = context, part_cache
        self._format = PartFormat.of(context.settings, codec(context.settings.codec), part_cache.pool)
        self._failures: RecentDict[PeerId, int] = RecentDict(MAX_FAILURES)  # of sources of parts
        self._begun: SnapshotDownload | None = None
        self._failed: set[bytes] = set()  # roots whose state no former member sent
        self._led_nowhere: RecentDict[bytes, bool] = RecentDict(MAX_FAILED)  # lineages of snapshots

    def on_slow(self, line: str) -> None:
        self._context.say(line)

    # -- means --------------------------------------------------------------------------------------------------------

    @property
    def mean_bytes(self) -> int:
        """Approximate bytes to fetch for the mean of one round, if its members were those that are live now."""
        members = len(self._context.host.members.live())
        return self._format.codec.reduced(members).encoded_bytes(max(self._context.settings.elements))

    async def parts(self, link: DecidedRound, deadline: Deadline) -> list[ReducedPart]:
        """Get the parts of the mean of a verified round that has one. Raises `StateUnavailable`."""
        record, turn = link.record, asyncio.Semaphore(PARTS_AT_ONCE)
        lot = link.lineage + self._context.host.me.encode()
        # each voter held all parts when it voted
        voters = records.drawn(lot, (vote.voter.peer for vote in link.certificate.votes))
        sources = self._context.peers.others(voters, self._context.peers.all_contacts())
        live = {member.peer for member in self._context.host.members.live()}
        sources = [peer for peer in sources if peer in live] or sources  # waiting for a silent peer takes time
        if not record.tiles(self._context.settings.elements[link.certificate.key.fragment]):
            raise StateUnavailable(f"the record of round {record.round} has parts that do not make up its mean")

        async def one(place: int, wanted: wire.PartDigest) -> ReducedPart:
            part, first = self._format.part_of(record, place), place % max(1, len(sources))
            if sum(run.count for run in wanted.runs) != part.chunks:
                raise StateUnavailable("the record has a part whose number of chunks does not fit its elements")
            async with turn:
                return await self._part(wanted, part, (*sources[first:], *sources[:first]), deadline)

        async with task_group() as group:
            jobs = [
                group.create_task(one(place, wanted))
                for place, wanted in enumerate(record.parts)
                if record.bounds[place] < record.bounds[place + 1]
            ]
        return [job.result() for job in jobs]

    async def _part(
        self, wanted: wire.PartDigest, empty: ReducedPart, sources: Sequence[PeerId], deadline: Deadline
    ) -> ReducedPart:
        if held := await self._part_cache.load(wanted.digest):
            return held
        order = sorted(sources, key=lambda peer: self._failures.get(peer, 0))[:MAX_HOLDERS]
        download = PartDownload(
            self._context.host,
            self._context.accounting,
            wanted=wanted,
            part=empty,
            silence_seconds=PART_SECONDS,
            on_lost=self._count_failure,
            on_received=self.sync_progress.record_arrival,
        )
        if not await download.run(lambda: order, deadline):
            raise StateUnavailable(f"none of {len(order)} peers asked has a part that is needed")
        return empty

    def _count_failure(self, source: PeerId, error: PeerError | BadPayload) -> None:
        """Name a source that is lost, unless it was gone already, and ask it last from now on."""
        if isinstance(error, (PeerGone, StoppedHere)):
            return
        if isinstance(error, PeerError):
            self._context.accounting.name(source, f"lost as a source: {error.why}")
        self._failures[source] = self._failures.get(source, 0) + 1

    async def decode(self, parts: Sequence[ReducedPart], into: Vector) -> None:
        """Decode the mean that these parts form, float32 (n), or of a fragment. If it raises `StateUnavailable`,
        `into` is undefined.
        """
        target = VectorView([into])
        for part in parts:
            try:
                await self._context.host.compute.run(partial(part.decode, target), 4 * (part.high - part.low))
            except BadPayload as error:  # a quorum signed it, so the peer that sent it is not to blame
                raise StateUnavailable(f"a decided part does not decode: {error}") from None

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def offered(self, chain: Chain) -> list[Head]:
        """Heads of a verified chain whose state is served and whose root is certified, cheapest first.

        The cost is that of the snapshot's missing bytes and of the means since then. So a partial download is continued
        until a newer snapshot costs less. Those that have led nowhere come last: a mean may be so small that an old
        snapshot costs least for ever, though nobody has the means since.
        """
        lineages = [*self._context.peers.snapshot_holders(), *([self._begun.at.key.lineage] if self._begun else [])]
        heads = [head for lineage in dict.fromkeys(lineages) if (head := chain.at(lineage))]
        sound = [head for head in heads if head.state_root != UNSETTLED]

        def rank(head: Head) -> tuple[bool, int, int]:
            return head.key.lineage in self._led_nowhere, self.cost_bytes(chain, head), -head.key.round

        return sorted(sound, key=rank)

    def leads_nowhere(self, lineage: bytes) -> None:
        """Note that the means since a snapshot could not be had."""
        self._led_nowhere[lineage] = True

    def cost_bytes(self, chain: Chain, head: Head) -> int:
        """Approximate bytes to fetch for a snapshot at this head, and for the means up to the head of the chain."""
        if self._begun and self._begun.at == head:
            missing_bytes = self._begun.missing_bytes
        else:
            missing_bytes = 8 * self._context.elements
            if self._context.snapshots.has_begun(head.key.lineage, head.key.round):
                missing_bytes //= 2  # an earlier process has fetched an unknown share of it
        return missing_bytes + self.mean_bytes * (chain.head.key.round - head.key.round)

    async def download(self, chain: Chain, deadline: Deadline) -> Snapshot:
        """Fetch the first of `offered` that can be fetched. A partial download is kept for the next attempt.

        Past the deadline, it continues while it makes progress. Raises `StateUnavailable`.
        """
        offered = self.offered(chain)
        for tried, head in enumerate(offered):
            share = (deadline - loop_time()) / (len(offered) - tried)  # leaves time for the next
            try:
                return await self.download_at(head, loop_time() + share)
            except StateUnavailable:
                continue
        raise StateUnavailable("no peer sent a snapshot of this chain")

    async def download_at(self, head: Head, deadline: Deadline) -> Snapshot:
        """Fetch the snapshot at one of the heads in `offered`, as `download` does."""
        download = self._download(head)
        try:
            return await download.fetch(lambda: self._donors(head), deadline)
        finally:
            self._begun = download if download.begun else self._begun

    async def from_former(self, chain: Chain, deadline: Deadline) -> Snapshot:
        """Fetch the state at the head of a chain from a former member or a successor. No record certifies it yet.

        If the last members are gone, others have to continue from there, and perhaps only one of them holds the state.
        A FORK of a majority of them then certifies it (`protocols.consensus.vote_tally`). Raises `StateUnavailable`.
        """
        donors = self.former_donors(chain.head)
        roots = await self._roots(chain.head, donors, min(deadline, loop_time() + INDEX_SECONDS))
        if not roots:
            raise StateUnavailable("no former member that is live has the state at the head of the chain")
        # All peers that ask these donors choose the same state, even if one of them is wrong. Otherwise they could not
        # agree on a FORK.
        root = min(roots, key=lambda root: (root in self._failed, -len(roots[root]), root))
        head = replace(chain.head, state_root=root)
        try:
            return await SnapshotDownload(self._context, head).fetch(lambda: roots[root], deadline)
        except StateUnavailable:
            self._failed = {*self._failed, root} if len(self._failed) < MAX_FAILED else {root}
            raise

    async def _roots(self, head: Head, donors: Sequence[PeerId], deadline: Deadline) -> dict[bytes, list[PeerId]]:
        """The state roots that these donors show for the head of the chain, each with its donors."""
        found: dict[bytes, list[PeerId]] = {}
        elements = self._context.elements

        async def one(donor: PeerId) -> None:
            with suppress(PeerError, NotHere):
                async with self._context.open(donor, BLOBS, deadline) as stream:
                    shown = await shown_index(stream, head.key.lineage, 2 * chunk_count(elements), SILENCE_SECONDS)
                if not isinstance(shown, Busy):
                    root = SnapshotIndex.unpack(elements, shown[0]).state_root(head.key.round)
                    found.setdefault(root, []).append(donor)

        async with task_group() as group:
            for donor in donors:
                group.create_task(one(donor))
        return found

    def former_donors(self, head: Head) -> list[PeerId]:
        """The donors of an uncertified state (`from_former`), from the latest roster that has any."""
        live = self._context.host.members.live()
        rosters = [{member.peer for member in each} for each in (head.roster, *head.former)]
        if not set(head.roster).isdisjoint(live) or not any(self._context.host.me in each for each in rosters):
            return []
        offering = set(self._donors(head)) & {member.peer for member in live}
        return next((sorted(offering & each) for each in rosters if offering & each), [])

    def _download(self, head: Head) -> SnapshotDownload:
        if self._begun and self._begun.at == head:
            return self._begun
        return SnapshotDownload(self._context, head)

    def _donors(self, head: Head) -> list[PeerId]:
        return self._context.peers.snapshot_holders().get(head.key.lineage, [])

    def caught_up(self) -> None:
        """Note that the fetched state is in use."""
        self._begun = None
