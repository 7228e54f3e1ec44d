"""Parts that others have: fetched for a vote, for a decision, or for a coordinator whose reducer is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from protocols import wire
from protocols.allreduce.parts import ReducedPart, part_message
from protocols.base import BadPayload, Deadline, PeerError, PeerId
from protocols.butterfly.context import ButterflyContext
from protocols.butterfly.part_cache import fetch_part
from protocols.butterfly.round_view import RoundView
from protocols.consensus import record as records
from protocols.consensus.record import Record

RETRY_SECONDS = 0.5


class PartFetcher:
    """Attributes:
    elements: length of the vector that the round averages.
    """

    def __init__(self, context: ButterflyContext, view: RoundView, elements: int) -> None:
        self._context, self._view, self._elements = context, view, elements
        self._host = context.host

    def hold(self) -> None:
        """Tell the vote what we hold."""
        exchange = self._view.exchange
        signed = [held.done for held in exchange.parts.values() if held.done and held.chunks] if exchange else []
        plan = exchange.task.resolved.digest if exchange else bytes(32)
        self._view.decision.holds(plan, signed, self._context.part_cache.of(self._view.head.key.lineage))

    def _within(self, seconds: float) -> Deadline:
        return min(self._view.deadline, asyncio.get_running_loop().time() + seconds)

    async def fetch_when_asked(self) -> None:
        """Our vote waits for parts that we do not have: get them from those who vote already."""
        while await self._view.until(lambda: bool(self._view.decision.wanted) or self._view.over()):
            if self._view.over():
                return
            record, decision = records.decode(self._view.decision.proposed), self._view.decision
            digest, ballot = records.lineage(decision.proposed), decision.vote.ballot
            wanted, decision.wanted = decision.wanted, ()
            voters = [member.peer for member in decision.tally.voters(ballot, digest)]
            for index, part in enumerate(record.parts):
                if part.digest in wanted:
                    await self.obtain(record, index, [decision.tally.coordinator(ballot), *voters])
            self.hold()
            missing = tuple(
                each for each in wanted if each not in self._context.part_cache.of(self._view.head.key.lineage)
            )
            if missing and not decision.wanted and decision.proposed == records.encode(record):
                await self._view.until(self._view.over, self._within(RETRY_SECONDS))
                decision.wanted = missing

    async def lost_part(self, plan: bytes, done: wire.PartDone, holders: Sequence[PeerId]) -> ReducedPart | None:
        """Get a part of the present plan, whose reducer is lost, from those who hold it."""
        exchange = self._view.exchange
        if exchange is None or done.reducer >= len(exchange.task.resolved.peers):
            return None
        signer = exchange.task.resolved.peers[done.reducer]
        if not self._host.signer.verify(signer, part_message(self._view.head.key, plan, done), done.signature):
            return None
        low, high = exchange.task.resolved.part(done.part)
        span = (low, high, self._context.settings.chunk_elements)
        held = await self._ask(holders, done.result, span, len(exchange.task.resolved.peers))
        if held:
            held.done = done
        return held

    async def obtain(self, record: Record, index: int, holders: Sequence[PeerId]) -> ReducedPart | None:
        """Get a part of a record, and keep it."""
        part = record.parts[index]
        await self._underway(record, index)
        if held := self._context.part_cache.get(part.digest):
            self._context.part_cache.put(self._view.head.key.lineage, held)
            return held
        if not record.tiles(self._elements):
            return None
        span = (record.bounds[index], record.bounds[index + 1], self._context.settings.chunk_elements)
        held = await self._ask(holders, part, span, len(record.peers))
        if held:
            self._convict(index, held)
            self._context.part_cache.put(self._view.head.key.lineage, held)
        return held

    async def _underway(self, record: Record, index: int) -> None:
        """Wait for a part that our own data phase is about to have, for as long as it moves."""
        exchange = self._view.exchange
        if exchange is None or exchange.task.resolved.digest != record.plan:
            return

        def settled() -> bool:
            return index in exchange.parts or index in exchange.failed or self._view.exchange is not exchange

        loop = asyncio.get_running_loop()
        while not settled():
            until = min(exchange.task.deadline, exchange.moved + self._view.decision.patience_seconds)
            if loop.time() >= until:
                return
            await self._view.until(settled, until)

    async def _ask(
        self, holders: Sequence[PeerId], part: wire.PartDigest, span: tuple[int, int, int], members: int
    ) -> ReducedPart | None:
        """Ask one after the other, none for longer than a ballot may take. The plan had so many members."""
        codec = self._context.codec.reduced(members)
        live = {member.peer for member in self._host.members.live()}
        for peer in dict.fromkeys(holders):
            if peer == self._context.me.peer or peer not in live:
                continue
            deadline = self._within(self._view.decision.patience_seconds)
            try:
                held = await fetch_part(self._host, peer, part, codec, span, deadline)
                await self._host.compute.run(partial(held.decode, None), 4 * (held.high - held.low))
                return held
            except BadPayload as error:
                self._context.accounting.name(peer, f"refused as a source: {error}")
            except PeerError:
                continue
        return None

    def _convict(self, index: int, held: ReducedPart) -> None:
        """Two different parts under one reducer's signature are proof against it."""
        exchange = self._view.exchange
        mine = exchange.parts.get(index) if exchange else None
        if not exchange or not mine or not mine.done or not held.done or mine.result == held.result:
            return
        resolved, theirs = exchange.task.resolved, held.done
        if theirs.reducer != mine.done.reducer or theirs.part != index:
            return
        peer = resolved.peers[theirs.reducer]
        if self._host.signer.verify(peer, exchange.task.message(theirs), theirs.signature):
            self._context.accounting.name(peer, f"signed two different results for part {index}")
