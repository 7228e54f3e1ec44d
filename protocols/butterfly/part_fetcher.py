"""Fetching parts from other peers: for a vote, for a decision, or for a coordinator that has lost a reducer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from protocols import wire
from protocols.aio import loop_time
from protocols.allreduce.parts import ReducedPart, part_message
from protocols.base import BadPayload, Deadline, PeerError, PeerId
from protocols.butterfly.attempt import RoundAttempt
from protocols.butterfly.part_cache import fetch_part
from protocols.consensus import record as records
from protocols.consensus.record import Record

RETRY_SECONDS = 0.5


class PartFetcher:
    """Fetches the parts of one attempt at a round."""

    def __init__(self, attempt: RoundAttempt) -> None:
        self._attempt, self._context = attempt, attempt.context
        self._elements = attempt.context.elements(attempt.head)

    def hold(self) -> None:
        """Report to the vote which parts are here."""
        exchange = self._attempt.exchange
        signed = [held.done for held in exchange.parts.values() if held.done and held.chunks] if exchange else []
        plan = exchange.task.resolved.digest if exchange else bytes(32)
        self._attempt.driver.holds(plan, signed, self._here())

    def _here(self) -> tuple[bytes, ...]:
        return self._context.part_cache.of(self._attempt.head.key.lineage)

    def _keep(self, held: ReducedPart) -> None:
        self._context.part_cache.put(self._attempt.head.key.lineage, held)

    def _within(self, seconds: float) -> Deadline:
        return min(self._attempt.deadline, loop_time() + seconds)

    async def fetch_when_asked(self) -> None:
        """Fetch the parts that this member's vote waits for, from the members that have voted already."""
        attempt, driver, state = self._attempt, self._attempt.driver, self._attempt.state
        while await attempt.until(lambda: bool(state.wanted) or attempt.over()):
            if attempt.over():
                return
            proposed, ballot = state.proposed, driver.vote.ballot
            record, wanted = records.decode(proposed), state.fetch_begun()
            voters = driver.tally.voters(ballot, records.lineage(proposed))
            holders = [driver.tally.coordinator(ballot), *(member.peer for member in voters)]
            for index, part in enumerate(record.parts):
                if part.digest in wanted:
                    await self.obtain(record, index, holders)
            self.hold()
            missing = tuple(each for each in wanted if each not in self._here())
            if missing and not state.wanted and state.proposed == proposed:
                await attempt.until(attempt.over, self._within(RETRY_SECONDS))
                state.fetch_failed(missing)

    async def lost_part(self, plan: bytes, done: wire.PartDone, holders: Sequence[PeerId]) -> ReducedPart | None:
        """Fetch a part of the present plan, whose reducer is lost, from the peers that hold it."""
        exchange = self._attempt.exchange
        if exchange is None or done.reducer >= len(exchange.task.resolved.peers):
            return None
        resolved = exchange.task.resolved
        message = part_message(self._attempt.head.key, plan, done)
        if not self._context.host.signer.verify(resolved.peers[done.reducer], message, done.signature):
            return None
        held = await self._ask(holders, done.result, resolved.part(done.part), len(resolved.peers))
        if held:
            held.done = done
        return held

    async def obtain(self, record: Record, index: int, holders: Sequence[PeerId]) -> ReducedPart | None:
        """Get a part of a record from memory or from its holders, and keep it. None if that fails."""
        part = record.parts[index]
        await self._await_own_part(record, index)
        if held := self._context.part_cache.get(part.digest):
            self._keep(held)
            return held
        if not record.tiles(self._elements):
            return None
        held = await self._ask(holders, part, (record.bounds[index], record.bounds[index + 1]), len(record.peers))
        if held:
            self._blame_double_signer(index, held)
            self._keep(held)
        return held

    async def _await_own_part(self, record: Record, index: int) -> None:
        """Wait for a part that this member's own data phase may still complete, as long as data flows."""
        exchange = self._attempt.exchange_of(record.plan)
        if exchange is None:
            return

        def settled() -> bool:
            return index in exchange.parts or index in exchange.failed or self._attempt.exchange is not exchange

        def flows_until() -> Deadline:
            return min(exchange.task.deadline, exchange.moved + self._attempt.driver.patience_seconds)

        while not settled() and loop_time() < flows_until():
            await self._attempt.until(settled, flows_until())

    async def _ask(
        self, holders: Sequence[PeerId], part: wire.PartDigest, bounds: tuple[int, int], members: int
    ) -> ReducedPart | None:
        """Ask one holder after the other, each for at most the time of a ballot. Blames a holder of a wrong part.

        Args:
            bounds: element range of the part.
            members: number of members of the plan.
        """
        live = self._context.live_peers()
        for peer in dict.fromkeys(holders):
            if peer == self._context.me.peer or peer not in live:
                continue
            deadline = self._within(self._attempt.driver.patience_seconds)
            empty = self._context.format.part(*bounds, members)
            try:
                held = await fetch_part(self._context.host, peer, part, empty, deadline)
                await self._context.host.compute.run(partial(held.decode, None), 4 * (held.high - held.low))
                return held
            except BadPayload as error:
                self._context.accounting.name(peer, f"refused as a source: {error}")
            except PeerError:
                continue
        return None

    def _blame_double_signer(self, index: int, held: ReducedPart) -> None:
        """Blame a reducer that signed two different results for one part. The signatures prove it."""
        exchange = self._attempt.exchange
        mine = exchange.parts.get(index) if exchange else None
        if not exchange or not mine or not mine.done or not held.done or mine.result == held.result:
            return
        resolved, theirs = exchange.task.resolved, held.done
        if theirs.reducer != mine.done.reducer or theirs.part != index:
            return
        peer = resolved.peers[theirs.reducer]
        if self._context.host.signer.verify(peer, exchange.task.message(theirs), theirs.signature):
            self._context.accounting.name(peer, f"signed two different results for part {index}")
