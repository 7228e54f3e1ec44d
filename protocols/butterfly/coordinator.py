"""What the coordinator of a ballot does while it may choose a record: call the round, get every part reduced, propose.

It continues a running data phase, gives the parts of a lost reducer to another member, and proposes to skip the round
only when the time of the data phase is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from protocols.aio import loop_time, run_with_helper
from protocols.allreduce import plan as planning
from protocols.allreduce.all_reduce import AllReduce
from protocols.allreduce.clustered_messages import ClusteredPlan, PackedPlan, packed
from protocols.allreduce.clustered_plan import ResolvedClusters, RoundPlan, outline_of, reassign_parts
from protocols.allreduce.parts import ReducedPart, part_message
from protocols.base import Deadline, PeerId
from protocols.butterfly.round import Round
from protocols.butterfly.vote import mean_record
from protocols.consensus import record as records
from protocols.consensus.record import Kind, Record
from protocols.wire import MAX_ROSTER, PartDone, Plan

STILL_SECONDS = 0.1
"""How long no byte moves until the reducers of the last missing parts are asked whether they are there. The failure
detector loses a stopped peer after three seconds at the least."""
ANSWER_SECONDS = 1.0  # for their answers: the least timeout of a retransmission (RFC 6298, 2.4)
AGAIN_SECONDS = 0.5  # after the answers, until those that are there are asked again


class RoundCoordinator:
    def __init__(self, attempt: Round) -> None:
        self._round, self._call, self._vote, self._me = attempt, attempt.call, attempt.vote, attempt.me
        self._unanswering: set[PeerId] = set()  # reducers that did not answer, though their parts are overdue
        self._given: set[int] = set()  # parts that were given to another reducer than the first plan's

    async def run(self) -> None:
        """Lead each ballot in which this member may choose a record, until the round is over."""
        led, attempt, vote = -1, self._round, self._vote
        while vote.votes and await attempt.until(lambda: vote.leading not in (None, led) or attempt.over()):  # noqa: B023
            if attempt.over() or vote.leading is None:
                return
            led = vote.leading
            await self._lead(led)

    async def _lead(self, ballot: int) -> None:
        """Lead a ballot of this member to its proposal. Returns when the ballot is over for this member."""
        call, vote = self._call, self._vote
        if call.resolved is None:
            if not await call.due():
                return
            if call.resolved is None and vote.leading == ballot:
                if call.all_rest():
                    return vote.propose(ballot, self._skip(None))
                self._publish(call.draw(ballot, self._suspects(ballot)))
        elif ballot > call.resolved.plan.ballot:  # some members may not know the plan
            self._publish(reassign_parts(call.resolved.plan, {}, ballot))
        await self._fetch_what_others_hold()
        await run_with_helper(self._follow(ballot), self._ask_reducers())

    async def _follow(self, ballot: int) -> None:
        """Follow the data phase of the latest plan, give lost parts to other members, and propose what comes out."""
        attempt, vote = self._round, self._vote
        while vote.leading == ballot and (resolved := self._call.resolved):
            now, until = loop_time(), self._until(resolved)
            exchange = attempt.exchange_of(resolved.digest)
            if exchange and self._is_whole(resolved, exchange):
                return vote.propose(ballot, self._outcome(resolved, exchange))
            if now >= until or self._is_hopeless(resolved):
                return vote.propose(ballot, self._skip(resolved, resolved.peers if now >= until else ()))
            if given := self._repairs(resolved, exchange, now):
                self._given |= {*given}
                self._publish(reassign_parts(resolved.plan, given, ballot))
            overdue = self._overdue(resolved, exchange)
            await self._wait(resolved, min(until, overdue) if overdue > now else until)

    async def _wait(self, resolved: RoundPlan, until: Deadline) -> None:
        attempt, exchange = self._round, self._round.exchange
        known = _progress(exchange)
        await attempt.until(
            lambda: (
                self._call.resolved is not resolved
                or self._vote.leading is None
                or attempt.exchange is not exchange
                or _progress(exchange) != known
                or bool(self._repairs(resolved, exchange, loop_time()))
                or self._is_hopeless(resolved)
                or self._until(resolved) <= loop_time()
            ),
            until,
        )

    def _publish(self, plan: Plan | ClusteredPlan) -> None:
        self._vote.published, roster = plan.ballot, self._round.head.roster
        message: Plan | PackedPlan
        if isinstance(plan, ClusteredPlan):
            signature = self._round.host.signer.sign(outline_of(plan, roster).signed(plan.key))
            plan = replace(plan, signature=signature)
            message = packed(plan, roster)
        else:
            message = plan
        for member in roster:
            if member != self._me:
                self._round.post.send(member.peer, message)
        self._round.on_plan(plan)

    def _until(self, resolved: RoundPlan) -> Deadline:
        """When to give the mean up. Not while too few are here to decide anything, if others could not vote on it."""
        if self._apart(resolved) and self._is_alone():
            return self._round.deadline
        return min(self._round.deadline, self._call.cut_at + resolved.plan.budget_seconds)

    # -- what is lost -------------------------------------------------------------------------------------------------

    def _repairs(self, resolved: RoundPlan, exchange: AllReduce | None, now: float) -> dict[int, int]:
        """The lost parts that another member can reduce, and its index. A part is given away once for being overdue."""
        lost = {part: self._replacement_reducer(resolved, part) for part in self._lost(resolved, exchange, now)}
        return {part: index for part, index in lost.items() if index is not None}

    def _lost(self, resolved: RoundPlan, exchange: AllReduce | None, now: float) -> list[int]:
        if exchange is None:
            return []
        live = self._round.live_peers()
        overdue = now >= self._overdue(resolved, exchange)
        return [
            part
            for part in range(len(resolved.plan.reducers))
            if part not in exchange.parts
            and resolved.reducer(part) != self._me.peer
            and (
                resolved.reducer(part) not in live
                or exchange.failed.get(part) == resolved.reducer(part)
                or (part not in self._given and (overdue or resolved.reducer(part) in self._unanswering))
            )
        ]

    async def _ask_reducers(self) -> None:
        """Ask the reducers of the last missing parts whether they are there, while no data moves."""
        attempt = self._round
        while await attempt.until(lambda: self._most_are_in() or attempt.over()) and not attempt.over():
            if await self._is_still() and self._most_are_in():
                await asyncio.gather(*map(self._ask, self._missing_reducers()))
                await attempt.until(attempt.over, loop_time() + AGAIN_SECONDS)

    async def _ask(self, reducer: PeerId) -> None:
        if not await self._round.host.members.answers(reducer, ANSWER_SECONDS) and await self._is_still():
            self._unanswering.add(reducer)
            self._round.changed.notify()

    async def _is_still(self) -> bool:
        before = self._round.accounting.moved_bytes()
        await self._round.until(self._round.over, loop_time() + STILL_SECONDS)
        return self._round.accounting.moved_bytes() == before

    def _most_are_in(self) -> bool:
        """Whether most parts of the mean are here, but not all."""
        resolved = self._call.resolved
        exchange = self._round.exchange_of(resolved.digest) if resolved else None
        if resolved is None or exchange is None or exchange.complete:
            return False
        return 2 * len(exchange.parts) > len(resolved.plan.reducers)

    def _missing_reducers(self) -> list[PeerId]:
        resolved, exchange = self._call.resolved, self._round.exchange
        assert resolved and exchange
        parts = (part for part in range(len(resolved.plan.reducers)) if part not in exchange.parts)
        known = {self._me.peer, *self._unanswering}
        return [peer for peer in dict.fromkeys(map(resolved.reducer, parts)) if peer not in known]

    def _apart(self, resolved: RoundPlan) -> set[PeerId]:
        """Members that cannot get all parts of a mean, if without them too few are here to vote on it: their links to a
        reducer and to this member, which holds all parts, were broken when they last carried anything. That they are
        tried again in this round makes no difference: a vote for a mean that the others cannot fetch binds.
        """
        head, me, reducers = self._round.head, self._me.peer, self._reducers(resolved)
        links = [{each.first, each.second} for each in head.complaints]
        apart = {peer for link in links for peer in link if link - {peer} <= reducers and {peer, me} in links}
        return apart if len(self._here() - apart) < self._vote.tally.quorum else set()

    def _reducers(self, resolved: RoundPlan) -> set[PeerId]:
        """Those of the parts that this member holds, maybe of an earlier version of the plan; else the plan's."""
        exchange, bounds = self._round.exchange_of(resolved.digest), resolved.plan.bounds
        if exchange and exchange.complete:
            done = (held.done for held in exchange.parts.values() if held.chunks)
            return {resolved.peers[each.reducer] for each in done if each}
        return {resolved.reducer(part) for part in range(len(bounds) - 1) if bounds[part] < bounds[part + 1]}

    def _is_settled(self, resolved: RoundPlan) -> bool:
        """Whether the whole roster was there when the round was called, and stays: a SKIP would change nothing."""
        absent = {member.peer for member in self._round.head.roster} - {*resolved.peers} - {*self._vote.resting.peers()}
        return not absent and not self._round.roster_changes() and not self._is_alone()

    def _here(self) -> set[PeerId]:
        live = set(self._round.host.members.live())
        return {member.peer for member in self._round.head.roster if member == self._me or member in live}

    def _is_whole(self, resolved: RoundPlan, exchange: AllReduce) -> bool:
        """Whether the mean is there and can be voted on, as links that were broken carry data again."""
        if not exchange.complete:
            return False
        apart = self._apart(resolved)
        if self._is_settled(resolved):  # a member may complain of links that hold, and not contribute
            return not apart & exchange.unreachable
        weights = zip(resolved.peers, resolved.weights, strict=True)
        heard = {peer for peer, weight in weights if weight}  # a link carries nothing of a member without work
        return not apart or (apart <= heard and exchange.holds_all())

    def _is_hopeless(self, resolved: RoundPlan) -> bool:
        """Whether a SKIP, which needs no parts, is the way to a roster that can decide a mean.

        If nothing of the roster would change, broken links are tried again.
        """
        return bool(self._apart(resolved)) and not self._is_alone() and self._round.roster_changes()

    def _is_alone(self) -> bool:
        """Whether no quorum is here."""
        return len(self._here()) < self._vote.tally.quorum

    def _overdue(self, resolved: RoundPlan, exchange: AllReduce | None) -> Deadline:
        """When a missing part is overdue: long after other parts came in, which should take as long."""
        if exchange is None or not exchange.finished or exchange.complete:
            return self._until(resolved)
        return exchange.finished + 2 * self._vote.phase_seconds + self._vote.patience_seconds

    def _replacement_reducer(self, resolved: RoundPlan, part: int) -> int | None:
        """Index of the member that is to reduce a lost part: this one or, if it is not in the plan, the fastest other
        one that is live. None: there is no other.
        """
        if self._me.peer in resolved.peers:
            return resolved.peers.index(self._me.peer)
        others = self._round.live_peers() - {resolved.reducer(part)} - self._unanswering
        indices = [index for index, peer in enumerate(resolved.peers) if peer in others]
        return max(indices, key=resolved.uplinks.__getitem__, default=None)

    async def _fetch_what_others_hold(self) -> None:
        """Fetch parts that members held when they promised this ballot, and whose reducers have been lost since."""
        resolved, exchange = self._call.resolved, self._round.exchange
        if resolved is None or exchange is None:
            return
        live = self._round.live_peers()
        for promise in self._vote.promises:
            for done in promise.held if promise.plan == resolved.digest else ():
                if done.part >= len(resolved.plan.reducers) or done.part in exchange.parts:
                    continue
                if resolved.reducer(done.part) in live and done.part not in exchange.failed:
                    continue
                if held := await self._lost_part(resolved.digest, done, promise.sender.peer):
                    exchange.adopt(done.part, held)

    async def _lost_part(self, plan: bytes, done: PartDone, holder: PeerId) -> ReducedPart | None:
        attempt, exchange = self._round, self._round.exchange
        peers = exchange.task.whole.peers if exchange else ()
        if exchange is None or done.reducer >= len(peers):
            return None
        message = part_message(attempt.head.key, plan, done)
        if not attempt.host.signer.verify(peers[done.reducer], message, done.signature):
            return None
        held = await attempt.parts.fetch([holder], done.result, exchange.task.part(done.part))
        if held:
            held.done = done
        return held

    def _suspects(self, ballot: int) -> list[PeerId]:
        earlier = dict.fromkeys(self._vote.tally.coordinator(each) for each in range(min(ballot, MAX_ROSTER)))
        return self._vote.silent(peer for peer in earlier if peer != self._me.peer)

    # -- records ------------------------------------------------------------------------------------------------------

    def _outcome(self, resolved: RoundPlan, exchange: AllReduce) -> Record:
        """Record of the mean; a SKIP if the mean holds no work, since the outer momentum alone would move the state."""
        head, parts = self._round.head, [exchange.parts[part] for part in range(len(resolved.plan.reducers))]
        results = tuple(held.result for held in parts if held.result)
        brought = records.contributions(resolved.peers, results)
        present = {peer for peer, each in brought.items() if each.chunks_counted}
        if not present:
            return self._skip(resolved, resolved.peers)
        weights = zip(resolved.peers, resolved.weights, strict=True)
        absent = [peer for peer, weight in weights if weight and peer not in present]
        roster = self._round.next_roster.drawn(self._mute(self._doubtful(resolved, absent)))
        known = {member.peer for member in roster}
        clusters = resolved if isinstance(resolved, ResolvedClusters) else None
        dones, senders = [held.done for held in parts if held.done], clusters.lone if clusters else None
        found = planning.complaints(head.key.round, resolved.peers, dones, head.complaints, senders)
        complaints = tuple(each for each in found if {each.first, each.second} <= known)
        return mean_record(head, resolved, results, roster, complaints)

    def _skip(self, resolved: RoundPlan | None, doubtful: Sequence[PeerId] = ()) -> Record:
        digest = resolved.digest if resolved else bytes(32)
        roster = self._round.next_roster.drawn(self._mute(self._doubtful(resolved, doubtful) if resolved else ()))
        return records.extend(self._round.head, Kind.SKIP, roster, digest)

    def _mute(self, doubtful: Sequence[PeerId]) -> set[PeerId]:
        """Those of which nothing was heard since the cut."""
        heard, cut_at = self._vote.heard, self._call.cut_at
        return {peer for peer in doubtful if heard.get(peer, -1.0) < cut_at}

    def _doubtful(self, resolved: RoundPlan, absent: Sequence[PeerId]) -> Sequence[PeerId]:
        """Of the members whose work is missing, those that may be gone.

        The work of a cluster comes from the lead's associates, which may all be lost. So a lead is in doubt only if it
        has none, or if it did not reduce a part of its own either.
        """
        if not isinstance(resolved, ResolvedClusters):
            return absent
        exchange, bounds = self._round.exchange_of(resolved.digest), resolved.plan.bounds
        held = exchange.parts.values() if exchange else ()
        signed = {resolved.peers[part.done.reducer] for part in held if part.chunks and part.done}
        due = {peer for part, peer in enumerate(resolved.peers) if bounds[part] < bounds[part + 1]}
        return [peer for peer in absent if peer in resolved.lone or peer in due - signed]


def _progress(exchange: AllReduce | None) -> tuple[int, int]:
    return (len(exchange.parts), len(exchange.failed)) if exchange else (0, 0)
