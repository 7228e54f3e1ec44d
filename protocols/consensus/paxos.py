"""The vote: one member's side of a roster's decision on the record that extends a lineage. Pure.

Single-decree Paxos over the members of a roster (docs/protocols.md):

- Each event is a method call of `PaxosInstance`. It returns instructions for the host (`protocols.consensus.messages`).
- Ballot b belongs to the b-th coordinator of the roster, which proposes at most one record in it (`Proposer`). Ballot 0
  needs no promises.
- A member accepts a record only if it holds all of its parts. So the parts can be fetched as long as one member that
  accepted the record is alive.
- Timers and lost peers decide nothing. They only open further ballots.
- A fork is a ballot among the members that are left, all of which must promise and accept. If no member is left,
  successors or former members may fork (`protocols.consensus.vote_tally`). They take part in forks only.

A `PaxosInstance` forgets nothing and is made once for a member and a lineage. A restarted peer is another member.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from protocols.base import Member, PeerId
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
    RecordRequest,
    ReportFault,
    Send,
    SetTimer,
    StartBallot,
    VoteMessage,
)
from protocols.consensus.record import Record
from protocols.consensus.vote_tally import Value, VoteTally
from protocols.wire import PartDone

MAX_DOUBLINGS = 6


class PaxosInstance:
    """One member's side of one vote. If `me` is not in the roster, it is an observer, which only takes certificates."""

    def __init__(self, me: Member, tally: VoteTally) -> None:
        self.me, self.tally = me, tally
        self.accepted: Value | None = None  # last, FORKs excepted
        self.forked: Value | None = None  # the FORK accepted last: it binds later forks, not a majority that is back
        self.decided: Certificate | None = None
        self._ballot_state = BallotState(me, tally)
        self._proposer = Proposer(self._ballot_state)
        self._parts: set[bytes] = set()
        self._plan, self._held = bytes(32), dict[int, PartDone]()  # the present plan, and the parts of it that are held
        self._proposal: Value | None = None
        self._waiting = False  # whether this member has yet to vote on the proposal
        self._handlers: dict[type[VoteMessage], Callable[[Any], None]] = {
            StartBallot: self._proposer.on_start_ballot,
            Prepare: self._on_prepare,
            Promise: self._proposer.on_promise,
            BallotNack: self._proposer.on_nack,
            Propose: self._on_propose,
            Accept: self._on_accept,
            RecordRequest: self._on_record_request,
        }

    @property
    def ballot(self) -> int:
        return self._ballot_state.ballot

    @property
    def promised(self) -> int:
        return self._ballot_state.promised

    # -- events -------------------------------------------------------------------------------------------------------

    def receive(self, peer: PeerId, message: VoteMessage) -> list[Instruction]:
        """Take a message of `peer`. The host has already checked what it says about plans and state."""
        if message.key == self.tally.key and message.sender.peer == peer:
            self._handle(message)
        return self._flush()

    def progress(self) -> list[Instruction]:
        """Restart the timer of the present ballot, because the round progresses: it was called, or data flows."""
        if not self.decided:
            self._ballot_state.arm()
        return self._flush()

    def timeout(self, ballot: int) -> list[Instruction]:
        """Open the next ballot, because the timer of this one ran out."""
        if not self.decided and ballot == self.ballot:
            self._proposer.open()
        return self._flush()

    def gone(self, peer: PeerId) -> list[Instruction]:
        """Open the next ballot if a peer that is known to be gone coordinates the present one."""
        if not self.decided and peer == self.tally.coordinator(self.ballot):
            self._proposer.open()
        return self._flush()

    def chosen(self, ballot: int, data: bytes) -> list[Instruction]:
        """Propose the record that the host chose, as it must after `ProposalNeeded` and may in ballot 0.

        A choice that comes too late is dropped. Raises ValueError if the record breaks a rule, or is a FORK.
        """
        value = self.tally.value(ballot, data)
        if value is None or value.is_fork:
            raise ValueError("a record that may not be proposed")
        if not self.decided:
            self._proposer.choose(ballot, data)
        return self._flush()

    def report_parts(self, plan: bytes, parts: Sequence[PartDone], others: Iterable[bytes] = ()) -> list[Instruction]:
        """Note which parts the host holds and keeps: those of the present plan as their reducers signed them, digests
        of others. Until the lineage is decided, the host must keep the parts of a record that this member accepted.
        """
        self._plan, self._held = plan, {part.part: part for part in parts}
        self._parts = {*(part.result.digest for part in parts), *others}
        return self._on_parts()

    def report_part(self, digest: bytes, done: PartDone | None = None) -> list[Instruction]:
        """Note one more part that the host holds; `done` as its reducer signed it, if it is of the present plan."""
        self._parts.add(digest)
        if done:
            self._held[done.part] = done
        return self._on_parts()

    def _on_parts(self) -> list[Instruction]:
        if not self.decided:
            self._consider()
        return self._flush()

    def fork(self, data: bytes) -> list[Instruction]:
        """Seek agreement on an encoded FORK, whose roster is all members within reach; stop if `data` is empty.

        The state, plan and parts of a record that a member of the fork has accepted replace those given. Raises
        ValueError if this member may not take part in such a FORK.
        """
        value = self.tally.value(0, data) if data else None
        if data and (value is None or not value.is_fork or self.me not in value.record.roster):
            raise ValueError("a FORK in which this member may not take part")
        if not self.decided:
            self._proposer.seek_fork(value.record if value else None)
        return self._flush()

    def _handle(self, message: VoteMessage) -> None:
        if isinstance(message, Certificate):
            self._on_certificate(message)
        elif self.decided:
            if isinstance(message, StartBallot | Prepare | Propose | RecordRequest):
                self._ballot_state.send([message.sender.peer], self.decided)
        elif self._concerns_us(message):
            self._handlers[type(message)](message)

    def _concerns_us(self, message: VoteMessage) -> bool:
        """Members hear members; successors and former members hear each other, on forks; observers hear only
        certificates.
        """
        tally, sender = self.tally, message.sender
        if tally.counts(self.me):
            return tally.counts(sender)
        if not (tally.forks_only(self.me) and tally.forks_only(sender)):
            return False
        if isinstance(message, Propose):
            value = tally.value(message.ballot, message.record)
            return value is not None and value.is_fork
        return bool(message.fork) if isinstance(message, StartBallot | Prepare) else True

    def _flush(self) -> list[Instruction]:
        state = self._ballot_state
        while state.local:
            self._handle(state.local.popleft())
        out, state.out = state.out, []
        return out

    # -- promising and accepting --------------------------------------------------------------------------------------

    def _on_prepare(self, message: Prepare) -> None:
        state = self._ballot_state
        if state.outdated(message, message.sender.peer):
            return
        if message.fork and not self._proposer.wants_fork(message.fork):
            return
        state.reach(message.ballot)
        state.promised = message.ballot
        state.send([message.sender.peer], self._promise(bool(message.fork)))

    def _promise(self, fork: bool) -> Promise:
        values = [value for value in (self.accepted, self.forked if fork else None) if value]
        newest = max(values, key=lambda value: value.ballot, default=None)
        accepted, data = (newest.ballot, newest.data) if newest else (0, b"")
        held = () if newest else tuple(self._held.values())
        return Promise(self.tally.key, self.me, self.promised, accepted, data, self._plan, held)

    def _on_propose(self, message: Propose) -> None:
        if self._ballot_state.outdated(message, message.sender.peer):
            return
        value, known = self.tally.value(message.ballot, message.record), self._proposal
        if value is None or (known and known.ballot >= value.ballot and known != value):
            return
        self._ballot_state.reach(value.ballot)
        if value in (self.accepted, self.forked):
            return self._cast(value, [message.sender.peer])
        self._proposal, self._waiting = value, True
        self._consider()
        if missing := self._missing(value.record):
            self._ballot_state.out.append(Fetch(value.data, missing))

    def _consider(self) -> None:
        """Accept the proposal, unless a promise, a missing part or a fork that this member does not want forbids it."""
        value = self._proposal
        if value is None or not self._waiting or value.ballot < self.promised or self._missing(value.record):
            return
        if value.is_fork and not self._proposer.wants_fork(value.record.roster):
            return
        self._waiting, self._ballot_state.promised = False, value.ballot
        self.accepted, self.forked = (self.accepted, value) if value.is_fork else (value, self.forked)
        self._cast(value, peers(self.tally.roster if self.tally.counts(self.me) else value.record.roster))

    def _missing(self, record: Record) -> tuple[bytes, ...]:
        return tuple(part.digest for part in record.parts if part.digest not in self._parts)

    def _cast(self, value: Value, to: Iterable[PeerId]) -> None:
        signature = self.tally.sign(value, self.me)
        self._ballot_state.send(to, Accept(self.tally.key, self.me, value.ballot, value.digest, signature))

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _on_accept(self, message: Accept) -> None:
        if not self.tally.add(message.ballot, message.digest, message.sender, message.signature):
            self._ballot_state.out.append(ReportFault(message.sender.peer, "a forged vote"))
        else:
            self._ballot_state.reach(message.ballot)
            self._conclude(message.ballot, message.digest, self._known(message.digest))

    def _on_certificate(self, message: Certificate) -> None:
        value = self.tally.value(message.ballot, message.record)
        if value is None:
            why = "a certificate of a record that may not be decided"
            return self._ballot_state.out.append(ReportFault(message.sender.peer, why))
        if self.decided and self.decided.record == value.data:
            return
        entitled = self.tally.entitled(value)
        counted = [
            vote.voter in entitled and self.tally.add(value.ballot, value.digest, vote.voter, vote.signature)
            for vote in message.votes
        ]
        if not all(counted):
            self._ballot_state.out.append(ReportFault(message.sender.peer, "a certificate with invalid votes"))
        self._conclude(value.ballot, value.digest, value)

    def _on_record_request(self, message: RecordRequest) -> None:
        if value := self._known(message.digest):
            certificate = self.tally.certificate(replace(value, ballot=message.ballot), self.me)
            self._ballot_state.send([message.sender.peer], certificate)

    def _known(self, digest: bytes) -> Value | None:
        values = (self.accepted, self.forked, self._proposal)
        return next((value for value in values if value and value.digest == digest), None)

    def _conclude(self, ballot: int, digest: bytes, value: Value | None) -> None:
        """Decide if enough votes are in; ask the voters for the record if this member does not know it."""
        if value is None:
            voters = self.tally.voters(ballot, digest)
            if len(voters) == self.tally.quorum:
                self._ballot_state.send(peers(voters), RecordRequest(self.tally.key, self.me, ballot, digest))
            return
        value = replace(value, ballot=ballot)
        if not self.tally.decides(value):
            return
        certificate, roster = self.tally.certificate(value, self.me), value.record.roster
        if self.decided or (value.is_fork and self.me not in roster):
            self._ballot_state.out.append(ConflictingCertificate(certificate))
            return
        self.decided = certificate
        self._ballot_state.out.append(Decided(certificate))
        # Members that stay hear the votes. One that misses some hears that others are in the next round, and asks.
        before, after = {*self.tally.roster}, {*roster}
        self._ballot_state.send(peers(sorted(before | after if value.is_fork else before ^ after)), certificate)


