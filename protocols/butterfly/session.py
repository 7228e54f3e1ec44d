"""One attempt at a round, from the first offer to the outcome: an `AveragingSession` for a roster that votes.

While the trainer works, members exchange offers and the round is called. Then the data phase runs and the roster
decides. The member fetches the parts that it lacks of the decision, and decodes them. An attempt that ends undecided
leaves its decision and its parts to the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from protocols import wire
from protocols.aio import loop_time, task_group
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
from protocols.butterfly.attempt import RoundAttempt
from protocols.butterfly.consensus_driver import ConsensusDriver
from protocols.butterfly.context import ButterflyContext
from protocols.butterfly.coordinator import RoundCoordinator
from protocols.butterfly.forking import watch_majority
from protocols.butterfly.member_averaging import MemberAveraging
from protocols.butterfly.part_fetcher import PartFetcher
from protocols.butterfly.resting import Resting
from protocols.consensus.messages import VoteMessage
from protocols.vectors.views import VectorView


class ButterflySession:
    """Runs one attempt at a round (`protocols.base.AveragingSession`).

    Attributes:
        cut: as in `AveragingSession`.
        attempt: the state that the session shares with its helpers.
        decision: decides the round.
    """

    def __init__(
        self, context: ButterflyContext, head: Head, decision: ConsensusDriver, bandwidth: float, deadline: Deadline
    ) -> None:
        self.attempt = RoundAttempt(context, head, decision, bandwidth, deadline)
        self.head, self.decision, self.deadline = head, decision, deadline
        self.call, self.cut = self.attempt.call, self.attempt.call.cut
        self._context, self._state = context, decision.state
        self._fetcher = PartFetcher(self.attempt)
        self._coordinator = RoundCoordinator(self.attempt, self._fetcher)

    # -- the contract -------------------------------------------------------------------------------------------------

    def offer(self, work: LocalProgress) -> None:
        if self.decision.votes:
            self.call.ready(work)
            self._state.members_leave(self.call.leaving())

    def waiting_for(self) -> tuple[PeerId, ...]:
        """Members whose work is missing; after the call, reducers of missing parts; after those, the coordinator."""
        resolved, exchange = self.call.resolved, self.attempt.exchange
        if self.attempt.over():
            return ()
        if resolved is None:
            return self.call.incomplete()
        if exchange is None or exchange.complete:
            return (self.decision.tally.coordinator(self.decision.vote.ballot),)
        missing = (part for part in range(len(resolved.plan.reducers)) if part not in exchange.parts)
        return tuple(dict.fromkeys(resolved.reducer(part) for part in missing))

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        source, target, elements = VectorView(mine), VectorView(into), self._context.elements(self.head)
        if not source.size == target.size == elements:
            raise ValueError(f"{source.size} and {target.size} elements; the run averages {elements}")
        await self.cut.wait()  # it is set at the round's deadline at the latest
        mean = await MemberAveraging(self.attempt, self._fetcher, source, target).run()
        names, sent, received = self._context.accounting.take()
        return replace(mean, blamed=(*names, *mean.blamed), bytes_sent=sent, bytes_received=received)

    @property
    def in_time(self) -> bool | None:
        """Whether the data phase ended within its budget; None if it failed for another reason than time."""
        return self.attempt.exchange.in_time if self.attempt.exchange else None

    # -- background work ----------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Run what goes on beside training and averaging, until cancelled: call, vote and watch over the members."""
        votes = self.decision.votes
        async with task_group() as group:
            group.create_task(self._cut_when_over())
            group.create_task(self._watch_members())
            if not votes:
                self._ask_admission()
            if not (votes or self.decision.forks_only):
                return
            self.decision.start()
            group.create_task(watch_majority(self.attempt))
            if not votes:
                return
            group.create_task(self._await_call())
            group.create_task(self._lead_when_free())
            group.create_task(self._fetcher.fetch_when_asked())

    def close(self) -> None:
        self.call.close()
        self.decision.stop()

    def discard(self) -> None:
        """Forget the parts of a session that serves no new streams, so that their memory is free at once."""
        if self.attempt.exchange:
            self.attempt.exchange.discard()

    def supersede(self) -> None:
        """End the attempt, because a better branch is known."""
        self.attempt.supersede()

    async def _cut_when_over(self) -> None:
        if await self.attempt.until(self.attempt.over):
            self.cut.set()

    async def _await_call(self) -> None:
        """Restart the ballot's timer once the round should be called: the coordinator has the time of one ballot."""
        if await self.call.due() and not self.attempt.over():
            self.decision.progress()

    async def _lead_when_free(self) -> None:
        led, attempt, state = -1, self.attempt, self._state
        while await attempt.until(lambda: state.leading not in (None, led) or attempt.over()):  # noqa: B023
            if attempt.over() or state.leading is None:
                return
            led = state.leading
            await self._coordinator.lead(led)

    async def _watch_members(self) -> None:
        members = self._context.host.members
        roster = {member.peer for member in self.head.roster}
        version, peers = members.version, set(roster)
        while loop_time() < self.deadline:
            live = self._context.live_peers()
            for peer in sorted(peers - live):
                self.gone(peer)
            peers &= live
            version = await members.changed(version, self.deadline)
            self.attempt.changed.notify()
            peers |= roster & self._context.live_peers()

    def _ask_admission(self) -> None:
        """Ask the roster for admission, and former members too, since this member may have to fork with them."""
        tally, live = self.decision.tally, self._context.host.members.live()
        former = [member.peer for member in live if self.decision.forks_only and tally.was_member(member)]
        for peer in dict.fromkeys((*(member.peer for member in self.head.roster), *former)):
            self._request_admission(peer)

    def _request_admission(self, peer: PeerId) -> None:
        me = self._context.me
        if peer != me.peer:
            self._context.post.send(peer, wire.AdmissionRequest(self.head.key, me, self.head.state_root))

    # -- events -------------------------------------------------------------------------------------------------------

    def gone(self, peer: PeerId) -> None:
        """Note that a peer is known to be gone."""
        if self.attempt.exchange:
            self.attempt.exchange.lose(peer, "gone")
        self.decision.gone(peer)

    def take(self, peer: PeerId, message: Header) -> None:
        """Take a control message for this round.

        Raises:
            BadPayload: the message breaks a rule.
        """
        self.decision.hear(peer)
        match message:
            case wire.Ready(_, offer):
                self.call.on_ready(peer, offer)
                self._state.members_leave(self.call.leaving())
            case Resting():
                self.call.on_resting(peer, message)
            case wire.Plan():
                self._on_plan(peer, message)
                self._state.members_leave(self.call.leaving())
            case wire.AdmissionRequest(_, member, root):
                self._on_admission_request(peer, member, root)
            case VoteMessage():
                self.decision.receive(peer, message)
                self.call.led_by(self.decision.tally.coordinator(self.decision.vote.promised))

    def _on_plan(self, peer: PeerId, plan: wire.Plan) -> None:
        if peer != self.decision.tally.coordinator(plan.ballot):
            raise BadPayload(f"a plan of {peer}, which does not coordinate ballot {plan.ballot}")
        if plan.ballot == self.decision.vote.promised:
            self.call.on_plan(plan)
            self.decision.progress()
            self.decision.moved(max(self.call.cut_at, loop_time()))

    def _on_admission_request(self, peer: PeerId, member: Member, root: bytes) -> None:
        if member.peer != peer:
            raise BadPayload(f"asks for the admission of {member.peer}")
        if root != self.head.state_root:
            raise BadPayload("asks for admission with another state")
        self._coordinator.admission_asked(member)
        if self._state.onlooker_asked(member) and self.decision.forks_only:
            self._request_admission(peer)  # the peer may have come after this member sent its requests
        if self.decision.certificate:
            self._context.post.send(peer, self.decision.certificate)

    async def serve(self, peer: PeerId, stream: Stream, opening: wire.Contribute) -> None:
        """Serve a data stream for this round.

        Raises:
            BadPayload: the stream breaks a rule.
            PeerSilent: the data phase of its plan did not begin here in time, or the stream broke off.
        """
        self.decision.hear(peer)
        attempt, deadline = self.attempt, min(self.deadline, stream.deadline)
        while (exchange := attempt.exchange) is None or exchange.task.resolved.digest != opening.plan:
            if not await attempt.until(lambda: attempt.exchange is not exchange, deadline):
                raise PeerSilent(peer, "the data phase of its plan did not begin here")
        try:
            await exchange.serve(peer, stream, opening)
        except BadPayload as error:
            exchange.lose(peer, f"refused: {error}")  # it will send nothing else, so no member shall wait for it
            raise
        self.decision.hear(peer)
