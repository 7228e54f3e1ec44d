"""The parts of a record that a member lacks, for its vote or for the decided mean.

It waits for those that its own data phase may still bring, and fetches the others by their digests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from protocols import wire
from protocols.aio import Notifier, loop_time, task_group
from protocols.allreduce.all_reduce import AllReduce
from protocols.allreduce.parts import PartFormat, ReducedPart
from protocols.base import BadPayload, Deadline, Head, PeerId
from protocols.blobs.parts import PARTS_AT_ONCE, PartCache, PartDownload
from protocols.butterfly.vote import RoundVote
from protocols.consensus import record as records
from protocols.consensus.record import Record
from protocols.streams.endpoint import ProtocolEndpoint

RETRY_SECONDS = 0.5  # pause before parts that could not be fetched are asked for again
OWN_PART_SECONDS = 0.5
"""Besides half of the data phase: how long no data comes in until a part of a decided mean is asked of the voters, who
all hold it. Its reducer may be stopped."""


class MissingParts:
    def __init__(
        self,
        *,
        endpoint: ProtocolEndpoint,
        head: Head,
        vote: RoundVote,
        part_format: PartFormat,
        part_cache: PartCache,
        deadline: Deadline,
        changed: Notifier,
        over: Callable[[], bool],
        exchange_of: Callable[[bytes], AllReduce | None],
    ) -> None:
        """`exchange_of` returns the data phase of the plan with this digest, if that is the latest one. `changed` is
        notified of every event of the attempt, and `over` says whether that has ended.
        """
        self._host, self._me, self._accounting = endpoint.host, endpoint.me, endpoint.accounting
        self._head, self._vote, self._format, self._part_cache = head, vote, part_format, part_cache
        self._elements = endpoint.settings.elements[head.key.fragment]
        self._deadline, self._changed, self._over, self._exchange_of = deadline, changed, over, exchange_of

    async def fetch_for_vote(self) -> None:
        """Fetch the parts that this member's vote waits for, from the members that have voted already.

        Past the attempt's deadline nothing is fetched, though the attempt lasts until an overlapped step has ended.
        """
        vote = self._vote
        while await self._until(lambda: bool(vote.wanted) or self._over()):
            if self._over() or loop_time() >= self._deadline:
                return
            proposed, wanted, ballot = vote.proposed, vote.wanted, vote.paxos.ballot
            vote.wanted = ()
            value = vote.tally.value(ballot, proposed)
            assert value is not None  # the vote waits for it
            voters = vote.tally.voters(ballot, value.digest)
            holders = [vote.tally.coordinator(ballot), *(member.peer for member in voters)]
            for index, part in enumerate(value.record.parts):
                if part.digest in wanted:
                    await self._obtain(value.record, index, holders, vote.patience_seconds)
            missing = tuple(each for each in wanted if each not in self._part_cache.of(self._head.key.lineage))
            if missing and not vote.wanted:
                # A newer proposal may come meanwhile. Its parts are wanted then, and those of this one no more.
                await self._until(lambda: self._over() or bool(vote.wanted), self._within(RETRY_SECONDS))
                vote.wanted = vote.wanted or missing

    async def _obtain(
        self, record: Record, index: int, holders: Sequence[PeerId], still_seconds: float
    ) -> ReducedPart | None:
        """A part of a record: from this member's own data phase until no data has come in there for so long."""
        part = record.parts[index]
        await self._await_own_part(record, index, still_seconds)
        held = self._part_cache.get(part.digest)
        if held is None and record.tiles(self._elements):
            held = await self.fetch(holders, part, self._format.part_of(record, index))
            if held:
                self._blame_double_signer(record, index, held)
                if exchange := self._exchange_of(record.plan):
                    exchange.pass_on(index, held)
        if held:
            self._vote.keep(held)
        return held

    async def _await_own_part(self, record: Record, index: int, still_seconds: float) -> None:
        """Wait for a part that this member's own data phase may still complete, as long as data flows."""
        exchange = self._exchange_of(record.plan)
        if exchange is None:
            return

        def settled() -> bool:
            return index in exchange.parts or index in exchange.failed or self._exchange_of(record.plan) is not exchange

        def flows_until() -> Deadline:
            return min(exchange.task.deadline, exchange.moved + still_seconds)

        while not settled() and loop_time() < flows_until():
            await self._until(settled, flows_until())

    async def fetch(self, holders: Sequence[PeerId], wanted: wire.PartDigest, held: ReducedPart) -> ReducedPart | None:
        """Fetch a part into `held`, which is empty, from its holders. Each may be silent for the time of a ballot."""
        live, patience_seconds = self._live_peers(), self._vote.patience_seconds
        asked = [peer for peer in dict.fromkeys(holders) if peer != self._me.peer and peer in live]
        download = PartDownload(
            self._host, self._accounting, wanted=wanted, part=held, silence_seconds=patience_seconds
        )
        if not await download.run(lambda: asked, self._within(patience_seconds * len(asked))):
            return None
        try:
            await self._host.compute.run(partial(held.decode, None), 4 * (held.high - held.low))
        except BadPayload as error:
            for peer in download.brought:
                self._accounting.name(peer, f"refused as a source: {error}")
            return None
        return held

    def _blame_double_signer(self, record: Record, index: int, held: ReducedPart) -> None:
        """Blame a reducer that signed two different results for one part. The signatures prove it."""
        exchange, theirs = self._exchange_of(record.plan), held.done
        mine = exchange.parts.get(index) if exchange else None
        if not exchange or not mine or not mine.done or not theirs or mine.result == held.result:
            return
        if theirs.reducer != mine.done.reducer or theirs.part != index:
            return
        peer = exchange.task.whole.peers[theirs.reducer]
        if self._host.signer.verify(peer, exchange.task.message(theirs), theirs.signature):
            self._accounting.name(peer, f"signed two different results for part {index}")

    async def collect(self, mates: Sequence[PeerId]) -> list[ReducedPart] | None:
        """The parts of the decided record, fetched if missing: from `mates` first, then from the voters. None if this
        peer cannot get them or use them.
        """
        certificate, record = self._vote.certificate, self._vote.decided
        if certificate is None or record is None or record.state_root != self._head.state_root:
            return None
        lot, turn = self._head.key.lineage + self._me.peer.encode(), asyncio.Semaphore(PARTS_AT_ONCE)
        voters = records.drawn(lot, (vote.voter.peer for vote in certificate.votes))
        if self._live_peers().isdisjoint(
            voters
        ):  # an observer of a large run sees few of the roster, which has decided
            voters = records.drawn(lot, (member.peer for member in self._head.roster))
        holders = (*(peer for peer in records.drawn(lot, mates) if peer not in voters), *voters)

        still_seconds = OWN_PART_SECONDS + self._vote.phase_seconds / 2

        async def one(index: int) -> ReducedPart | None:
            async with turn:
                return await self._obtain(record, index, holders, still_seconds)

        async with task_group() as group:
            jobs = [group.create_task(one(index)) for index in range(len(record.parts))]
        parts = [part for job in jobs if (part := job.result())]
        return parts if len(parts) == len(jobs) else None

    async def _until(self, condition: Callable[[], bool], deadline: Deadline | None = None) -> bool:
        return await self._changed.reached(condition, self._deadline if deadline is None else deadline)

    def _within(self, seconds: float) -> Deadline:
        return min(self._deadline, loop_time() + seconds)

    def _live_peers(self) -> set[PeerId]:
        return {member.peer for member in self._host.members.live()}
