"""One attempt at a round, from the first offer to the outcome, as a member goes through it.

The round is called (`protocols.butterfly.call`), the data phase runs, and the roster decides
(`protocols.butterfly.vote`). The member fetches the parts that it lacks of the decision, and decodes them. An attempt
that ends undecided leaves its vote and its parts to the next one. What a peer without a vote does in another way is in
`protocols.butterfly.associate`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from protocols import wire
from protocols.aio import loop_time, task_group
from protocols.allreduce.all_reduce import DATA, AllReduce
from protocols.allreduce.clustered_all_reduce import ClusteredAllReduce
from protocols.allreduce.clustered_messages import (
    ClusteredPlan,
    ClusterPlan,
    ClusterReady,
    ClusterVersion,
    ContributePartial,
    OfferToLead,
    PackedPlan,
    unpacked,
)
from protocols.allreduce.clustered_plan import ResolvedClusters, RoundPlan
from protocols.allreduce.parts import DataPhase, PartFormat, ReducedPart
from protocols.allreduce.plan import PlanInputs, ResolvedPlan
from protocols.base import (
    AveragingResult,
    BadPayload,
    Deadline,
    Head,
    Header,
    LocalProgress,
    Member,
    Outcome,
    PeerError,
    PeerId,
    PeerSilent,
    Settings,
    Stream,
    Vector,
)
from protocols.blobs.parts import PartCache
from protocols.butterfly.associate import AssociateRound
from protocols.butterfly.attaching import Attachment
from protocols.butterfly.attempt import Attempt
from protocols.butterfly.call import RoundStart
from protocols.butterfly.cluster_call import ClusteredStart
from protocols.butterfly.lagging import LaggingPeers
from protocols.butterfly.missing_parts import MissingParts
from protocols.butterfly.next_roster import NextRoster
from protocols.butterfly.resting import Resting
from protocols.butterfly.vote import RoundVote
from protocols.consensus import record as records
from protocols.consensus.messages import MeanDecided, StartBallot, VoteMessage
from protocols.streams.endpoint import ControlChannel, ProtocolEndpoint
from protocols.vectors.coding import Codec
from protocols.vectors.views import VectorView
from protocols.wire import MAX_ROSTER

WATCH_SECONDS = 0.5  # how often a member looks whether a fork is due
ASK_SECONDS = 0.25  # time for a peer in the next round to send this round's certificate, before another one is asked


class Round(Attempt):
    def __init__(
        self,
        *,
        endpoint: ProtocolEndpoint,
        part_format: PartFormat,
        part_cache: PartCache,
        post: ControlChannel,
        head: Head,
        vote: RoundVote,
        bandwidth: float,
        deadline: Deadline,
        lagging: LaggingPeers,
        rested: Collection[PeerId],
        since: float | None = None,
        attachment: Attachment | None = None,
    ) -> None:
        """`vote` outlives the attempt. `bandwidth` is this member's upload, bytes/s. `since`: see `Averager.enter`.
        `rested`: members that rested in the last round. `attachment`: this peer's ties to clusters, if the run has any.
        """
        super().__init__(endpoint, post, head, vote, deadline)
        settings = endpoint.settings
        self._format, self._part_cache = part_format, part_cache
        self._voters, self._lagging, self._rested = min(settings.voters, MAX_ROSTER), lagging, rested
        self.next_roster = NextRoster(self, self._voters)
        self._ahead: dict[PeerId, None] = {}  # peers that are in the next round, and were not asked since they said so
        self._seen = self.live_peers()  # in this attempt
        self._result: AveragingResult | None = None
        self._running: asyncio.Task[None] | None = None
        start = partial(ClusteredStart, attachment=attachment) if attachment else RoundStart
        self.call = call = start(
            self,
            _inputs_of(head, settings, part_format.codec),
            bandwidth=bandwidth,
            since=since,
            present=self.next_roster.present,
            roster_changes=self.roster_changes,
            lagging=self.lagging,
        )
        self.cut, self.cluster = call.cut, call.cluster
        call.led_by(vote.tally.coordinator(vote.paxos.promised))  # an earlier attempt may have moved on
        self.parts = MissingParts(self, part_format, part_cache)
        self.associate = AssociateRound(self, call, self._voters)
        vote.begin_attempt(head, self.changed, lambda: call.resolved)  # it outlives this object
        vote.to_tell, vote.mates = call.to_tell, call.cluster.mates

    # -- the contract -------------------------------------------------------------------------------------------------

    def offer(self, work: LocalProgress) -> None:
        if self.vote.votes:
            self.call.ready(work)
            self.vote.leaving |= self.call.leaving()
        else:
            self.call.offer_to_lead(work)

    def waiting_for(self) -> tuple[PeerId, ...]:
        """Members whose work is missing; after the call, reducers of missing parts; after those, the coordinator."""
        resolved, exchange = self.call.resolved, self.exchange
        if self.over():
            return ()
        if resolved is None:
            return tuple(dict.fromkeys((*self.call.incomplete(), *self.lagging())))
        if exchange is None or exchange.complete:
            return (self.vote.tally.coordinator(self.vote.paxos.ballot),)
        missing = (part for part in range(len(resolved.plan.reducers)) if part not in exchange.parts)
        return tuple(dict.fromkeys(resolved.reducer(part) for part in missing))

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        """Run the data phase of each plan that is called, until the round is over and the decided mean is in `into`."""
        source, target = VectorView(mine), VectorView(into)
        if not source.size == target.size == self.elements:
            raise ValueError(f"{source.size} and {target.size} elements; the run averages {self.elements}")
        await self.cut.wait()  # it is set at the round's deadline at the latest
        self.accounting.seconds_moving = 0.0
        async with task_group() as group:
            timing = group.create_task(self.accounting.time_movement())
            while not self.over():
                resolved = self.call.resolved
                if resolved:
                    self._run_data_phase(group, resolved, source, target)
                if not await self.until(lambda: self.over() or self.call.resolved is not resolved):  # noqa: B023 - awaited
                    break
            self._part_cache.gate.open()
            parts = await self.parts.collect(() if self.me in self.head.roster else self.cluster.peers)
            timing.cancel()
            if self._running:  # nothing may write to `into` any more while it is decoded, or after the return
                self._running.cancel()
                await asyncio.wait([self._running])
        mean = self._result = await self._conclude(parts, target)
        names, sent, received = self.accounting.take()
        blamed, moving = (*names, *mean.blamed), self.accounting.seconds_moving
        return replace(mean, blamed=blamed, bytes_sent=sent, bytes_received=received, seconds_moving=moving)

    # -- the data phase -----------------------------------------------------------------------------------------------

    def _run_data_phase(
        self, group: asyncio.TaskGroup, resolved: RoundPlan, mine: VectorView, into: VectorView
    ) -> None:
        """Begin the data phase of a plan that names this peer, or continue it under another version of that plan."""
        if exchange := self.exchange_of(resolved.digest):
            return exchange.assign(resolved)
        own, clusters = self.call.own, resolved if isinstance(resolved, ResolvedClusters) else None
        if own is None:
            return
        if self._running:
            self._running.cancel()
        self.vote.begin_data_phase(resolved)
        patience_seconds = self.vote.patience_seconds
        task = DataPhase(
            key=self.head.key,
            resolved=own,
            host=self.host,
            mine=mine,
            into=into,
            format=self._format,
            silent=max(loop_time(), self.call.cut_at) + patience_seconds,
            patience_seconds=patience_seconds,
            deadline=self.call.data_phase_until(),
            progress=self.vote.moved,
            clusters=clusters,
            cluster=self.cluster.index,
        )
        make = ClusteredAllReduce if clusters else AllReduce
        self.exchange = exchange = make(task, self.accounting, self._on_exchange)
        live = self.live_peers()
        for peer in dict.fromkeys((*resolved.peers, *own.peers, *sorted(self._seen))):
            if peer not in live and peer != self.me.peer and self._sees(peer):
                exchange.lose(peer, "gone")
        self.associate.share_plan()
        if not self.settings.overlaps:  # else training does not wait for the data, and others would wait long
            self._part_cache.gate.close(task.deadline)
        self._running = group.create_task(exchange.run())

    def _on_exchange(self, part: ReducedPart | None) -> None:
        exchange, vote = self.exchange, self.vote
        assert exchange is not None
        if part:
            vote.keep(part, part.done if part.chunks else None)
        vote.progress()
        for peer in exchange.take_silent():
            vote.suspect(peer)

    def _sees(self, peer: PeerId) -> bool:
        """Whether a peer that is not live is gone. An associate does not watch all voters: the plan's next version
        tells it which of them are lost. In a large run it may not have met its cluster yet.
        """
        return self.me in self.head.roster or (peer in self.cluster.peers and peer in self._seen)

    async def is_acquainted(self, peer: PeerId, opening: wire.Contribute | ContributePartial) -> bool:
        """Whether a plan of clusters names a peer that this one may not see. It may still be on its way to this one."""

        def is_known() -> bool:
            return peer in self.live_peers() or peer in self.cluster.acquaintances(opening)

        def is_called() -> bool:
            return self.call.resolved is not None and self.call.resolved.digest == opening.plan

        await self.until(lambda: is_known() or is_called() or self.over())
        return is_known()

    async def serve(self, peer: PeerId, stream: Stream, opening: wire.Contribute | ContributePartial) -> None:
        """Serve a member's data stream. Raises PeerSilent if the data phase of its plan does not begin here in time."""
        self.vote.hear(peer)
        deadline = min(self.deadline, stream.deadline)
        while (exchange := self.exchange) is None or exchange.task.resolved.digest != opening.plan:
            if not await self.until(lambda: self.exchange is not exchange, deadline):
                raise PeerSilent(peer, "the data phase of its plan did not begin here")
        second = self.cluster.second
        if second and peer in second.peers and peer not in self.cluster.peers and isinstance(opening, wire.Contribute):
            raise PeerSilent(peer, "this peer is in another cluster")
        try:
            await exchange.serve(peer, stream, opening)
        except BadPayload as error:
            exchange.lose(peer, f"refused: {error}")  # it will send nothing else, so no member shall wait for it
            raise
        self.vote.hear(peer)

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _conclude(self, parts: list[ReducedPart] | None, into: VectorView) -> AveragingResult:
        certificate, record = self.vote.certificate, self.vote.decided
        if certificate is None or record is None:
            return AveragingResult(Outcome.SUPERSEDED if self.over() else Outcome.UNDECIDED)
        if record.state_root != self.head.state_root:
            self.accounting.name(self.me.peer, "this peer has another state than the decided one")
        if parts is None or not await self._decode(parts, into):
            return AveragingResult(Outcome.SUPERSEDED)
        outcome = Outcome.COMMITTED if record.averaged else Outcome.SKIPPED
        result = AveragingResult(outcome, record, certificate)
        if record.clusters:
            return self.cluster.counted(result, record, parts)
        called = self.call.resolved
        resolved = called if isinstance(called, ResolvedPlan) and called.digest == record.plan else None
        return replace(
            result,
            contributions=records.contributions(record.peers, record.parts),
            weights=dict(zip(resolved.peers, resolved.weights, strict=True)) if resolved and record.averaged else {},
            blamed=resolved.clamped if resolved else (),
            capped=resolved.capped if resolved and record.averaged else {},
        )

    async def _decode(self, parts: Sequence[ReducedPart], into: VectorView) -> bool:
        exchange = self.exchange
        for index, held in enumerate(parts):
            if exchange and exchange.parts.get(index) is held and index not in exchange.restarted:
                continue
            try:
                await self.host.compute.run(partial(held.decode, into), 4 * (held.high - held.low))
            except BadPayload:
                return False
        return True

    # -- beside training and averaging --------------------------------------------------------------------------------

    async def live(self) -> None:
        """Take part in call and vote, and watch over the members, until cancelled."""
        vote = self.vote
        async with task_group() as group:
            group.create_task(self._cut_when_over())
            group.create_task(self._watch_members())
            group.create_task(self._ask_ahead())
            group.create_task(self._decline())
            if not vote.votes:
                group.create_task(self.associate.live())
            if not (vote.votes or vote.forks_only):
                return
            vote.start()
            group.create_task(self._watch_majority())
            if vote.votes:
                group.create_task(self._await_call())
                group.create_task(self.parts.fetch_for_vote())

    async def _decline(self) -> None:
        """Tell the others that a second cluster gets nothing from this peer: else they would wait for it."""
        await self.until(lambda: self.cluster.second is not None or self.over())
        for peer, opening in self.cluster.refusals(self._format.codec.name):
            with suppress(PeerError):
                async with self.host.transport.open(peer, DATA, self.within(self.vote.patience_seconds)) as stream:
                    await stream.send(opening)

    async def _cut_when_over(self) -> None:
        if await self.until(self.over):
            self.cut.set()

    async def _await_call(self) -> None:
        """Restart the ballot's timer once the round should be called: the coordinator has the time of one ballot."""
        if await self.call.due() and self.call.resolved is None and not self.over():
            self.vote.progress()

    async def _watch_members(self) -> None:
        members = self.host.members
        roster = {member.peer for member in self.head.roster}
        version, seen = members.version, roster
        while loop_time() < self.deadline:
            live = self.live_peers()
            self._seen |= live
            for peer in sorted(seen - live):
                self.gone(peer)
            seen = live
            version = await members.changed(version, self.deadline)
            self.changed.notify()

    async def _watch_majority(self) -> None:
        while not self.over() and loop_time() < self.deadline:
            waits = not self.vote.votes and self.settings.awaits_backup()
            live = set[Member]() if waits else {*self.host.members.live(), self.me}
            self.vote.seek_fork(live, self.call.resolved)
            await self.until(self.over, self.within(WATCH_SECONDS))

    def roster_changes(self) -> bool:
        return self.next_roster.changes(self.call.has_work)

    def lagging(self) -> tuple[PeerId, ...]:
        """Peers to wait for, because they still fetch what this round begins from."""
        here = {*self.vote.observers, *self.vote.resting.peers(), *self._rested, self.me.peer}
        behind = self.live_peers() - here
        if len(self.head.roster) >= self._voters:  # others could not join
            behind &= {member.peer for member in self.head.roster}
        return self._lagging.among([peer for peer in behind if not self.call.has_begun(peer)])

    async def _ask_ahead(self) -> None:
        """Ask peers that are in the next round what was decided in this one. One after the other: all can answer."""
        while await self.until(lambda: bool(self._ahead) or self.over()) and not self.over():
            peer = next(iter(self._ahead))
            del self._ahead[peer]
            self.post.send(peer, StartBallot(self.head.key, self.me, self.vote.paxos.ballot, ()))
            await self.until(lambda: self.over() or peer not in self.live_peers(), self.within(ASK_SECONDS))  # noqa: B023

    # -- events -------------------------------------------------------------------------------------------------------

    def gone(self, peer: PeerId) -> None:
        if self.exchange and self._sees(peer):
            self.exchange.lose(peer, "gone")
        self.vote.gone(peer)
        self.associate.on_gone()

    def take(self, peer: PeerId, message: Header) -> None:
        self.vote.hear(peer)
        match message:
            case wire.Ready(_, offer):
                self.call.on_ready(peer, offer)
                self.vote.leaving |= self.call.leaving()
            case Resting():
                self.call.on_resting(peer, message)
            case OfferToLead() | ClusterReady():
                self._on_cluster_offer(peer, message)
            case wire.Plan(_, ballot) | PackedPlan(_, ballot):
                if peer != self.vote.tally.coordinator(ballot):
                    raise BadPayload(f"a plan of {peer}, which does not coordinate ballot {ballot}")
                if ballot == self.vote.paxos.promised:
                    self.on_plan(message if isinstance(message, wire.Plan) else unpacked(message, self.head.roster))
                self.vote.leaving |= self.call.leaving()
            case ClusterPlan() | ClusterVersion() | MeanDecided():
                self.associate.take(peer, message)
            case wire.AdmissionRequest(_, member, root):
                self._on_admission_request(peer, member, root)
            case VoteMessage():
                self.vote.receive(peer, message)
                self.call.led_by(self.vote.tally.coordinator(self.vote.paxos.promised))

    def on_plan(self, plan: wire.Plan | ClusteredPlan) -> None:
        """Take a plan of the ballot that this member has promised, also its own. The time of the ballot begins anew."""
        self.call.on_plan(plan)
        self.vote.progress()
        self.vote.moved(max(self.call.cut_at, loop_time()))  # before the cut nothing moves

    def _on_cluster_offer(self, peer: PeerId, message: OfferToLead | ClusterReady) -> None:
        self.call.on_cluster_offer(peer, message)
        self.vote.leaving |= self.call.leaving()
        if self.vote.certificate and isinstance(message, OfferToLead):  # it has another lead now, and was not told
            self.post.send(peer, self.vote.certificate)

    def _on_admission_request(self, peer: PeerId, member: Member, root: bytes) -> None:
        self.next_roster.ask(peer, member, root)
        self.changed.notify()
        is_new = self.vote.observers.get(peer) != member
        self.vote.observers[peer] = member
        if is_new and self.vote.forks_only:
            self.associate.request_admission(peer)  # the peer may have come after this member sent its requests
        if self.vote.certificate:
            self.post.send(peer, self.vote.certificate)

    def hear_of_next_round(self, peer: PeerId) -> None:
        """Note that a peer is in the next round, so that it knows what was decided in this one."""
        self._ahead[peer] = None
        self.changed.notify()

    def supersede(self) -> None:
        self.superseded = True
        self.changed.notify()

    def close(self) -> None:
        self.call.close(self._result)
        self.vote.stop()


def _inputs_of(head: Head, settings: Settings, codec: Codec) -> PlanInputs:
    many = 1 << 20
    size = codec.encoded_bytes(many)
    return PlanInputs(
        key=head.key,
        elements=settings.elements[head.key.fragment],
        bytes_per_element=size / many,
        complaints=head.complaints,
        robust=settings.robust,
        max_weight=settings.max_weight,
        grain=codec.grain,
        growth=lambda members: codec.reduced(members).encoded_bytes(many) / size,
    )
