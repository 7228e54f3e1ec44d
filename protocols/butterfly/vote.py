"""One member's side of the vote on the record that extends one lineage, and what it knows about that round.

`protocols.consensus.paxos` decides, without a clock or a network; `RoundVote` supplies both. It is kept as long as
other peers may ask about its lineage. Between attempts at the round its timers are stopped.

When the majority has been gone for long, the members that are left may FORK, if the run allows it. If none is left, as
after a restart of the whole swarm, their successors may (`protocols.consensus.vote_tally`), from a state that they
hold. If members left one after the other and the last is gone, former members may: a majority of an earlier roster.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from protocols.aio import Notifier, loop_time
from protocols.allreduce.clustered_messages import MAX_CLUSTER
from protocols.allreduce.clustered_plan import ResolvedClusters, RoundPlan
from protocols.allreduce.parts import ReducedPart
from protocols.allreduce.plan import BUDGET_FLOOR_SECONDS
from protocols.base import BadPayload, Deadline, Head, LinkFault, Member, PeerId
from protocols.blobs.parts import PartCache
from protocols.butterfly.resting import RestingMembers
from protocols.consensus import record as records
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
from protocols.consensus.record import Kind, Record
from protocols.consensus.vote_tally import OBSERVER, Value, VoteTally
from protocols.streams.endpoint import ControlChannel, ProtocolEndpoint
from protocols.wire import PartDigest, PartDone

BALLOT_FLOOR_SECONDS = 2.0
"""Time of a ballot beyond two round trips and the data phase, because honest members pause, too."""
ROUND_TRIP_LIMIT_SECONDS = 0.75
"""Longest round trip that counts. If opening a stream took longer, the link was cut meanwhile, or a machine was busy.

