"""The parts of a record that a member lacks, for its vote or for the decided mean.

It waits for those that its own data phase may still bring, and fetches the others by their digests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from protocols import wire
from protocols.aio import loop_time, task_group
from protocols.allreduce.parts import PartFormat, ReducedPart
from protocols.base import BadPayload, Deadline, PeerId
from protocols.blobs.parts import PARTS_AT_ONCE, PartCache, PartDownload
from protocols.butterfly.attempt import Attempt
from protocols.consensus import record as records
from protocols.consensus.record import Record

RETRY_SECONDS = 0.5  # pause before parts that could not be fetched are asked for again
OWN_PART_SECONDS = 0.5
"""Besides half of the data phase: how long no data comes in until a part of a decided mean is asked of the voters, who
all hold it. Its reducer may be stopped."""


class MissingParts:
    def __init__(self, attempt: Attempt, part_format: PartFormat, part_cache: PartCache) -> None:
        self._attempt, self._head, self._me, self._vote = attempt, attempt.head, attempt.me, attempt.vote
        self._host, self._accounting = attempt.host, attempt.accounting
        self._format, self._part_cache = part_format, part_cache

    async def fetch_for_vote(self) -> None:
        """Fetch the parts that this member's vote waits for, from the members that have voted already.

        Past the attempt's deadline nothing is fetched, though the attempt lasts until an overlapped step has ended.
        """
        attempt, vote = self._attempt, self._vote
        while await attempt.until(lambda: bool(vote.wanted) or attempt.over()):
            if attempt.over() or loop_time() >= attempt.deadline:
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
                await attempt.until(lambda: attempt.over() or bool(vote.wanted), attempt.within(RETRY_SECONDS))
                vote.wanted = vote.wanted or missing

    async def _obtain(
        self, record: Record, index: int, holders: Sequence[PeerId], still_seconds: float
    ) -> ReducedPart | None:
        """A part of a record: from this member's own data phase until no data has come in there for so long."""
        part = record.parts[index]
        await self._await_own_part(record, index, still_seconds)
        held = self._part_cache.get(part.digest)
        if held is None and record.tiles(self._attempt.elements):
            held = await self.fetch(holders, part, self._format.part_of(record, index))
            if held:
                self._blame_double_signer(record, index, held)
                if exchange := self._attempt.exchange_of(record.plan):
                    exchange.pass_on(index, held)
        if held:
            self._vote.keep(held)
        return held

    async def _await_own_part(self, record: Record, index: int, still_seconds: float) -> None:
        """Wait for a part that this member's own data phase may still complete, as long as data flows."""
        exchange = self._attempt.exchange_of(record.plan)
        if exchange is None:
            return

        def settled() -> bool:
            is_replaced = self._attempt.exchange_of(record.plan) is not exchange
            return is_replaced or index in exchange.parts or index in exchange.failed

        def flows_until() -> Deadline:
            return min(exchange.task.deadline, exchange.moved + still_seconds)

        while not settled() and loop_time() < flows_until():
            await self._attempt.until(settled, flows_until())

    async def fetch(self, holders: Sequence[PeerId], wanted: wire.PartDigest, held: ReducedPart) -> ReducedPart | None:
        """Fetch a part into `held`, which is empty, from its holders. Each may be silent for the time of a ballot."""
        live, patience_seconds = self._attempt.live_peers(), self._vote.patience_seconds
        asked = [peer for peer in dict.fromkeys(holders) if peer != self._me.peer and peer in live]
        download = PartDownload(
            self._host, self._accounting, wanted=wanted, part=held, silence_seconds=patience_seconds
        )
        if not await download.run(lambda: asked, self._attempt.within(patience_seconds * len(asked))):
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
        exchange, theirs = self._attempt.exchange_of(record.plan), held.done
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
        if self._attempt.live_peers().isdisjoint(voters):  # it sees few of the roster of a large run, which has decided
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
