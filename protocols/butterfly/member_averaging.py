"""A member's own averaging in a round: the data phase of each plan that is called, then the decided mean."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from protocols import wire
from protocols.aio import loop_time, task_group
from protocols.allreduce.all_reduce import AllReduce
from protocols.allreduce.parts import ReducedPart, ReduceJob
from protocols.allreduce.plan import ResolvedPlan
from protocols.base import AveragingResult, BadPayload, Outcome
from protocols.butterfly.attempt import RoundAttempt
from protocols.butterfly.part_fetcher import PartFetcher
from protocols.consensus import record as records
from protocols.consensus.messages import Certificate
from protocols.vectors.views import VectorView


class MemberAveraging:
    """Averages `mine` in one attempt at a round; the mean goes into `into`."""

    def __init__(self, attempt: RoundAttempt, fetcher: PartFetcher, mine: VectorView, into: VectorView) -> None:
        self._attempt, self._context, self._fetcher = attempt, attempt.context, fetcher
        self._mine, self._into = mine, into
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> AveragingResult:
        """Run the data phase of each plan that is called, until the round is over and the decided mean is here."""
        attempt = self._attempt
        async with task_group() as group:
            while not attempt.over():
                resolved = attempt.call.resolved
                if resolved and self._context.me.peer in resolved.peers:
                    self._follow(group, resolved)
                if not await attempt.until(lambda: attempt.over() or attempt.call.resolved is not resolved):  # noqa: B023 - awaited
                    break
            self._context.part_cache.gate.open()
            parts = await self._collect()
            if self._running:  # nothing may write to `into` any more while it is decoded, or after the return
                self._running.cancel()
                await asyncio.wait([self._running])
        return await self._conclude(parts)

    # -- the data phase -----------------------------------------------------------------------------------------------

    def _follow(self, group: asyncio.TaskGroup, resolved: ResolvedPlan) -> None:
        """Begin the data phase of a plan, or continue it under another version of that plan."""
        exchange = self._attempt.exchange_of(resolved.digest)
        if exchange is None:
            if self._running:
                self._running.cancel()
            exchange = self._start(resolved)
            self._running = group.create_task(exchange.run())
        exchange.assign(resolved)

    def _start(self, resolved: ResolvedPlan) -> AllReduce:
        context, attempt, driver = self._context, self._attempt, self._attempt.driver
        attempt.state.data_phase_planned(resolved.phase_seconds)
        bound = [value.record for value in (driver.vote.accepted, driver.vote.forked) if value]
        context.part_cache.retain(attempt.head.key.lineage, {part.digest for record in bound for part in record.parts})
        exchange = AllReduce(context.host, context.accounting, self._task(resolved), self._on_exchange)
        attempt.exchange = exchange
        live = context.live_peers()
        for peer in resolved.peers:
            if peer not in live and peer != context.me.peer:
                exchange.lose(peer, "gone")
        context.part_cache.gate.close(exchange.task.deadline)
        self._fetcher.hold()
        attempt.changed.notify()
        return exchange

    def _task(self, resolved: ResolvedPlan) -> ReduceJob:
        context, attempt = self._context, self._attempt
        patience_seconds = attempt.driver.patience_seconds
        return ReduceJob(
            key=attempt.head.key,
            resolved=resolved,
            me=context.me.peer,
            mine=self._mine,
            into=self._into,
            format=context.format,
            compute=context.host.compute,
            signer=context.host.signer,
            silent=max(loop_time(), attempt.call.cut_at) + patience_seconds,
            patience_seconds=patience_seconds,
            deadline=attempt.call.hand_in_until(),
            progress=attempt.driver.moved,
        )

    def _on_exchange(self) -> None:
        """Handle a part that came in, or whose reducer failed."""
        attempt, exchange = self._attempt, self._attempt.exchange
        assert exchange is not None
        for held in exchange.parts.values():
            self._context.part_cache.put(attempt.head.key.lineage, held)
        self._fetcher.hold()
        attempt.driver.progress()
        for peer in exchange.take_silent():
            attempt.driver.suspect(peer)
        attempt.changed.notify()

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _collect(self) -> list[ReducedPart] | None:
        """The parts of the decided record, fetched if missing. None if this peer cannot get them or use them."""
        certificate = self._attempt.driver.certificate
        record = records.decode(certificate.record) if certificate else None
        if certificate is None or record is None or record.state_root != self._attempt.head.state_root:
            return None
        voters = [vote.voter.peer for vote in certificate.votes]
        parts = []
        for index in range(len(record.parts)):
            held = await self._fetcher.obtain(record, index, voters)
            if held is None:
                return None
            parts.append(held)
        return parts

    async def _conclude(self, parts: list[ReducedPart] | None) -> AveragingResult:
        certificate = self._attempt.driver.certificate
        if certificate is None:
            return AveragingResult(Outcome.SUPERSEDED if self._attempt.over() else Outcome.UNDECIDED)
        if records.decode(certificate.record).state_root != self._attempt.head.state_root:
            self._context.accounting.name(self._context.me.peer, "this peer has another state than the decided one")
        if parts is None or not await self._decode(parts):
            return AveragingResult(Outcome.SUPERSEDED)
        return self._decided(certificate)

    def _decided(self, certificate: Certificate) -> AveragingResult:
        record, resolved = records.decode(certificate.record), self._attempt.call.resolved
        resolved = resolved if resolved and resolved.digest == record.plan else None
        return AveragingResult(
            Outcome.COMMITTED if record.averaged else Outcome.SKIPPED,
            record=certificate.record,
            certificate=wire.encode(certificate),
            contributions=records.contributions(record.peers, record.parts),
            weights=dict(zip(resolved.peers, resolved.weights, strict=True)) if resolved and record.averaged else {},
            blamed=resolved.clamped if resolved else (),
        )

    async def _decode(self, parts: Sequence[ReducedPart]) -> bool:
        """Decode the parts that the last data phase did not decode; False if one does not decode."""
        exchange = self._attempt.exchange
        for index, held in enumerate(parts):
            if exchange and exchange.parts.get(index) is held and index not in exchange.restarted:
                continue
            try:
                await self._context.host.compute.run(partial(held.decode, self._into), 4 * (held.high - held.low))
            except BadPayload:
                return False
        return True