A member that stops in the middle of its contribution is late at `SCATTER_SHARE` of the budget, and as a reducer overdue
T_b later. With this bound, the rest of `BUDGET_FLOOR_SECONDS` is enough for another member to reduce its part."""
LENIENCE = 1.25
"""A ballot's timer is this factor longer than T_b: members give up a silent member before the coordinator that waits
for it."""
LATE_SECONDS = 0.25
"""Time for votes after the decision. A member that has not voted by then may not hear the coordinator."""
INFORMERS = 2  # members that send a certificate to those, in case one cannot reach them
FORK_BUDGETS = 3
"""Members fork when the majority has been gone for this many budgets of a round; for one, if the roster is of two."""
FORMER_BUDGETS = 2
"""Former members wait for this many budgets: what a last member decided alone, and may lose, is little."""
COMPLETE_SECONDS = 5.0
"""Wait if the successors of the whole roster are here: no member can come back, but another peer may know more."""

_MEMBERS_ONLY = (Prepare, Promise, Propose, Accept, BallotNack)


class RoundVote:
    """One member's vote. It notifies `changed`, which belongs to the present attempt, after every event."""

    def __init__(
        self,
        *,
        endpoint: ProtocolEndpoint,
        head: Head,
        may_vote: bool,
        post: ControlChannel,
        part_cache: PartCache,
        on_rival: Callable[[PeerId], None],
    ) -> None:
        """Without `may_vote` this peer only takes certificates, even if it is in the roster. `on_rival` is called with
        a peer that sent a decision which this member cannot follow.
        """
        me, settings = endpoint.me, endpoint.settings
        voter = me if may_vote else Member(me.peer, OBSERVER)
        self.votes = voter in head.roster
        self.head = head  # its state root may differ between attempts
        self.tally = VoteTally(
            head.key, head.roster, endpoint.host.signer, settings.quorum, settings.fork_peers, head.former
        )
        self.tally.removed, self.tally.most_voters = endpoint.host.removed, settings.voters
        self.paxos = PaxosInstance(voter, self.tally)
        self.forks_only = self.tally.forks_only(voter)  # no vote, but it may fork with others like it
        self.changed = Notifier()
        self._called: Callable[[], RoundPlan | None] = lambda: None
        # the ballot that this member coordinates and may still choose a record for, and the promises for it
        self.leading: int | None = 0 if self.votes and self.tally.coordinator(0) == me.peer else None
        self.promises: tuple[Promise, ...] = ()
        self.published = -1  # the last ballot in which this member sent a plan
        # digests of the parts that this member must hold before it can vote for the record `proposed`
        self.wanted: tuple[bytes, ...] = ()
        self.proposed = b""
        self.heard: dict[PeerId, float] = {}  # when this member last heard of a peer
        self.leaving: set[PeerId] = set()  # members that have announced that they leave after this round, for good
        self.resting = RestingMembers()
        self.observers: dict[PeerId, Member] = {}  # they wait for the decision without being in the roster
        self.to_tell: Callable[[], Iterable[PeerId]] = tuple  # other peers to which this member sends the certificate
        self.mates: Callable[[bytes], Collection[PeerId]] = lambda plan: ()  # those of them that know this plan
        self.phase_seconds = 0.0  # expected length of the data phase
        self._me, self._settings, self._post, self._accounting = me, settings, post, endpoint.accounting
        self._part_cache, self._on_rival = part_cache, on_rival
        self._promised, self._promised_at = 0, 0.0  # its coordinator asks all for promises about then
        self._voted = {me.peer}  # this member, and those of which a vote has come
        self._alone_since: float | None = None
        self._fork: tuple[Member, ...] = ()  # the members with which this attempt seeks a fork
        self._timer: asyncio.TimerHandle | None = None
        self._moved = 0.0
        self._awake = False
        self._sender = me.peer

    @property
    def certificate(self) -> Certificate | None:
        return self.paxos.decided

    @property
    def decided(self) -> Record | None:
        value = self.tally.value(0, self.paxos.decided.record) if self.paxos.decided else None
        return value.record if value else None

    @property
    def patience_seconds(self) -> float:
        """T_b, the time of one ballot: two round trips, the data phase and a floor."""
        trips = self._post.round_trip_seconds
        slowest = max((trips.get(member.peer, 0.0) for member in self.tally.roster), default=0.0)
        return BALLOT_FLOOR_SECONDS + 2 * min(slowest, ROUND_TRIP_LIMIT_SECONDS) + self.phase_seconds

    # -- events -------------------------------------------------------------------------------------------------------

    def begin_attempt(self, head: Head, changed: Notifier, called: Callable[[], RoundPlan | None]) -> None:
        """`called` returns the latest plan that this member knows."""
        self.head, self.changed, self._called, self._fork = head, changed, called, ()

    def start(self) -> None:
        """Start the timers. A ballot in which this member sent a plan in an earlier attempt is given up."""
        self._awake = True
        if self.leading is not None and self.leading == self.published:
            self.leading = None
            self._act(self.paxos.timeout(self.paxos.ballot))
        elif self.paxos.ballot:
            self.progress()

    def stop(self) -> None:
        self._awake = False
        if self._timer:
            self._timer.cancel()

    def receive(self, peer: PeerId, message: VoteMessage) -> None:
        """Take a message of the vote. Raises BadPayload if the peer has no vote, or no honest member proposes this."""
        if message.sender.peer != peer:
            raise BadPayload(f"a vote in the name of {message.sender.peer}")
        takes_part = self.tally.counts(message.sender) or (self.forks_only and self.tally.forks_only(message.sender))
        if isinstance(message, _MEMBERS_ONLY) and not takes_part:
            raise BadPayload("a vote of a peer outside the roster, or of another incarnation")
        if isinstance(message, Propose):
            self._examine(message)
        if isinstance(message, Promise) and message.record:
            self._admissible("a promise with a record", message.accepted, message.record)
        if isinstance(message, Accept):
            self._voted.add(peer)
        self.hear(peer)
        self._sender = peer
        self._act(self.paxos.receive(peer, message))

    def _admissible(self, what: str, ballot: int, record: bytes) -> Value:
        """Decode a record that an honest member with this member's state may have put to the vote."""
        value = self.tally.value(ballot, record)
        if value is None or value.record.state_root != self.head.state_root:
            raise BadPayload(f"{what} that may not be put to the vote, or of another state")
        return value

    def _examine(self, proposal: Propose) -> None:
        """Refuse a record that may not be put to the vote, starts from another state, or does not fit the vector.

        A quorum of the roster must be in the next roster or have announced that it leaves, which the tally does not
        know. In ballot 0, a member that never said that it rests refuses a SKIP "because all rest". In later ballots a
        record may be bound by an earlier vote: refusing it could stop the run.
        """
        value = self._admissible("a proposal", proposal.ballot, proposal.record)
        record = value.record
        willing = [each for each in self.tally.roster if each in record.roster or each.peer in self.leaving]
        if len(willing) < self.tally.quorum and not value.is_fork:
            raise BadPayload("a proposal that may not be put to the vote: it evicts too many members that do not leave")
        unfounded = record.idle and not self.resting.has_rested(self._me.peer)
        if unfounded and proposal.ballot == 0 and not value.is_fork:
            raise BadPayload("proposed to skip a round in which this member has work")
        if record.kind != Kind.MEAN and not record.parts:
            return
        if not record.parts or not record.peers or not record.tiles(self._settings.elements[self.head.key.fragment]):
            raise BadPayload("a proposal that is not of the whole vector")
        self._examine_clusters(record)
        for index, part in enumerate(record.parts):
            held = self._part_cache.get(part.digest)
            if held and (held.low, held.high) != record.bounds[index : index + 2]:
                raise BadPayload(f"a proposal with part {index} at another place")

    def _examine_clusters(self, record: Record) -> None:
        """Refuse a mean whose clusters are not the plan's, if this member knows that plan, or are not led by members.

        The hash of a plan covers its clusters. So an honest record never has others, in whichever ballot.
        """
        clusters, plan = record.clusters, self._called()
        if clusters and not self._settings.clusters:
            raise BadPayload("a proposal of a mean of clusters, which this run has not")
        sizes, leads = [cluster.size for cluster in clusters], {member.peer for member in self.tally.roster}
        if clusters and not leads.issuperset(record.peers):
            raise BadPayload("a proposal of clusters that are not led by members")
        if not all(0 < size <= MAX_CLUSTER for size in sizes):
            raise BadPayload("a proposal of an empty cluster, or of one that is too large")
        if plan and plan.digest == record.plan:
            due = (plan.peers, plan.clusters) if isinstance(plan, ResolvedClusters) else (record.peers, ())
            if due != (record.peers, clusters):
                raise BadPayload("a proposal of other clusters than those of the plan")

    def hear(self, peer: PeerId) -> None:
        self.heard[peer] = loop_time()

    def silent(self, peers: Iterable[PeerId]) -> list[PeerId]:
        """The peers that have been silent for the time of a ballot and did not answer the present one's first message.
        Silence since that answer tells nothing: while members train, they send few offers, and those to few peers.
        """
        since = min(self._promised_at, loop_time() - self.patience_seconds)
        return [peer for peer in peers if self.heard.get(peer, -math.inf) < since]

    def moved(self, at: Deadline | None = None) -> None:
        """Give the present ballot its whole time again, because data flows now or will flow from `at` on."""
        self._moved = loop_time() if at is None else at

    def progress(self) -> None:
        self._act(self.paxos.progress())

    def gone(self, peer: PeerId) -> None:
        self._act(self.paxos.gone(peer))

    def suspect(self, peer: PeerId) -> None:
        """Begin the next ballot if a peer that was silent for the time of a ballot coordinates this one."""
        if peer == self.tally.coordinator(self.paxos.ballot):
            self._act(self.paxos.timeout(self.paxos.ballot))

    def propose(self, ballot: int, record: Record) -> None:
        self.leading = None
        self._act(self.paxos.chosen(ballot, records.encode(record)))

    def begin_data_phase(self, resolved: RoundPlan) -> None:
        """Expect the parts of a plan. Of the parts held, those of the records that this member accepted are kept."""
        self.phase_seconds = resolved.phase_seconds
        bound = [value.record for value in (self.paxos.accepted, self.paxos.forked) if value]
        lineage = self.head.key.lineage
        self._part_cache.retain(lineage, {part.digest for record in bound for part in record.parts})
        self._act(self.paxos.report_parts(resolved.digest, (), self._part_cache.of(lineage)))

    def keep(self, part: ReducedPart, done: PartDone | None = None) -> None:
        """Keep a sealed part, which the vote may wait for; `done` as its reducer signed it, if the plan is present."""
        assert part.result is not None
        self._part_cache.put(self.head.key.lineage, part)
        self._act(self.paxos.report_part(part.result.digest, done))

    # -- instructions -------------------------------------------------------------------------------------------------

    def _act(self, instructions: Sequence[Instruction]) -> None:
        for each in instructions:
            self._follow(each)
        if self._promised != self.paxos.promised:
            self._promised, self._promised_at = self.paxos.promised, loop_time()
        if self.leading != self._promised:
            self.leading = None
        self.changed.notify()

    def _follow(self, instruction: Instruction) -> None:
        match instruction:
            case Send(to, message):
                for peer in to:
                    self._post.send(peer, message)
            case SetTimer(ballot, factor):
                self._arm(ballot, factor)
            case ProposalNeeded(ballot, promises):
                self.leading, self.promises = ballot, promises
            case Fetch(record, parts):
                self.proposed, self.wanted = record, parts
            case Decided(certificate):
                self.stop()
                self._inform_observers(certificate)
                asyncio.get_running_loop().call_later(LATE_SECONDS, self._inform_late, certificate)
            case ConflictingCertificate():
                self._on_rival(self._sender)
            case ReportFault(peer, why):
                self._accounting.name(peer, f"refused: {why}")

    def _inform_observers(self, certificate: Certificate) -> None:
        """Send the certificate or, to members of this lead's cluster, the votes: they hold the mean, or ask for the
        record. If this lead leaves it may not answer, so it sends them the certificate.
        """
        admitted = self.decided.roster if self.decided else ()  # the vote itself informs these
        observers = [peer for peer, member in self.observers.items() if member not in admitted]
        record = self.decided
        stays = self._me.peer not in self.leaving
        mates = {*self.mates(record.plan)} if record and record.kind == Kind.MEAN and stays else set()
        for peer in dict.fromkeys((*observers, *sorted(self.to_tell()))):
            knows = peer in mates and peer not in observers
            self._post.send(peer, self.tally.abridged(certificate) if knows else certificate)

    def _inform_late(self, certificate: Certificate) -> None:
        """Send the certificate to members that stay and have not voted, if this is one of the members that do so."""
        voted = [peer for peer in records.coordinators(self.head.key.lineage, self.tally.roster) if peer in self._voted]
        if self.votes and self.decided and self._me.peer in voted[:INFORMERS]:
            for member in self.tally.roster:
                if member in self.decided.roster and member.peer not in self._voted:
                    self._post.send(member.peer, certificate)

    def _arm(self, ballot: int, factor: int) -> None:
        if self._timer:
            self._timer.cancel()
        self.moved()
        if self._awake and self.certificate is None:
            self._check_timer(ballot, factor)

    def _check_timer(self, ballot: int, factor: int) -> None:
        due = self._moved + factor * LENIENCE * self.patience_seconds
        if loop_time() < due:
            self._timer = asyncio.get_running_loop().call_at(due, self._check_timer, ballot, factor)
        else:
            self._act(self.paxos.timeout(ballot))

    # -- forks --------------------------------------------------------------------------------------------------------

    def seek_fork(self, live: set[Member], called: RoundPlan | None) -> None:
        """Seek a fork with the live members that may fork, once that is due. To be called again and again."""
        left = self._survivors(live) if self.votes else self._successors(live)
        if not self.tally.may_fork(left):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = loop_time()
        alone_seconds = 0.0 if self._alone_since is None else loop_time() - self._alone_since
        due = left if alone_seconds >= self._fork_patience_seconds(left, live, called) else ()
        if due != self._fork:
            self._fork = due
            record = records.encode(records.extend(self.head, Kind.FORK, due)) if due else b""
            self._act(self.paxos.fork(record))

    def _survivors(self, live: set[Member]) -> tuple[Member, ...]:
        here = tuple(sorted(member for member in self.tally.roster if member in live))
        return here if len(here) < self.tally.quorum else ()

    def _successors(self, live: set[Member]) -> tuple[Member, ...]:
        """Live peers without a vote that have this member's state and may fork with it; none if it may not fork.

        The first of: the successors of the whole roster, since none of its members can come back; a majority of a
        former roster, if no member is live, since such a fork wins over all that the members decide, or any former
        members, if all members were removed; the successors that are live.
        """
        me, tally = self._me, self.tally
        waiting = [member for member in (me, *self.observers.values()) if member in live]
        successors = tuple(sorted(filter(tally.is_successor, waiting)))
        if len(successors) < len(tally.roster) and live.isdisjoint(tally.roster):
            before = tally.former_members(waiting)
            if me in before:
                return before
        return successors if me in successors else ()

    def _fork_patience_seconds(self, left: Sequence[Member], live: set[Member], called: RoundPlan | None) -> float:
        roster = self.tally.roster
        if len(left) == len(roster) and all(map(self.tally.is_successor, left)):
            return COMPLETE_SECONDS
        budget_seconds = called.plan.budget_seconds if called else BUDGET_FLOOR_SECONDS
        if len(left) > len(roster):  # only former members outnumber the members
            return budget_seconds * FORMER_BUDGETS
        patience_seconds = budget_seconds * (1 if len(roster) == 2 else FORK_BUDGETS)
        # A live member may fork and admit this peer, unless it is on another branch, or one of too few.
        first = self.forks_only and not live.isdisjoint(roster)
        return (2 if first else 1) * patience_seconds


def mean_record(
    head: Head,
    resolved: RoundPlan,
    parts: tuple[PartDigest, ...],
    roster: Sequence[Member],
    complaints: tuple[LinkFault, ...],
) -> Record:
    """The record of the mean of a plan."""
    return replace(
        records.extend(head, Kind.MEAN, roster, resolved.digest),
        parts=parts,
        peers=resolved.peers,
        bounds=resolved.plan.bounds,
        complaints=complaints,
        clusters=resolved.clusters if isinstance(resolved, ResolvedClusters) else (),
    )
