"""What the coordinator of a ballot does while it is free to choose: call, see to every part, propose.

It goes on with a data phase that runs, gives what a lost reducer had to another, and proposes to skip the round only
when the time for it is spent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence

from protocols.allreduce import plan as planning
from protocols.allreduce.all_reduce import AllReduce
from protocols.allreduce.parts import ReducedPart
from protocols.base import Deadline, Member, PeerId
from protocols.butterfly.context import ButterflyContext
from protocols.butterfly.part_fetcher import PartFetcher
from protocols.butterfly.round_view import RoundView
from protocols.consensus import record as records
from protocols.consensus.record import Kind, Record
from protocols.consensus.vote_tally import max_admitted, min_retained
from protocols.wire import MAX_ROSTER, Plan


class RoundCoordinator:
    """Attributes:
    candidates: who asks to be admitted, and holds the state.
    """

    def __init__(self, context: ButterflyContext, view: RoundView, sources: PartFetcher) -> None:
        self._host, self._me, self._post = context.host, context.me, context.post
        self._view, self._sources = view, sources
        self.candidates: dict[PeerId, Member] = {}

    async def lead(self, ballot: int) -> None:
        """See a ballot of ours through to its proposal; ends when it is no longer ours."""
        view = self._view
        call, decision = view.call, view.decision
        if call.resolved is None:
            if not await call.due():
                return
            if call.resolved is None and decision.leading == ballot:
                self._publish(call.draw(ballot, self._suspects(ballot)))
        elif ballot > call.resolved.plan.ballot:  # some may not have heard of it
            self._publish(planning.reassign_parts(call.resolved.plan, {}, ballot))
        await self._fetch_what_others_hold()
        while decision.leading == ballot and (resolved := call.resolved):
            now, until = asyncio.get_running_loop().time(), self._until(resolved)
            exchange = self._exchange(resolved)
            if exchange and exchange.complete:
                return decision.chosen(ballot, records.encode(self._outcome(resolved, exchange)))
            if now >= until:
                return decision.chosen(ballot, records.encode(self._skip(resolved)))
            if lost := self._lost(resolved, exchange, now):
                self._publish(
                    planning.reassign_parts(
                        resolved.plan, dict.fromkeys(lost, self._replacement_reducer(resolved)), ballot
                    )
                )
            overdue = self._overdue(resolved, exchange)
            await self._wait(resolved, min(until, overdue) if overdue > now else until)

    async def _wait(self, resolved: planning.ResolvedPlan, until: Deadline) -> None:
        view, exchange = self._view, self._view.exchange
        known = self._progress(exchange)
        try:
            await view.notifier.until(
                lambda: (
                    view.call.resolved is not resolved
                    or view.decision.leading is None
                    or view.exchange is not exchange
                    or self._progress(exchange) != known
                ),
                until,
            )
        except TimeoutError:
            return

    @staticmethod
    def _progress(exchange: AllReduce | None) -> tuple[int, int]:
        return (len(exchange.parts), len(exchange.failed)) if exchange else (0, 0)

    def _publish(self, plan: Plan) -> None:
        self._view.decision.called = plan.ballot
        for member in self._view.head.roster:
            if member != self._me:
                self._post.send(member.peer, plan)
        self._view.call.on_plan(plan)

    def _exchange(self, resolved: planning.ResolvedPlan) -> AllReduce | None:
        """Our own data phase, if it is of this plan."""
        exchange = self._view.exchange
        return exchange if exchange and exchange.task.resolved.digest == resolved.digest else None

    def _until(self, resolved: planning.ResolvedPlan) -> Deadline:
        return min(self._view.deadline, self._view.call.cut_at + resolved.plan.budget_seconds)

    # -- what is lost -------------------------------------------------------------------------------------------------

    def _lost(self, resolved: planning.ResolvedPlan, exchange: AllReduce | None, now: float) -> list[int]:
        """Parts that we do not have and whose reducer is gone, failed us, or is long overdue."""
        if exchange is None:
            return []
        live = {member.peer for member in self._host.members.live()}
        overdue = now >= self._overdue(resolved, exchange)
        return [
            part
            for part in range(len(resolved.plan.reducers))
            if part not in exchange.parts
            and resolved.reducer(part) != self._me.peer
            and (resolved.reducer(part) not in live or exchange.failed.get(part) == resolved.reducer(part) or overdue)
        ]

    def _overdue(self, resolved: planning.ResolvedPlan, exchange: AllReduce | None) -> Deadline:
        """When a part is overdue: others, which should take as long, came in long ago."""
        if exchange is None or not exchange.parts or exchange.complete:
            return self._until(resolved)
        decision = self._view.decision
        return exchange.finished + 2 * decision.phase_seconds + decision.patience_seconds

    def _replacement_reducer(self, resolved: planning.ResolvedPlan) -> int:
        """Who reduces what was lost: we, who propose it; if we are not in the plan, the best of those who are."""
        if self._me.peer in resolved.peers:
            return resolved.peers.index(self._me.peer)
        live = {member.peer for member in self._host.members.live()}
        indices = [index for index, peer in enumerate(resolved.peers) if peer in live] or [0]
        return max(indices, key=lambda index: resolved.plan.offers[index].bandwidth)

    async def _fetch_what_others_hold(self) -> None:
        """In a ballot that was opened late, some may hold parts whose reducers are lost since."""
        view = self._view
        resolved, exchange = view.call.resolved, view.exchange
        if resolved is None or exchange is None:
            return
        live = {member.peer for member in self._host.members.live()}
        for promise in view.decision.promises:
            for done in promise.held if promise.plan == resolved.digest else ():
                if done.part >= len(resolved.plan.reducers) or done.part in exchange.parts:
                    continue
                if resolved.reducer(done.part) in live and done.part not in exchange.failed:
                    continue
                if held := await self._sources.lost_part(resolved.digest, done, [promise.sender.peer]):
                    exchange.adopt(done.part, held)

    def _suspects(self, ballot: int) -> list[PeerId]:
        """Coordinators of earlier ballots who have not been heard of since one should have ended."""
        decision, now = self._view.decision, asyncio.get_running_loop().time()
        earlier = dict.fromkeys(decision.tally.coordinator(each) for each in range(min(ballot, MAX_ROSTER)))
        since = now - decision.patience_seconds
        return [peer for peer in earlier if peer != self._me.peer and decision.heard.get(peer, -1.0) < since]

    # -- records ------------------------------------------------------------------------------------------------------

    def _outcome(self, resolved: planning.ResolvedPlan, exchange: AllReduce) -> Record:
        """The mean; but a mean of nothing would move the state by its momentum alone: nobody's work is no round."""
        parts = [exchange.parts[part] for part in range(len(resolved.plan.reducers))]
        results = tuple(held.result for held in parts if held.result)
        present = {peer for peer, each in records.contributions(resolved.peers, results).items() if each.chunks_counted}
        return self._mean(resolved, parts, present) if present else self._skip(resolved)

    def _mean(
        self, resolved: planning.ResolvedPlan, parts: Sequence[ReducedPart], present: Collection[PeerId]
    ) -> Record:
        results = tuple(held.result for held in parts if held.result)
        silent = [
            peer
            for peer, weight in zip(resolved.peers, resolved.weights, strict=True)
            if weight and peer not in present
        ]
        roster = self._roster(silent)
        known = {member.peer for member in roster}
        found = planning.complaints(resolved, [held.done for held in parts if held.done], self._view.head.complaints)
        return Record(
            parent=self._view.head.key.lineage,
            state_root=self._view.head.state_root,
            round=self._view.head.key.round,
            kind=Kind.MEAN,
            plan=resolved.digest,
            parts=results,
            roster=roster,
            peers=resolved.peers,
            bounds=resolved.plan.bounds,
            complaints=tuple(each for each in found if {each.first, each.second} <= known),
        )

    def _skip(self, resolved: planning.ResolvedPlan) -> Record:
        head = self._view.head
        return Record(
            parent=head.key.lineage,
            state_root=head.state_root,
            round=head.key.round,
            kind=Kind.SKIP,
            plan=resolved.digest,
            parts=(),
            roster=self._roster(resolved.peers),
            complaints=head.complaints,
        )

    def _beyond_a_broken_link(self) -> list[PeerId]:
        """Whom we need not hear: its only broken link is the one to us. Others tell whether it lives."""
        ends = [(each.first, each.second) for each in self._view.head.complaints]
        ours = [
            first if second == self._me.peer else second for first, second in ends if self._me.peer in (first, second)
        ]
        return [peer for peer in ours if sum(peer in pair for pair in ends) == 1]

    def _roster(self, doubtful: Iterable[PeerId]) -> tuple[Member, ...]:
        """Who votes next: who is alive and stays, less the doubtful who said nothing since the call; and newcomers."""
        decision, head = self._view.decision, self._view.head
        live = set(self._host.members.live())
        live |= {member for member in head.roster if member.peer in self._beyond_a_broken_link()}
        mute = {peer for peer in doubtful if decision.heard.get(peer, -1.0) < self._view.call.cut_at}
        here = [member for member in head.roster if member == self._me or (member in live and member.peer not in mute)]
        found = here if len(here) >= decision.tally.quorum else head.roster  # none evicts as many as could decide
        staying = [member for member in found if member.peer not in decision.leaving]
        # it ends with those who leave
        staying = staying or here[: min_retained(len(head.roster), decision.tally.quorum)]
        taken = {member.peer for member in staying}
        asking = [member for member in self.candidates.values() if member in live and member.peer not in taken]
        room = min(max_admitted(len(head.roster)), MAX_ROSTER - len(staying))
        return tuple(sorted((*staying, *sorted(asking)[:room])))
