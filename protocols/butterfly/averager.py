"""Butterfly all-reduce for a roster with one shared anchor: call, scatter, reduce, gather, vote.

This module keeps what stays from round to round, and passes each stream to its `protocols.butterfly.round.Round`. The
`RoundVote` of a lineage outlives the attempts at its round, so a peer that comes late learns what was decided.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from protocols import wire
from protocols.aio import task_group
from protocols.allreduce.all_reduce import DATA, BandwidthClaim
from protocols.allreduce.clustered_messages import (
    ClusterPlan,
    ClusterReady,
    ClusterVersion,
    ContributePartial,
    OfferToLead,
    PackedPlan,
)
from protocols.allreduce.parts import PartFormat
from protocols.base import (
    RUN_SCOPE,
    BadPayload,
    Deadline,
    Head,
    Header,
    Host,
    PeerId,
    PeerSilent,
    RoundKey,
    Settings,
    Stream,
)
from protocols.blobs.parts import PartCache
from protocols.butterfly.attaching import Attachment
from protocols.butterfly.attachment import AttachReply, LineageOf
from protocols.butterfly.coordinator import RoundCoordinator
from protocols.butterfly.lagging import LaggingPeers
from protocols.butterfly.resting import Resting
from protocols.butterfly.round import Round
from protocols.butterfly.vote import RoundVote
from protocols.consensus.messages import MESSAGES, MeanDecided, VoteMessage
from protocols.registry import ROBUST_RULES, require_known
from protocols.streams.endpoint import ControlChannel, ProtocolEndpoint, SessionTable
from protocols.vectors.codec import codec

CONTROL = "starling/butterfly/control/1"
PlanMessage = wire.Plan | PackedPlan | ClusterPlan | ClusterVersion
OfferMessage = wire.Ready | Resting | OfferToLead | ClusterReady
RoundMessage = OfferMessage | PlanMessage | MeanDecided | wire.AdmissionRequest | VoteMessage
ROUND_MESSAGES: tuple[type[RoundMessage], ...] = (
    wire.Ready,
    Resting,
    OfferToLead,
    ClusterReady,
    wire.Plan,
    PackedPlan,
    ClusterPlan,
    ClusterVersion,
    MeanDecided,
    wire.AdmissionRequest,
    *MESSAGES,
)
FORGOTTEN_LIMIT = 1 << 16
PARKED_LIMIT = 16  # messages kept of one peer that is a round ahead, until this peer gets there


class Butterfly:
    def __init__(
        self,
        host: Host,
        settings: Settings,
        part_cache: PartCache | None = None,
        on_ahead: Callable[[PeerId], None] = lambda peer: None,
        lineage_of: LineageOf = lambda round: None,
    ) -> None:
        """`on_ahead` is called with a peer that is rounds ahead of this one, or on another branch. `lineage_of`: see
        `protocols.butterfly.attachment`. Without it nobody attaches, and contributions to rounds of long ago count as
        lies.
        """
        self.settings = settings
        self._endpoint = ProtocolEndpoint(host, settings, is_acquainted=self._is_acquainted)
        self.me, self.accounting = self._endpoint.me, self._endpoint.accounting
        require_known("robust rule", settings.robust, ROBUST_RULES)
        self._claim = BandwidthClaim(settings)
        self.part_cache, self._on_ahead = part_cache or PartCache(host), on_ahead
        self._lagging = LaggingPeers(self.part_cache.blobs, sum(settings.elements))
        self._post = ControlChannel(self._endpoint, CONTROL)
        self._format = PartFormat.of(settings, codec(settings.codec), self.part_cache.pool)
        self._votes: dict[bytes, RoundVote] = {}
        # Lineages whose promises were dropped. If this peer comes back to one, on another branch, it only observes.
        self._forgotten: dict[bytes, None] = {}
        # The previous round stays: a member that was slow to contribute fetches the reduced parts from it.
        self._rounds = SessionTable[bytes, Round]()
        self._round: Round | None = None
        self._parked = defaultdict[PeerId, deque[RoundMessage]](lambda: deque(maxlen=PARKED_LIMIT))
        self._endpoint.listen(CONTROL, ROUND_MESSAGES, self._take)
        self._lineage_of = lineage_of
        self._attachment = Attachment(self._endpoint, settings.voters, lineage_of) if settings.clusters else None
        if self._attachment:
            self._endpoint.listen(CONTROL, (AttachReply,), self._attachment.take_refusal)
        self._endpoint.serve(DATA, wire.Contribute, self._on_data)
        self._endpoint.serve(DATA, ContributePartial, self._on_data)

    @property
    def lead(self) -> PeerId:
        """The member through which this peer's work counts, if it has no vote and has a place; else empty."""
        leads = self._attachment.leads() if self._attachment else ()
        return leads[0] if leads else ""

    def ties(self) -> tuple[PeerId, ...]:
        """The peers that this one has to see because of clusters."""
        return self._attachment.ties() if self._attachment else ()

    def followers(self) -> tuple[PeerId, ...]:
        """The peers for which this one stands by. They have to see it."""
        return self._attachment.followers() if self._attachment else ()

    @asynccontextmanager
    async def enter(self, head: Head, deadline: Deadline, since: float | None = None) -> AsyncIterator[Round]:
        lineage, vote, last = head.key.lineage, self._vote_after(head), self._round
        self._lagging.begin(deadline, self._awaited_blobs(head, last))
        if attachment := self._attachment:
            attachment.begin(head)
        attempt = Round(
            endpoint=self._endpoint,
            part_format=self._format,
            part_cache=self.part_cache,
            post=self._post,
            head=head,
            vote=vote,
            bandwidth=self._claim.renewed(),
            deadline=deadline,
            since=since,
            lagging=self._lagging,
            rested=last.vote.resting.peers() if last else frozenset(),
            attachment=attachment,
        )
        coordinator = RoundCoordinator(attempt)
        self._forget(head.key)
        self._round = attempt
        self._endpoint.bind(head.key)
        self._post.on_gone = attempt.gone
        known = {member.peer for member in (*head.roster, *self._endpoint.host.members.live())}
        try:
            async with task_group() as group, self._post.run(group, deadline, known):
                work = attempt.live(), coordinator.run(), self.part_cache.save()
                background = [group.create_task(each) for each in work]
                if attachment:
                    background.append(group.create_task(attachment.run(deadline)))
                self._rounds.open(lineage, attempt)
                self._unpark()
                try:
                    yield attempt
                finally:
                    for each in background:
                        each.cancel()
                    in_time = attempt.exchange.in_time if attempt.exchange else None
                    if in_time is not None:
                        self._claim.observe(in_time)
        finally:
            attempt.close()
            if record := vote.decided:
                self.part_cache.decided(lineage, {part.digest for part in record.parts})

    def _awaited_blobs(self, head: Head, last: Round | None) -> Collection[bytes] | None:
        """What a peer may fetch while a round waits for it; None: anything. Rounds of a stage wait for no such peer."""
        if head.key.scope != RUN_SCOPE:
            return ()
        if head.roster == (self.me,):
            return None
        return self.part_cache.of(last.head.key.lineage) if last else ()

    def _vote_after(self, head: Head) -> RoundVote:
        lineage = head.key.lineage
        if lineage not in self._votes:
            self._votes[lineage] = RoundVote(
                endpoint=self._endpoint,
                head=head,
                may_vote=lineage not in self._forgotten,
                post=self._post,
                part_cache=self.part_cache,
                on_rival=self._on_ahead,
            )
        return self._votes[lineage]

    def supersede(self) -> None:
        """End the round under way as superseded, because a better branch is known."""
        if self._round:
            self._round.supersede()

    def _forget(self, key: RoundKey) -> None:
        kept_rounds = self.settings.keep_rounds * len(self.settings.elements)
        for lineage, each in list(self._votes.items()):
            if each.head.key.round < key.round - kept_rounds:
                del self._votes[lineage]
                self._forgotten[lineage] = None
        while len(self._forgotten) > FORGOTTEN_LIMIT:
            del self._forgotten[next(iter(self._forgotten))]
        # The previous round still serves its parts. Parts of an undecided round stay, since this member may have voted
        # for them.
        age = {
            lineage: key.round - each.head.key.round if each.certificate else 0 for lineage, each in self._votes.items()
        }
        self.part_cache.keep(
            [lineage for lineage, rounds in age.items() if rounds <= kept_rounds],
            [lineage for lineage, rounds in age.items() if rounds <= 1],
        )
        kept = [each.head.key for each in self._rounds.values()]
        for past in self._rounds.close(each.lineage for each in kept if each.round != key.round - 1):
            if past.exchange:  # it serves no new streams, so the memory of its parts is free at once
                past.exchange.discard()

    # -- control ------------------------------------------------------------------------------------------------------

    def _take(self, peer: PeerId, message: RoundMessage) -> None:
        attempt = self._round
        if attempt is None:
            return self._parked[peer].append(message)
        key, here = message.key, attempt.head.key
        if key == here:
            attempt.take(peer, message)
        elif key.lineage in self._votes:
            vote = self._votes[key.lineage]
            if isinstance(message, VoteMessage):
                vote.receive(peer, message)
            elif vote.certificate:
                self._post.send(peer, vote.certificate)
        elif key.round == here.round + 1:
            self._parked[peer].append(message)
            attempt.hear_of_next_round(peer)
        else:
            self._on_ahead(peer)

    def _unpark(self) -> None:
        parked = [(peer, message) for peer, messages in self._parked.items() for message in messages]
        self._parked.clear()
        for peer, message in parked:
            self._endpoint.deliver(CONTROL, peer, message)

    # -- data ---------------------------------------------------------------------------------------------------------

    async def _is_acquainted(self, stream: Stream, opening: Header) -> bool:
        """Whether a plan of clusters names the opener. Its lead may have told it the plan earlier than this peer's."""
        if self._attachment is None or not isinstance(opening, wire.Contribute | ContributePartial):
            return False
        attempt = await self._attempt(stream, opening.key)
        return await attempt.is_acquainted(stream.peer, opening)

    async def _on_data(self, stream: Stream, opening: wire.Contribute | ContributePartial) -> None:
        attempt = await self._attempt(stream, opening.key)
        await attempt.serve(stream.peer, stream, opening)

    async def _attempt(self, stream: Stream, key: RoundKey) -> Round:
        """The round of a data stream. If that is the next round, wait until this peer enters it."""
        here = self._round.head.key if self._round else None

        def is_past() -> bool:
            return self._round is not None and key.round < self._round.head.key.round

        if here and (key.round > here.round + 1 or (key.round == here.round and key != here)):
            raise BadPayload(f"a contribution to another lineage, round {key.round}")
        if is_past() and not self._rounds.get(key.lineage):
            # an honest peer that was cut off may be in a round of long ago still
            if key.lineage not in self._votes and self._lineage_of(key.round) != key.lineage:
                raise BadPayload(f"a stale contribution to round {key.round}")
            raise PeerSilent(stream.peer, f"round {key.round} is over")
        attempt = await self._rounds.wait_for(key.lineage, stream, is_past)
        if attempt is None:
            raise PeerSilent(stream.peer, f"round {key.round} is over")
        return attempt
