"""Drives one lineage's vote at one member: sends messages, sets timers, reports which parts are here.

`protocols.consensus.paxos` decides, without a clock or a network; the driver supplies both. A driver is kept as long as
other peers may ask about its lineage, while sessions come and go. Without a session its timers are stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence

from protocols.aio import Notifier, loop_time
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
"""Time of a ballot beyond two round trips and the data phase, because honest members pause, too."""
ROUND_TRIP_LIMIT_SECONDS = 0.75
"""Longest round trip that counts. If opening a stream took longer, the link was cut meanwhile, or a machine was busy.

The bound also leaves time for a repair. A member that stops in the middle of its contribution is late at
`SCATTER_SHARE` of the budget, and as a reducer it is overdue T_b later. With this bound, the rest of
`BUDGET_FLOOR_SECONDS` is enough for another member to reduce its part."""
LENIENCE = 1.25
"""A ballot's timer is this factor longer than T_b: members give up a silent member before the coordinator that waits
for it."""

_MEMBERS_ONLY = (Prepare, Promise, Propose, Accept, BallotNack)


class ConsensusDriver:
    """One member's part in the decision on the record that extends one lineage.

    Attributes:
        head: the head that the round extends; its state root may differ between attempts.
        votes: whether this member has a vote.
        forks_only: whether it has no vote, but may fork with others like it: successors or former members.
        state: what this member knows about the round, besides the vote.
        changed: the present attempt's notifier, notified after every event.
    """

    def __init__(
        self, context: ButterflyContext, head: Head, may_vote: bool, on_rival: Callable[[PeerId], None]
    ) -> None:
        """
        Args:
            may_vote: whether this member votes if it is in the roster; otherwise it only takes certificates.
            on_rival: called with a peer that sent a decision which this member cannot follow.
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
        self._sender = me.peer

    @property
    def certificate(self) -> Certificate | None:
        return self.vote.decided

    @property
    def patience_seconds(self) -> float:
        """T_b, the time of one ballot: two round trips, the data phase and a floor."""
        trips = self._context.post.round_trip_seconds
        slowest = max((trips.get(member.peer, 0.0) for member in self.tally.roster), default=0.0)
        return BALLOT_FLOOR_SECONDS + 2 * min(slowest, ROUND_TRIP_LIMIT_SECONDS) + self.state.phase_seconds

    # -- events -------------------------------------------------------------------------------------------------------

    def begin_attempt(self, head: Head, changed: Notifier) -> None:
        """Note that a session of the round begins. `start` follows if the session takes part in the vote."""
        self.head, self.changed = head, changed

    def start(self) -> None:
        """Start the timers. A ballot in which this member sent a plan in an earlier attempt is given up."""
        self._awake = True
        if self.state.attempt_restarted():
            self._act(self.vote.timeout(self.vote.ballot))
        elif self.vote.ballot:
            self.progress()

    def stop(self) -> None:
        """Stop the timers, because the session or the vote is over."""
        self._awake = False
        if self._timer:
            self._timer.cancel()

    def receive(self, peer: PeerId, message: VoteMessage) -> None:
        """Take a message of the vote.

        Raises:
            BadPayload: a vote of a peer that has none, or a proposal that no honest member makes.
        """
        if message.sender.peer != peer:
            raise BadPayload(f"a vote in the name of {message.sender.peer}")
        if isinstance(message, _MEMBERS_ONLY) and not self._takes_part(message.sender):
            raise BadPayload("a vote of a peer outside the roster, or of another incarnation")
        if isinstance(message, Propose):
            self._examine(message)
        if isinstance(message, Promise) and message.record:
            self._admissible("a promise with a record", message.accepted, message.record)
        self.hear(peer)
        self._sender = peer
        self._act(self.vote.receive(peer, message))

    def _takes_part(self, sender: Member) -> bool:
        """Whether a sender takes part: a member of the roster, or a peer that, like this one, may only fork."""
        return self.tally.counts(sender) or (self.forks_only and self.tally.forks_only(sender))

    def _admissible(self, what: str, ballot: int, record: bytes) -> Value:
        """Decode a record that an honest member with this member's state may have put to the vote.

        Raises:
            BadPayload: the record may not be put to the vote, or starts from another state.
        """
        value = self.tally.value(ballot, record)
        if value is None or value.record.state_root != self.head.state_root:
            raise BadPayload(f"{what} that may not be put to the vote, or of another state")
        return value

    def _examine(self, proposal: Propose) -> None:
        """Refuse a record that may not be put to the vote, starts from another state, or does not fit the vector.

        A quorum of the roster must be in the next roster or have announced that it leaves. The tally cannot check
        this, because it does not know which members leave.

        In ballot 0, a member that never said that it rests refuses a SKIP for want of work, because its coordinator has
        heard no such statement. In later ballots a record may be bound by an earlier vote: refusing it could stop the
        run.

        Raises:
            BadPayload: the record is refused.
        """
        value = self._admissible("a proposal", proposal.ballot, proposal.record)
        record, settings = value.record, self._context.settings
        willing = [each for each in self.tally.roster if each in record.roster or each.peer in self.state.leaving]
        if len(willing) < self.tally.quorum and not value.is_fork:
            raise BadPayload("a proposal that may not be put to the vote: it evicts too many members that do not leave")
        unfounded = record.idle and not self.state.resting.has_rested(self._context.me.peer)
        if unfounded and proposal.ballot == 0 and not value.is_fork:
            raise BadPayload("a proposal to skip for want of work, while this member works")
        if record.kind != Kind.MEAN and not record.parts:
            return
        if not record.parts or not record.peers or not record.tiles(settings.elements[self.head.key.fragment]):
            raise BadPayload("a proposal that is not of the whole vector")
        for index, part in enumerate(record.parts):
            held = self._context.part_cache.get(part.digest)
            if held and (held.low, held.high) != record.bounds[index : index + 2]:
                raise BadPayload(f"a proposal with part {index} at another place")

    def hear(self, peer: PeerId) -> None:
        """Note that a message or a stream of a peer came in."""
        self.state.peer_heard(peer, loop_time())

    def moved(self, at: Deadline | None = None) -> None:
        """Give the present ballot its whole time again, because data flows now or will flow from `at` on."""
        self._moved = loop_time() if at is None else at

    def progress(self) -> None:
        """Begin the present ballot's time, because the round is called or should be."""
        self._act(self.vote.progress())

    def gone(self, peer: PeerId) -> None:
        """Note that a peer is known to be gone."""
        self._act(self.vote.gone(peer))

    def suspect(self, peer: PeerId) -> None:
        """Go on to the next ballot if a peer that was silent for the time of a ballot coordinates this one."""
        if peer == self.tally.coordinator(self.vote.ballot):
            self._act(self.vote.timeout(self.vote.ballot))

    def chosen(self, ballot: int, record: bytes) -> None:
        """Propose a record, as the coordinator of a ballot."""
        self.state.record_chosen()
        self._act(self.vote.chosen(ballot, record))

    def holds(self, plan: bytes, parts: Sequence[PartDone], others: Collection[bytes]) -> None:
        """Report the parts that are here: of the present plan as their reducers signed them, all others by digest."""
        self._act(self.vote.holds(plan, parts, others))

    def fork(self, record: bytes) -> None:
        """Seek agreement on this FORK with the members at hand; empty if the majority is back."""
        self._act(self.vote.fork(record))

    # -- instructions -------------------------------------------------------------------------------------------------

    def _act(self, instructions: Sequence[Instruction]) -> None:
        for each in instructions:
            self._follow(each)
        self.state.ballot_promised(self.vote.promised, loop_time())
        self.changed.notify()

    def _follow(self, instruction: Instruction) -> None:
        match instruction:
            case Send(to, message):
                self._send(to, message)
            case SetTimer(ballot, factor):
                self._arm(ballot, factor)
            case ProposalNeeded(ballot, promises):
                self.state.ballot_won(ballot, promises)
            case Fetch(record, parts):
                self.state.parts_missing(record, parts)
            case Decided(certificate):
                self.stop()
                self._send(self.state.onlookers, certificate)
            case ConflictingCertificate():
                self._on_rival(self._sender)
            case ReportFault(peer, why):
                self._context.accounting.name(peer, f"refused: {why}")

    def _send(self, peers: Iterable[PeerId], message: VoteMessage) -> None:
        for peer in peers:
            self._context.post.send(peer, message)

    def _arm(self, ballot: int, factor: int) -> None:
        if self._timer:
            self._timer.cancel()
        self.moved()
        if self._awake and self.certificate is None:
            self._check_timer(ballot, factor)

    def _check_timer(self, ballot: int, factor: int) -> None:
        """End a ballot whose time is over; otherwise check again when it should be."""
        due = self._moved + factor * LENIENCE * self.patience_seconds
        if loop_time() < due:
            self._timer = asyncio.get_running_loop().call_at(due, self._check_timer, ballot, factor)
        else:
            self._act(self.vote.timeout(ballot))
