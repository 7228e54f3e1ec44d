"""The coordinator's side of the vote (`protocols.consensus.paxos`): ballots, promises, proposals. Pure.

A coordinator sends its messages to itself, too, as to any member. So it is bound by the same rules as the others.
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
    """Peer ids of some members."""
    return tuple(member.peer for member in members)


class BallotState:
    """A member's ballot and promise in a vote, and its outgoing messages.

    Attributes:
        ballot: the highest ballot that this member has heard of. The timer runs for this one.
        promised: the ballot below which this member accepts nothing.
        out: instructions to the host.
        local: messages of this member to itself.
    """

    def __init__(self, me: Member, tally: VoteTally) -> None:
        self.me, self.tally = me, tally
        self.ballot = self.promised = 0
        self.out: list[Instruction] = []
        self.local: deque[VoteMessage] = deque()

    def leads(self, ballot: int) -> bool:
        """Whether this member coordinates a ballot."""
        return self.tally.counts(self.me) and self.tally.coordinator(ballot) == self.me.peer

    def outdated(self, message: VoteMessage, owner: PeerId) -> bool:
        """Whether a message's ballot is below this member's promise, or does not belong to `owner`.

        If it is below the promise, the sender gets a `BallotNack`.
        """
        if message.ballot < self.promised:
            self.send([message.sender.peer], BallotNack(self.tally.key, self.me, self.promised))
        return message.ballot < self.promised or not self.tally.owns(message.ballot, owner)

    def reach(self, ballot: int) -> None:
        """Go on to a ballot if it is higher than the present one."""
        if ballot > self.ballot:
            self.ballot = ballot
            self.arm()

    def arm(self) -> None:
        """Set the timer of the present ballot."""
        self.out.append(SetTimer(self.ballot, 1 << min(self.ballot, MAX_DOUBLINGS)))

    def send(self, to: Iterable[PeerId], message: VoteMessage) -> None:
        """Send a message to peers, each once. A message to this member itself does not pass through the host."""
        distinct = dict.fromkeys(to)
        others = tuple(peer for peer in distinct if peer != self.me.peer)
        if others:
            self.out.append(Send(others, message))
        if self.me.peer in distinct:
            self.local.append(message)


@dataclass(slots=True)
class _BallotAttempt:
    """A ballot that this member coordinates.

    Attributes:
        fork: the members of the fork; empty for a ballot of the roster.
        free: whether the host may choose the record.
        proposal: the message with the proposed record; None before.
    """

    ballot: int
    fork: tuple[Member, ...] = ()
    promises: dict[Member, Promise] = field(default_factory=dict)
    free: bool = False
    proposal: Propose | None = None


class Proposer:
    """The ballots that one member coordinates, and its part in a fork."""

    def __init__(self, standing: BallotState) -> None:
        self._standing, self._tally = standing, standing.tally
        self._attempt = _BallotAttempt(0, free=True) if standing.leads(0) else None
        self._forking: Record | None = None

    def open(self) -> None:
        """Go on to the next ballot: begin it, or ask its coordinator to begin it. A wanted fork takes precedence."""
        standing = self._standing
        standing.reach(standing.ballot + 1)
        if self._forking:
            self.continue_fork()
        elif standing.leads(standing.ballot):
            self._prepare(standing.ballot)
        elif self._tally.counts(standing.me):
            ask = StartBallot(self._tally.key, standing.me, standing.ballot, ())
            standing.send([self._tally.coordinator(standing.ballot)], ask)

    def on_start_ballot(self, message: StartBallot) -> None:
        """Begin the ballot or fork that a member asks for. If it is under way, repeat its latest message instead."""
        attempt, to = self._attempt, [message.sender.peer]
        if message.fork:
            if not self.wants_fork(message.fork):
                return
            if attempt and attempt.fork == message.fork and attempt.ballot == self._standing.promised:
                self._send_latest(attempt, to)
            else:
                self.continue_fork()
        elif not self._standing.outdated(message, self._standing.me.peer):
            if attempt and attempt.ballot == message.ballot:
                self._send_latest(attempt, to)
            else:
                self._prepare(message.ballot)

    def on_promise(self, message: Promise) -> None:
        """Collect a promise. Once there are enough, propose the record that was accepted in the highest ballot.

        If none was accepted, the host may choose the record.
        """
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
            self._standing.out.append(ProposalNeeded(attempt.ballot, tuple(attempt.promises.values())))

    def on_nack(self, message: BallotNack) -> None:
        """Go on to the higher ballot that a member promised. A fork, which needs all its members, retries at once."""
        self._standing.reach(message.ballot)
        if self._attempt and self._attempt.fork and self._attempt.ballot < message.ballot:
            self.continue_fork()

    def choose(self, ballot: int, data: bytes) -> None:
        """Propose the host's record in a ballot. Nothing happens if that ballot allows no choice any more."""
        attempt = self._attempt
        if attempt and attempt.free and attempt.ballot == ballot == self._standing.promised:
            self._propose(attempt, data)

    # -- a fork -------------------------------------------------------------------------------------------------------

    def seek_fork(self, fork: Record | None) -> None:
        """Seek agreement on this FORK; None stops it."""
        self._forking = fork
        self.continue_fork()

    def wants_fork(self, members: tuple[Member, ...]) -> bool:
        """Whether this member wants to fork with exactly these members."""
        return self._forking is not None and self._forking.roster == members

    def continue_fork(self) -> None:
        """Continue with the wanted fork, if any: its first member begins a ballot, the others ask it to do so."""
        standing = self._standing
        if self._forking is None:
            return
        members = self._forking.roster
        first, ballot = self._tally.first(members), standing.ballot + 1
        if first != standing.me.peer:
            standing.arm()
            return standing.send([first], StartBallot(self._tally.key, standing.me, standing.ballot, members))
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
        self._standing.reach(ballot)
        self._attempt = _BallotAttempt(ballot, fork)
        self._send_latest(self._attempt, peers(fork or self._tally.roster))

    def _propose(self, attempt: _BallotAttempt, data: bytes) -> None:
        attempt.free = False
        attempt.proposal = Propose(self._tally.key, self._standing.me, attempt.ballot, data)
        self._send_latest(attempt, peers(attempt.fork or self._tally.roster))

    def _send_latest(self, attempt: _BallotAttempt, to: Iterable[PeerId]) -> None:
        prepare = Prepare(self._tally.key, self._standing.me, attempt.ballot, attempt.fork)
        self._standing.send(to, attempt.proposal or prepare)

    def _believable(self, message: Promise, attempt: _BallotAttempt) -> bool:
        value = self._tally.value(message.accepted, message.record) if message.record else None
        return not message.record or (value is not None and (not value.is_fork or bool(attempt.fork)))