def peers(members: Iterable[Member]) -> tuple[PeerId, ...]:
    return tuple(member.peer for member in members)


class BallotState:
    """A member's ballot and promise in a vote, and its outgoing messages."""

    def __init__(self, me: Member, tally: VoteTally) -> None:
        self.me, self.tally = me, tally
        self.ballot = 0  # the highest that this member has heard of; the timer runs for it
        self.promised = 0  # below it, this member accepts nothing
        self.out: list[Instruction] = []  # for the host
        self.local: deque[VoteMessage] = deque()  # messages of this member to itself

    def leads(self, ballot: int) -> bool:
        return self.tally.counts(self.me) and self.tally.coordinator(ballot) == self.me.peer

    def outdated(self, message: VoteMessage, owner: PeerId) -> bool:
        """Whether a message's ballot is not `owner`'s, or below this member's promise; then its sender is told so."""
        if message.ballot < self.promised:
            self.send([message.sender.peer], BallotNack(self.tally.key, self.me, self.promised))
        return message.ballot < self.promised or not self.tally.owns(message.ballot, owner)

    def reach(self, ballot: int) -> None:
        if ballot > self.ballot:
            self.ballot = ballot
            self.arm()

    def arm(self) -> None:
        self.out.append(SetTimer(self.ballot, 1 << min(self.ballot, MAX_DOUBLINGS)))

    def send(self, to: Iterable[PeerId], message: VoteMessage) -> None:
        """Send a message to peers, each once. This member's own copy does not pass through the host."""
        distinct = dict.fromkeys(to)
        others = tuple(peer for peer in distinct if peer != self.me.peer)
        if others:
            self.out.append(Send(others, message))
        if self.me.peer in distinct:
            self.local.append(message)


