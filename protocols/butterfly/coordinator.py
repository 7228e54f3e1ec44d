"""What the coordinator of a ballot does while it may choose a record: call the round, get every part reduced, propose.

It goes on with a running data phase, and gives the parts of a lost reducer to another member. It proposes to skip the
round only when the time of the data phase is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from protocols.aio import loop_time
from protocols.allreduce import plan as planning
from protocols.allreduce.all_reduce import AllReduce
from protocols.base import Deadline, Member, PeerId
from protocols.butterfly.attempt import RoundAttempt
from protocols.butterfly.part_fetcher import PartFetcher
from protocols.consensus import record as records
from protocols.consensus.record import Kind, Record
from protocols.consensus.vote_tally import max_admitted, min_retained
from protocols.wire import MAX_ROSTER, Plan


class RoundCoordinator:
    """Leads the ballots of one attempt that this member coordinates."""

    def __init__(self, attempt: RoundAttempt, fetcher: PartFetcher) -> None:
        self._context, self._me = attempt.context, attempt.context.me
        self._attempt, self._state, self._call, self._fetcher = attempt, attempt.state, attempt.call, fetcher
        self._candidates: dict[PeerId, Member] = {}
        self._call.roster_changes = self._roster_changes
        self._call.present = lambda: self._or_all(self._here())

    def admission_asked(self, member: Member) -> None:
        """Note a candidate: a peer that holds the state and asks for admission to the next roster."""
        self._candidates[member.peer] = member
        self._call.changed.notify()

    async def lead(self, ballot: int) -> None:
        """Lead a ballot of this member to its proposal. Returns when the ballot is over for this member."""
        call, state, driver = self._call, self._state, self._attempt.driver
        if call.resolved is None:
            if not await call.due():
                return
            if call.resolved is None and state.leading == ballot:
                if call.nobody_works():
                    return driver.chosen(ballot, records.encode(self._skip(None)))
                self._publish(call.draw(ballot, self._suspects(ballot)))
        elif ballot > call.resolved.plan.ballot:  # some members may not know the plan
            self._publish(planning.reassign_parts(call.resolved.plan, {}, ballot))
        await self._fetch_what_others_hold()
        while state.leading == ballot and (resolved := call.resolved):
            now, until = loop_time(), self._until(resolved)
            exchange = self._attempt.exchange_of(resolved.digest)
            if exchange and exchange.complete:
                return driver.chosen(ballot, records.encode(self._outcome(resolved, exchange)))
            if now >= until:
                return driver.chosen(ballot, records.encode(self._skip(resolved)))
            if lost := self._lost(resolved, exchange, now):
                given = dict.fromkeys(lost, self._replacement_reducer(resolved))
                self._publish(planning.reassign_parts(resolved.plan, given, ballot))
            overdue = self._overdue(resolved, exchange)
            await self._wait(resolved, min(until, overdue) if overdue > now else until)

    async def _wait(self, resolved: planning.ResolvedPlan, until: Deadline) -> None:
        """Wait for another plan, another data phase, progress of the data phase, or the loss of the ballot."""
        attempt, exchange = self._attempt, self._attempt.exchange
        known = self._progress(exchange)
        await attempt.until(
            lambda: (
                self._call.resolved is not resolved
                or self._state.leading is None
                or attempt.exchange is not exchange
                or self._progress(exchange) != known
            ),
            until,
        )

    @staticmethod
    def _progress(exchange: AllReduce | None) -> tuple[int, int]:
        return (len(exchange.parts), len(exchange.failed)) if exchange else (0, 0)

    def _publish(self, plan: Plan) -> None:
        self._state.plan_published(plan.ballot)
        for member in self._attempt.head.roster:
            if member != self._me:
                self._context.post.send(member.peer, plan)
        self._call.on_plan(plan)

    def _until(self, resolved: planning.ResolvedPlan) -> Deadline:
        return min(self._attempt.deadline, self._call.cut_at + resolved.plan.budget_seconds)

    # -- what is lost -------------------------------------------------------------------------------------------------

    def _lost(self, resolved: planning.ResolvedPlan, exchange: AllReduce | None, now: float) -> list[int]:
        """Parts that are missing here and whose reducer is gone, has failed or is overdue."""
        if exchange is None:
            return []
        live = self._context.live_peers()
        overdue = now >= self._overdue(resolved, exchange)
        return [
            part
            for part in range(len(resolved.plan.reducers))
            if part not in exchange.parts
            and resolved.reducer(part) != self._me.peer
            and (resolved.reducer(part) not in live or exchange.failed.get(part) == resolved.reducer(part) or overdue)
        ]

    def _overdue(self, resolved: planning.ResolvedPlan, exchange: AllReduce | None) -> Deadline:
        """When a missing part is overdue: long after other parts came in, which should take as long."""
        if exchange is None or not exchange.parts or exchange.complete:
            return self._until(resolved)
        return exchange.finished + 2 * self._state.phase_seconds + self._attempt.driver.patience_seconds

    def _replacement_reducer(self, resolved: planning.ResolvedPlan) -> int:
        """Index of the member that is to reduce lost parts: this one or, if it is not in the plan, the fastest one."""
        if self._me.peer in resolved.peers:
            return resolved.peers.index(self._me.peer)
        live = self._context.live_peers()
        indices = [index for index, peer in enumerate(resolved.peers) if peer in live] or [0]
        return max(indices, key=lambda index: resolved.plan.offers[index].bandwidth)

    async def _fetch_what_others_hold(self) -> None:
        """Fetch parts that members held when they promised this ballot, and whose reducers have been lost since."""
        resolved, exchange = self._call.resolved, self._attempt.exchange
        if resolved is None or exchange is None:
            return
        live = self._context.live_peers()
        for promise in self._state.promises:
            for done in promise.held if promise.plan == resolved.digest else ():
                if done.part >= len(resolved.plan.reducers) or done.part in exchange.parts:
                    continue
                if resolved.reducer(done.part) in live and done.part not in exchange.failed:
                    continue
                if held := await self._fetcher.lost_part(resolved.digest, done, [promise.sender.peer]):
                    exchange.adopt(done.part, held)

    def _suspects(self, ballot: int) -> list[PeerId]:
        """Coordinators of earlier ballots that have not answered in this one for longer than a ballot may take."""
        driver = self._attempt.driver
        earlier = dict.fromkeys(driver.tally.coordinator(each) for each in range(min(ballot, MAX_ROSTER)))
        others = [peer for peer in earlier if peer != self._me.peer]
        return self._state.silent(others, loop_time(), driver.patience_seconds)

    # -- records ------------------------------------------------------------------------------------------------------

    def _outcome(self, resolved: planning.ResolvedPlan, exchange: AllReduce) -> Record:
        """Record of the mean; a SKIP if the mean holds no work, since the outer momentum alone would move the state."""
        head, parts = self._attempt.head, [exchange.parts[part] for part in range(len(resolved.plan.reducers))]
        results = tuple(held.result for held in parts if held.result)
        brought = records.contributions(resolved.peers, results)
        present = {peer for peer, each in brought.items() if each.chunks_counted}
        if not present:
            return self._skip(resolved)
        weights = zip(resolved.peers, resolved.weights, strict=True)
        roster = self._roster(peer for peer, weight in weights if weight and peer not in present)
        known = {member.peer for member in roster}
        found = planning.complaints(resolved, [held.done for held in parts if held.done], head.complaints)
        return replace(
            records.extend(head, Kind.MEAN, roster, resolved.digest),
            parts=results,
            peers=resolved.peers,
            bounds=resolved.plan.bounds,
            complaints=tuple(each for each in found if {each.first, each.second} <= known),
        )

    def _skip(self, resolved: planning.ResolvedPlan | None) -> Record:
        peers, digest = (resolved.peers, resolved.digest) if resolved else ((), bytes(32))
        return records.extend(self._attempt.head, Kind.SKIP, self._roster(peers), digest)

    def _roster_changes(self) -> bool:
        """Whether a record would change the roster. While all rest, members with work do not leave before it counts."""
        now, then = set(self._attempt.head.roster), set(self._roster(()))
        return now != then and not (then < now and all(self._call.has_work(member.peer) for member in now - then))

    def _beyond_a_broken_link(self) -> list[PeerId]:
        """Peers whose only broken link is the one to this member, which cannot judge whether they are alive."""
        ends = [(each.first, each.second) for each in self._attempt.head.complaints]
        ours = [
            first if second == self._me.peer else second for first, second in ends if self._me.peer in (first, second)
        ]
        return [peer for peer in ours if sum(peer in pair for pair in ends) == 1]

    def _here(self) -> list[Member]:
        """This member, and those of the roster that are live as far as it can judge."""
        live, unknown = set(self._context.host.members.live()), self._beyond_a_broken_link()
        roster = self._attempt.head.roster
        return [member for member in roster if member == self._me or member in live or member.peer in unknown]

    def _or_all(self, here: Sequence[Member]) -> Sequence[Member]:
        """These members; the whole roster if they are too few to decide, since this member may be the one cut off."""
        return here if len(here) >= self._attempt.driver.tally.quorum else self._attempt.head.roster

    def _roster(self, doubtful: Iterable[PeerId]) -> tuple[Member, ...]:
        """The next roster: live members that stay, and candidates. Evicts `doubtful` members silent since the cut."""
        state, tally, head = self._state, self._attempt.driver.tally, self._attempt.head
        mute = {peer for peer in doubtful if state.heard.get(peer, -1.0) < self._call.cut_at}
        here = [member for member in self._here() if member == self._me or member.peer not in mute]
        staying = [member for member in self._or_all(here) if member.peer not in state.leaving]
        # if all leave, keep enough members that each quorum has one of them
        staying = staying or here[: min_retained(len(head.roster), tally.quorum)]
        taken = {member.peer for member in staying}
        live = set(self._context.host.members.live())
        asking = [member for member in self._candidates.values() if member in live and member.peer not in taken]
        limit = min(max_admitted(len(head.roster)), MAX_ROSTER - len(staying))
        return tuple(sorted((*staying, *sorted(asking)[:limit])))
