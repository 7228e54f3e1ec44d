"""A member's own averaging in a round: the data phase of whatever is called, then the mean that was decided."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from protocols import wire
from protocols.aio import task_group
from protocols.allreduce.all_reduce import AllReduce
from protocols.allreduce.parts import ReducedPart, ReduceJob
from protocols.allreduce.plan import BUDGET_FLOOR_SECONDS, BUDGET_MULTIPLE, ResolvedPlan
from protocols.base import AveragingResult, BadPayload, Outcome
from protocols.butterfly.context import ButterflyContext
from protocols.butterfly.part_fetcher import PartFetcher
from protocols.butterfly.round_view import RoundView
from protocols.consensus import record as records
from protocols.consensus.messages import Certificate
from protocols.vectors import VectorView


class MemberAveraging:
    """What becomes of `mine`; the mean goes into `into`."""

    def __init__(
        self, desk: ButterflyContext, seat: RoundView, sources: PartFetcher, mine: VectorView, into: VectorView
    ) -> None:
        self._desk, self._seat, self._sources = desk, seat, sources
        self._mine, self._into = mine, into
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> AveragingResult:
        """Run the data phase of whatever is called, until the round is over and we have what was decided."""
        seat = self._seat
        async with task_group() as group:
            while not seat.over():
                terms = seat.call.terms
                if terms and self._desk.me.peer in terms.peers:
                    self._follow(group, terms)
                if not await seat.until(lambda: seat.over() or seat.call.terms is not terms):  # noqa: B023 - awaited
                    break
            self._desk.shelf.gate.open()
            parts = await self._collect()
            if self._running:  # nothing may write to `into` any more while it is decoded, or after we return
                self._running.cancel()
                await asyncio.wait([self._running])
        return await self._conclude(parts)

    # -- the data phase -----------------------------------------------------------------------------------------------

    def _follow(self, group: asyncio.TaskGroup, terms: ResolvedPlan) -> None:
        """Begin the data phase of a plan, or go on with it under another version of that plan."""
        exchange = self._seat.exchange
        if exchange is None or exchange.task.terms.digest != terms.digest:
            if self._running:
                self._running.cancel()
            exchange = self._start(terms)
            self._running = group.create_task(exchange.run())
        exchange.assign(terms)

    def _start(self, terms: ResolvedPlan) -> AllReduce:
        desk, seat, decision = self._desk, self._seat, self._seat.decision
        decision.phase_seconds = (terms.plan.budget_seconds - BUDGET_FLOOR_SECONDS) / BUDGET_MULTIPLE
        vote, lineage = decision.vote, seat.head.key.lineage
        bound = [value.record for value in (vote.accepted, vote.forked) if value]
        desk.shelf.retain(lineage, {part.digest for record in bound for part in record.parts})
        seat.exchange = exchange = AllReduce(desk.host, desk.ledger, self._task(terms), self._on_exchange)
        live = {member.peer for member in desk.host.members.live()}
        for peer in terms.peers:
            if peer not in live and peer != desk.me.peer:
                exchange.lose(peer, "gone")
        desk.shelf.gate.close(exchange.task.deadline)
        self._sources.hold()
        seat.bell.notify()
        return exchange

    def _task(self, terms: ResolvedPlan) -> ReduceJob:
        desk, seat = self._desk, self._seat
        patience_seconds = seat.decision.patience_seconds
        return ReduceJob(
            key=seat.head.key,
            terms=terms,
            me=desk.me.peer,
            mine=self._mine,
            into=self._into,
            codec=desk.codec,
            chunk_elements=desk.settings.chunk_elements,
            compute=desk.host.compute,
            signer=desk.host.signer,
            silent=max(asyncio.get_running_loop().time(), seat.call.cut_at) + patience_seconds,
            patience_seconds=patience_seconds,
            deadline=seat.call.hand_in_until(),
            progress=seat.decision.moved,
        )

    def _on_exchange(self) -> None:
        """A part came in, or cannot be had from its reducer."""
        seat, exchange = self._seat, self._seat.exchange
        assert exchange is not None
        for held in exchange.parts.values():
            self._desk.shelf.put(seat.head.key.lineage, held)
        self._sources.hold()
        seat.decision.progress()
        for peer in exchange.take_silent():
            seat.decision.suspect(peer)
        seat.bell.notify()

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _collect(self) -> list[ReducedPart] | None:
        """The parts of what was decided, got from others where we lack them; None if they cannot be had here."""
        certificate = self._seat.decision.certificate
        record = records.decode(certificate.record) if certificate else None
        if certificate is None or record is None or record.state_root != self._seat.head.state_root:
            return None
        voters = [vote.voter.peer for vote in certificate.votes]
        parts = []
        for index in range(len(record.parts)):
            held = await self._sources.obtain(record, index, voters)
            if held is None:
                return None
            parts.append(held)
        return parts

    async def _conclude(self, parts: list[ReducedPart] | None) -> AveragingResult:
        certificate = self._seat.decision.certificate
        if certificate is None:
            return AveragingResult(Outcome.SUPERSEDED if self._seat.over() else Outcome.UNDECIDED)
        if records.decode(certificate.record).state_root != self._seat.head.state_root:
            self._desk.ledger.name(self._desk.me.peer, "our state is not the one that was decided on")
        if parts is None or not await self._decode(parts):
            return AveragingResult(Outcome.SUPERSEDED)
        return self._decided(certificate)

    def _decided(self, certificate: Certificate) -> AveragingResult:
        record, terms = records.decode(certificate.record), self._seat.call.terms
        terms = terms if terms and terms.digest == record.plan else None
        return AveragingResult(
            Outcome.COMMITTED if record.averaged else Outcome.SKIPPED,
            record=certificate.record,
            certificate=wire.encode(certificate),
            contributions=records.contributions(record.peers, record.parts),
            weights=dict(zip(terms.peers, terms.weights, strict=True)) if terms and record.averaged else {},
            blamed=terms.clamped if terms else (),
        )

    async def _decode(self, parts: Sequence[ReducedPart]) -> bool:
        """Decode what did not come in by the data phase that ran last; False if it does not decode."""
        exchange = self._seat.exchange
        for index, held in enumerate(parts):
            if exchange and exchange.parts.get(index) is held and index not in exchange.torn:
                continue
            try:
                await self._desk.host.compute.run(partial(held.decode, self._into), 4 * (held.high - held.low))
            except BadPayload:
                return False
        return True