@dataclass(slots=True)
class _BallotAttempt:
    ballot: int
    fork: tuple[Member, ...] = ()  # its members; empty for a ballot of the roster
    promises: dict[Member, Promise] = field(default_factory=dict)
    free: bool = False  # whether the host may choose the record
    proposal: Propose | None = None


class Proposer:
    """The coordinator's side: ballots, promises, proposals. It sends its messages to itself, too, and is bound by the
    same rules as any member.
    """

    def __init__(self, state: BallotState) -> None:
        self._ballot_state, self._tally = state, state.tally
        self._attempt = _BallotAttempt(0, free=True) if state.leads(0) else None
        self._forking: Record | None = None

    def open(self) -> None:
        """Begin the next ballot, or ask its coordinator to begin it. A wanted fork takes precedence."""
        state = self._ballot_state
        state.reach(state.ballot + 1)
        if self._forking:
            self.continue_fork()
        elif state.leads(state.ballot):
            self._prepare(state.ballot)
        elif self._tally.counts(state.me):
            ask = StartBallot(self._tally.key, state.me, state.ballot, ())
            state.send([self._tally.coordinator(state.ballot)], ask)

    def on_start_ballot(self, message: StartBallot) -> None:
        """Begin the ballot or fork that a member asks for. If it is under way, repeat its latest message instead."""
        attempt, to = self._attempt, [message.sender.peer]
        if message.fork:
            if not self.wants_fork(message.fork):
                return
            if attempt and attempt.fork == message.fork and attempt.ballot == self._ballot_state.promised:
                self._send_latest(attempt, to)
            else:
                self.continue_fork()
        elif not self._ballot_state.outdated(message, self._ballot_state.me.peer):
            if attempt and attempt.ballot == message.ballot:
                self._send_latest(attempt, to)
            else:
                self._prepare(message.ballot)

    def on_promise(self, message: Promise) -> None:
        """Collect a promise. Once there are enough, propose what was accepted last, or let the host choose."""
        attempt = self._attempt
        if not attempt or attempt.free or attempt.proposal or attempt.ballot != message.ballot:
            return
        if (attempt.fork and message.sender not in attempt.fork) or not self._believable(message, attempt):
            return
        attempt.promises[message.sender] = message
        if len(attempt.promises) < (len(attempt.fork) or self._tally.quorum):
            return
        accepted = [promise for promise in attempt.promises.values() if promise.record]
        newest = max(accepted, key=lambda promise: promise.accepted, default=None)
        if attempt.fork:
            self._propose_fork(attempt, newest)
        elif newest:
            self._propose(attempt, newest.record)
        else:
            attempt.free = True
            self._ballot_state.out.append(ProposalNeeded(attempt.ballot, tuple(attempt.promises.values())))

    def on_nack(self, message: BallotNack) -> None:
        """Move to the higher ballot that a member promised. A fork, which needs all its members, retries at once."""
        self._ballot_state.reach(message.ballot)
        if self._attempt and self._attempt.fork and self._attempt.ballot < message.ballot:
            self.continue_fork()

    def choose(self, ballot: int, data: bytes) -> None:
        """Propose the host's record in a ballot, if that ballot still allows a choice."""
        attempt = self._attempt
        if attempt and attempt.free and attempt.ballot == ballot == self._ballot_state.promised:
            self._propose(attempt, data)

    # -- a fork -------------------------------------------------------------------------------------------------------

    def seek_fork(self, fork: Record | None) -> None:
        self._forking = fork
        self.continue_fork()

    def wants_fork(self, members: tuple[Member, ...]) -> bool:
        return self._forking is not None and self._forking.roster == members

    def continue_fork(self) -> None:
        """The first member of the wanted fork begins a ballot, the others ask it to do so."""
        state = self._ballot_state
        if self._forking is None:
            return
        members = self._forking.roster
        first, ballot = self._tally.first(members), state.ballot + 1
        if first != state.me.peer:
            state.arm()
            return state.send([first], StartBallot(self._tally.key, state.me, state.ballot, members))
        while not self._tally.owns(ballot, first):
            ballot += 1
        self._prepare(ballot, members)

    def _propose_fork(self, attempt: _BallotAttempt, newest: Promise | None) -> None:
        record = self._forking
        if record is None or record.roster != attempt.fork:
            return
        if newest:
            taken = records.decode(newest.record)
            record = replace(
                record,
                state_root=taken.state_root,
                plan=taken.plan,
                parts=taken.parts,
                peers=taken.peers,
                bounds=taken.bounds,
                clusters=taken.clusters,
            )
        self._propose(attempt, records.encode(record))

    # -- sending ------------------------------------------------------------------------------------------------------

    def _prepare(self, ballot: int, fork: tuple[Member, ...] = ()) -> None:
        self._ballot_state.reach(ballot)
        self._attempt = _BallotAttempt(ballot, fork)
        self._send_latest(self._attempt, peers(fork or self._tally.roster))

    def _propose(self, attempt: _BallotAttempt, data: bytes) -> None:
        attempt.free = False
        attempt.proposal = Propose(self._tally.key, self._ballot_state.me, attempt.ballot, data)
        self._send_latest(attempt, peers(attempt.fork or self._tally.roster))

    def _send_latest(self, attempt: _BallotAttempt, to: Iterable[PeerId]) -> None:
        prepare = Prepare(self._tally.key, self._ballot_state.me, attempt.ballot, attempt.fork)
        self._ballot_state.send(to, attempt.proposal or prepare)

    def _believable(self, message: Promise, attempt: _BallotAttempt) -> bool:
        value = self._tally.value(message.accepted, message.record) if message.record else None
        return not message.record or (value is not None and (not value.is_fork or bool(attempt.fork)))
