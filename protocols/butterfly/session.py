"""One attempt at a round, from the first offer to the outcome: `protocols.base.Session` for a roster that votes.

While the trainer works, offers travel and the round is called; the data phase runs; the roster decides, and what was
decided is fetched, if need be, and decoded. An attempt that ends undecided leaves its decision and what is held to the
next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from protocols import wire
from protocols.aio import task_group
from protocols.allreduce.all_reduce import AllReduce
from protocols.base import (
    AveragingResult,
    BadPayload,
    Deadline,
    Head,
    Header,
    LocalProgress,
    Member,
    PeerId,
    PeerSilent,
    Stream,
    Vector,
)
from protocols.butterfly.consensus_driver import ConsensusDriver
from protocols.butterfly.context import ButterflyContext
from protocols.butterfly.coordinator import RoundCoordinator
from protocols.butterfly.forking import watch_majority
from protocols.butterfly.member_averaging import MemberAveraging
from protocols.butterfly.part_fetcher import PartFetcher
from protocols.butterfly.round_call import RoundCall, RoundCallInputs
from protocols.consensus.messages import VoteMessage
from protocols.vectors import VectorView


class ButterflySession:
    """Attributes:
    cut: as in the contract.
    exchange: the data phase, of the plan that was called last.
    """

    def __init__(
        self, context: ButterflyContext, head: Head, decision: ConsensusDriver, bandwidth: float, deadline: Deadline
    ) -> None:
        self.head, self.decision, self.deadline = head, decision, deadline
        self.exchange: AllReduce | None = None
        self._context, self._host = context, context.host
        elements = context.settings.elements[head.key.fragment]
        self._inputs = context.inputs(head, elements)
        self.call = RoundCall(
            context.host,
            RoundCallInputs(self._inputs, head, context.me, bandwidth, deadline),
            context.post,
            context.accounting,
        )
        self.cut, self.notifier = self.call.cut, self.call.changed
        self._sources = PartFetcher(context, self, elements)
        self._leader = RoundCoordinator(context, self, self._sources)
        self._superseded = False
        self._votes = decision.votes
        decision.changed = self.notifier

    # -- the contract -------------------------------------------------------------------------------------------------

    def offer(self, work: LocalProgress) -> None:
        if self._votes:
            self.call.ready(work)
            self.decision.leaving |= self.call.leaving()

    def waiting_for(self) -> tuple[PeerId, ...]:
        """For their work, then for the parts that they reduce, then for the decision."""
        resolved, exchange = self.call.resolved, self.exchange
        if self.over():
            return ()
        if resolved is None:
            return self.call.incomplete()
        if exchange is None or exchange.complete:
            return (self.decision.tally.coordinator(self.decision.vote.ballot),)
        missing = (part for part in range(len(resolved.plan.reducers)) if part not in exchange.parts)
        return tuple(dict.fromkeys(resolved.reducer(part) for part in missing))

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        source, target = VectorView(mine), VectorView(into)
        if not source.size == target.size == self._inputs.elements:
            raise ValueError(f"{source.size} and {target.size} elements; the run averages {self._inputs.elements}")
        await self.cut.wait()  # it is set at the round's deadline at the latest
        mean = await MemberAveraging(self._context, self, self._sources, source, target).run()
        names, sent, received = self._context.accounting.take()
        return replace(mean, blamed=(*names, *mean.blamed), bytes_sent=sent, bytes_received=received)

    @property
    def in_time(self) -> bool | None:
        """Whether the data phase ended within its budget; None if it was not time that was short."""
        if self.exchange is None:
            return None
        if self.exchange.complete:
            return True
        return None if asyncio.get_running_loop().time() < self.exchange.task.deadline else False

    # -- life ---------------------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """What goes on beside training and averaging, until cancelled."""
        async with task_group() as group:
            group.create_task(self._cut_when_over())
            group.create_task(self._watch_members())
            if not self._votes:
                self._knock()
            if not (self._votes or self.decision.forks_only):
                return
            self.decision.start()
            group.create_task(watch_majority(self._context, self))
            if not self._votes:
                return
            group.create_task(self._await_call())
            group.create_task(self._lead_when_free())
            group.create_task(self._sources.fetch_when_asked())

    def close(self) -> None:
        self.call.close()
        self.decision.stop()

    def supersede(self) -> None:
        """There is a better branch: end."""
        self._superseded = True
        self.notifier.notify()

    def over(self) -> bool:
        return self._superseded or self.decision.certificate is not None

    async def until(self, condition: Callable[[], bool], deadline: Deadline | None = None) -> bool:
        """Wait for a condition; False if the deadline, or the session's, comes first."""
        try:
            await self.notifier.until(condition, self.deadline if deadline is None else deadline)
        except TimeoutError:
            return False
        return True

    async def _cut_when_over(self) -> None:
        if await self.until(self.over):
            self.cut.set()

    async def _await_call(self) -> None:
        """Once the round should be called, its coordinator has as long as a ballot may take."""
        if await self.call.due() and not self.over():
            self.decision.progress()

    async def _lead_when_free(self) -> None:
        led = -1
        while await self.until(lambda: self.decision.leading not in (None, led) or self.over()):  # noqa: B023
            if self.over() or self.decision.leading is None:
                return
            led = self.decision.leading
            await self._leader.lead(led)

    async def _watch_members(self) -> None:
        members = self._host.members
        version, peers = members.version, {member.peer for member in self.head.roster}
        while asyncio.get_running_loop().time() < self.deadline:
            live = {member.peer for member in members.live()}
            for peer in sorted(peers - live):
                self.gone(peer)
            peers &= live
            version = await members.changed(version, self.deadline)
            peers |= {member.peer for member in self.head.roster} & {member.peer for member in members.live()}

    def _knock(self) -> None:
        """Ask the roster for admission. Former members who are here are told, too: we may have to fork with them."""
        tally, live = self.decision.tally, self._host.members.live()
        former = [member.peer for member in live if self.decision.forks_only and tally.was_member(member)]
        for peer in dict.fromkeys((*(member.peer for member in self.head.roster), *former)):
            self._knock_at(peer)

    def _knock_at(self, peer: PeerId) -> None:
        if peer != self._context.me.peer:
            self._context.post.send(peer, wire.AdmissionRequest(self.head.key, self._context.me, self.head.state_root))

    # -- events -------------------------------------------------------------------------------------------------------

    def gone(self, peer: PeerId) -> None:
        """A peer is visibly gone."""
        if self.exchange:
            self.exchange.lose(peer, "gone")
        self.decision.gone(peer)

    def take(self, peer: PeerId, message: Header) -> None:
        """A control message for this round.

        Raises:
            BadPayload: it breaks a rule.
        """
        self.decision.hear(peer)
        match message:
            case wire.Ready(_, offer):
                self.call.on_ready(peer, offer)
                self.decision.leaving |= self.call.leaving()
            case wire.Plan():
                self._on_plan(peer, message)
                self.decision.leaving |= self.call.leaving()
            case wire.AdmissionRequest(_, member, root):
                self._on_knock(peer, member, root)
            case VoteMessage():
                self.decision.receive(peer, message)

    def _on_plan(self, peer: PeerId, plan: wire.Plan) -> None:
        if peer != self.decision.tally.coordinator(plan.ballot):
            raise BadPayload(f"a plan of {peer}, who does not coordinate ballot {plan.ballot}")
        if plan.ballot == self.decision.vote.promised:
            self.call.on_plan(plan)
            self.decision.progress()
            self.decision.moved(max(self.call.cut_at, asyncio.get_running_loop().time()))

    def _on_knock(self, peer: PeerId, member: Member, root: bytes) -> None:
        if member.peer != peer:
            raise BadPayload(f"asks for the admission of {member.peer}")
        if root != self.head.state_root:
            raise BadPayload("asks for admission with another state")
        self._leader.candidates[peer] = member
        if self.decision.forks_only and self.decision.onlookers.get(peer) != member:
            self._knock_at(peer)  # it may have come after we told those who were here
        self.decision.onlookers[peer] = member
        if self.decision.certificate:
            self._context.post.send(peer, self.decision.certificate)

    async def serve(self, peer: PeerId, stream: Stream, opening: wire.Contribute) -> None:
        """A data stream for this round.

        Raises:
            BadPayload: of another plan, or it broke a rule.
            PeerSilent: our data phase did not begin in time, or the stream broke off.
        """
        self.decision.hear(peer)
        loop = asyncio.get_running_loop()
        deadline = min(self.deadline, stream.deadline)
        while self.exchange is None or self.exchange.task.resolved.digest != opening.plan:
            was = self.exchange
            if not await self.until(lambda: self.exchange is not was, deadline):  # noqa: B023 - awaited here
                raise PeerSilent(peer, "the data phase of its plan did not begin here")
        exchange = self.exchange
        try:
            await exchange.serve(peer, stream, opening)
        except BadPayload as error:
            exchange.lose(peer, f"refused: {error}")  # it will not hand in anything else: nobody waits for it
            raise
        self.decision.heard[peer] = loop.time()
