"""The coordinator's side of the vote (`protocols.consensus.paxos`): ballots, promises, proposals. Pure. A coordinator
sends its messages to itself, too, and is bound by the same rules as any member.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from protocols.base import Member, PeerId
from protocols.consensus import record as records
from protocols.consensus.messages import (
    BallotNack,
    Instruction,
    Prepare,
    Promise,
    ProposalNeeded,
    Propose,
    Send,
    SetTimer,
    StartBallot,
    VoteMessage,
)
from protocols.consensus.record import Record
from protocols.consensus.vote_tally import VoteTally

MAX_DOUBLINGS = 6


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
