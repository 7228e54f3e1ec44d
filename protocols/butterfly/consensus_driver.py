"""Drives one lineage's vote at one member: sends messages, sets timers, reports which parts are here.

`protocols.consensus.paxos` decides, without a clock or a network; the driver supplies both. It lives for as long as
other peers may ask about its lineage, while sessions come and go. Without a session its timers rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence

from protocols.aio import Notifier
from protocols.base import BadPayload, Deadline, Head, Member, PeerId
from protocols.butterfly.context import ButterflyContext
from protocols.butterfly.round_state import RoundState
from protocols.consensus.messages import (
    Accept,
    BallotNack,
    Certificate,
    ConflictingCertificate,
    Decided,
    Fetch,
    Instruction,
    Prepare,
    Promise,
    ProposalNeeded,
    Propose,
    ReportFault,
    Send,
    SetTimer,
    VoteMessage,
)
from protocols.consensus.paxos import PaxosInstance
from protocols.consensus.record import Kind
from protocols.consensus.vote_tally import ONLOOKER, Value, VoteTally
from protocols.wire import PartDone

BALLOT_FLOOR_SECONDS = 2.0
"""What a ballot is given beyond two round trips and the time of its data phase: honest members pause, too."""
ROUND_TRIP_LIMIT_SECONDS = 0.75
"""What opening a stream took longer than that was no round trip: the link was cut in between, or a machine was busy.
One that stops in mid contribution is late at `SCATTER_SHARE` of the budget, and as a reducer overdue a patience later:
within this bound what is left of `BUDGET_FLOOR_SECONDS` is enough for another to reduce its part."""
LENIENCE = 1.25
"""A silent member is given up before the coordinator that waits for it is."""

_MEMBERS_ONLY = (Prepare, Promise, Propose, Accept, BallotNack)


class ConsensusDriver:
    """One member's part in the decision on one lineage's child.

    Attributes:
        head: the head that the round extends; its state root may differ between attempts.
        votes: whether this member has a vote.
        forks_only: whether it has none, but may fork with others like it: successors, or former members.
        state: what this member knows of the round, beside the vote.
        changed: rings after every event; that of the present attempt.
    """

    def __init__(
        self, context: ButterflyContext, head: Head, may_vote: bool, on_rival: Callable[[PeerId], None]
    ) -> None:
        """
        Args:
            may_vote: whether this member votes if it is in the roster; else it only takes certificates.
            on_rival: called with a peer that sent a decision which this member cannot take.
        """
        me, settings = context.me if may_vote else Member(context.me.peer, ONLOOKER), context.settings
        self.votes = me in head.roster
        signer, fork_peers = context.host.signer, settings.fork_peers
        self.head, self.tally = head, VoteTally(head.key, head.roster, signer, settings.quorum, fork_peers, head.former)
        self.vote, self.forks_only = PaxosInstance(me, self.tally), self.tally.forks_only(me)
        self.state = RoundState(0 if self.votes and self.tally.coordinator(0) == me.peer else None)
        self.changed = Notifier()
        self._context, self._on_rival = context, on_rival
        self._timer: asyncio.TimerHandle | None = None
        self._moved = 0.0
        self._awake = False
        self._speaker = me.peer

    @property
    def certificate(self) -> Certificate | None:
        return self.vote.decided

    @property
    def patience_seconds(self) -> float:
        """T_b: two round trips, the data phase, and a floor."""
        trips = self._context.post.round_trip_seconds
        slowest = max((trips.get(member.peer, 0.0) for member in self.tally.roster), default=0.0)
        return BALLOT_FLOOR_SECONDS + 2 * min(slowest, ROUND_TRIP_LIMIT_SECONDS) + self.state.phase_seconds

    # -- events -------------------------------------------------------------------------------------------------------

    def begin_attempt(self, head: Head, changed: Notifier) -> None:
        """A session of the round is here; `start` follows if it takes part in the vote."""
        self.head, self.changed = head, changed

    def start(self) -> None:
        """Messages and timers go on."""
        self._awake = True
        if self.state.attempt_restarted():
            self._act(self.vote.timeout(self.vote.ballot))
        elif self.vote.ballot:
            self.progress()

    def stop(self) -> None:
        """It is over: timers rest."""
        self._awake = False
        if self._timer:
            self._timer.cancel()

    def receive(self, peer: PeerId, message: VoteMessage) -> None:
        """A message of the vote.

        Raises:
            BadPayload: a vote of a peer that has none, or a proposal that no honest member makes.
        """
        if message.sender.peer != peer:
            raise BadPayload(f"a vote in the name of {message.sender.peer}")
        if isinstance(message, _MEMBERS_ONLY) and not self._has_a_voice(message.sender):
            raise BadPayload("a vote of no member of the roster, or in another life")
        if isinstance(message, Propose):
            self._examine(message)
        if isinstance(message, Promise) and message.record:
            self._admissible("a promise with a record", message.accepted, message.record)
        self.hear(peer)
        self._speaker = peer
        self._act(self.vote.receive(peer, message))

    def _has_a_voice(self, sender: Member) -> bool:
        """A member has; among peers that may only fork, one of them."""
        return self.tally.counts(sender) or (self.forks_only and self.tally.forks_only(sender))

    def _admissible(self, what: str, ballot: int, record: bytes) -> Value:
        """The record, which an honest member with this member's state may have put to the vote.

        Raises:
            BadPayload: it may not be put to the vote, or starts from another state.
        """
        value = self.tally.value(ballot, record)
        if value is None or value.record.state_root != self.head.state_root:
            raise BadPayload(f"{what} that may not be put to the vote, or of another state")
        return value

    def _examine(self, proposal: Propose) -> None:
        """Refuse a record that may not be put to the vote, starts from another state, or does not fit the vector.

        It may evict as many as could decide without the others only if these leave, which the tally does not know.

        Raises:
            BadPayload: it is such a one.
        """
        value = self._admissible("a proposal", proposal.ballot, proposal.record)
        record, settings = value.record, self._context.settings
        willing = [each for each in self.tally.roster if each in record.roster or each.peer in self.state.leaving]
        if len(willing) < self.tally.quorum and not value.is_fork:
            raise BadPayload("a proposal that may not be put to the vote: it evicts too many who do not leave")
        if record.kind != Kind.MEAN and not record.parts:
            return
        if not record.parts or not record.peers or not record.tiles(settings.elements[self.head.key.fragment]):
            raise BadPayload("a proposal that is not of the whole vector")
        for index, part in enumerate(record.parts):
            held = self._context.part_cache.get(part.digest)
            if held and (held.low, held.high) != record.bounds[index : index + 2]:
                raise BadPayload(f"a proposal with part {index} at another place")

    def hear(self, peer: PeerId) -> None:
        """A message or a stream of a peer came in."""
        self.state.peer_heard(peer, asyncio.get_running_loop().time())

    def moved(self, at: Deadline | None = None) -> None:
        """Data flows, or will from then on: the present ballot has its whole time again."""
        self._moved = asyncio.get_running_loop().time() if at is None else at

    def progress(self) -> None:
        """The round is called, or should be: the present ballot's time begins."""
        self._act(self.vote.progress())

    def gone(self, peer: PeerId) -> None:
        """A peer is visibly gone."""
        self._act(self.vote.gone(peer))

    def suspect(self, peer: PeerId) -> None:
        """A peer has been silent for as long as a ballot may take: if it coordinates this one, on to the next."""
        if peer == self.tally.coordinator(self.vote.ballot):
            self._act(self.vote.timeout(self.vote.ballot))

    def chosen(self, ballot: int, record: bytes) -> None:
        """Propose a record, as the coordinator of a ballot."""
        self.state.record_chosen()
        self._act(self.vote.chosen(ballot, record))

    def holds(self, plan: bytes, parts: Sequence[PartDone], others: Collection[bytes]) -> None:
        """The parts that are here: of the present plan as their reducers signed them, and all others by digest."""
        self._act(self.vote.holds(plan, parts, others))

    def fork(self, record: bytes) -> None:
        """Agree on this FORK with the members at hand; empty: the majority is back."""
        self._act(self.vote.fork(record))

    # -- instructions -------------------------------------------------------------------------------------------------

    def _act(self, instructions: Sequence[Instruction]) -> None:
        for each in instructions:
            self._follow(each)
        self.state.ballot_promised(self.vote.promised)
        self.changed.notify()

    def _follow(self, instruction: Instruction) -> None:
        match instruction:
            case Send(to, message):
                self._tell(to, message)
            case SetTimer(ballot, factor):
                self._arm(ballot, factor)
            case ProposalNeeded(ballot, promises):
                self.state.ballot_won(ballot, promises)
            case Fetch(record, parts):
                self.state.parts_missing(record, parts)
            case Decided(certificate):
                self.stop()
                self._tell(self.state.onlookers, certificate)
            case ConflictingCertificate():
                self._on_rival(self._speaker)
            case ReportFault(peer, why):
                self._context.accounting.name(peer, f"refused: {why}")

    def _tell(self, peers: Iterable[PeerId], message: VoteMessage) -> None:
        for peer in peers:
            self._context.post.send(peer, message)

    def _arm(self, ballot: int, factor: int) -> None:
        if self._timer:
            self._timer.cancel()
        self.moved()
        if self._awake and self.certificate is None:
            self._schedule(ballot, factor)

    def _schedule(self, ballot: int, factor: int) -> None:
        self._timer = asyncio.get_running_loop().call_at(self._due(factor), self._on_timer, ballot, factor)

    def _due(self, factor: int) -> Deadline:
        return self._moved + factor * LENIENCE * self.patience_seconds

    def _on_timer(self, ballot: int, factor: int) -> None:
        if asyncio.get_running_loop().time() < self._due(factor):
            return self._schedule(ballot, factor)
        self._act(self.vote.timeout(ballot))
