"""The vote: one member's side of a roster's decision on the record that extends a lineage. Pure.

Single-decree Paxos over the members of a roster (docs/protocols.md). Each event is a method call of `PaxosInstance`;
what the host must do about it comes back as instructions (`protocols.consensus.messages`). The b-th coordinator of the
roster owns ballot b, and proposes one record in it at most (`protocols.consensus.proposer`); ballot 0 needs no
promises. Only who holds all of a record accepts it, so it can be had for as long as one who accepted it lives. Timers
and lost peers decide nothing: they open ballots. A fork is a ballot too: of those who are left, all of whom must
promise and accept; or of heirs, or of former members, where none is left (`protocols.consensus.vote_tally`), who speak
of nothing else.

A `PaxosInstance` forgets nothing, and is made once for a member and a lineage: who restarts is another member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from protocols.base import Member, PeerId
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
    Propose,
    RecordRequest,
    ReportFault,
    StartBallot,
    VoteMessage,
)
from protocols.consensus.proposer import BallotState, Proposer, peers
from protocols.consensus.record import Record
from protocols.consensus.vote_tally import Value, VoteTally
from protocols.wire import PartDone


class PaxosInstance:
    """One member's side of one vote; an onlooker's, who only takes certificates, if `me` is not in the roster.

    Attributes:
        accepted: the record that it accepted last, but for forks.
        forked: the fork that it accepted last. Only forks take it over: it does not bind a majority that comes back.
        decided: the certificate, once there is one.
    """

    def __init__(self, me: Member, tally: VoteTally) -> None:
        self.me, self.tally = me, tally
        self.accepted: Value | None = None
        self.forked: Value | None = None
        self.decided: Certificate | None = None
        self._standing = BallotState(me, tally)
        self._proposer = Proposer(self._standing)
        self._parts: set[bytes] = set()
        self._held: tuple[bytes, tuple[PartDone, ...]] = (bytes(32), ())
        self._proposal: Value | None = None
        self._waiting = False  # our vote on the proposal is due
        self._handlers: dict[type[VoteMessage], Callable[[Any], None]] = {
            StartBallot: self._proposer.on_ask,
            Prepare: self._on_prepare,
            Promise: self._proposer.on_promise,
            BallotNack: self._proposer.on_stale,
            Propose: self._on_propose,
            Accept: self._on_accept,
            RecordRequest: self._on_want,
        }

    @property
    def ballot(self) -> int:
        """The highest that this member has met."""
        return self._standing.ballot

    @property
    def promised(self) -> int:
        """The ballot below which this member accepts nothing."""
        return self._standing.promised

    # -- events -------------------------------------------------------------------------------------------------------

    def receive(self, peer: PeerId, message: VoteMessage) -> list[Instruction]:
        """A message of `peer`; what it says of plans and of state, the host has found to be right."""
        if message.key == self.tally.key and message.sender.peer == peer:
            self._handle(message)
        return self._flush()

    def progress(self) -> list[Instruction]:
        """The round is on its way (called, data flows): the timer of the present ballot begins anew."""
        if not self.decided:
            self._standing.arm()
        return self._flush()

    def timeout(self, ballot: int) -> list[Instruction]:
        """The timer of a ballot ran out: on to the next ballot."""
        if not self.decided and ballot == self.ballot:
            self._proposer.open()
        return self._flush()

    def gone(self, peer: PeerId) -> list[Instruction]:
        """A peer is visibly gone: if it coordinates the present ballot, on to the next."""
        if not self.decided and peer == self.tally.coordinator(self.ballot):
            self._proposer.open()
        return self._flush()

    def chosen(self, ballot: int, data: bytes) -> list[Instruction]:
        """The host's answer to `Choose`; from the coordinator of ballot 0, unasked. A late one is dropped.

        Raises:
            ValueError: the record does not extend this lineage, is a FORK, or breaks the rules for rosters.
        """
        value = self.tally.value(ballot, data)
        if value is None or value.is_fork:
            raise ValueError("a record that may not be proposed")
        if not self.decided:
            self._proposer.choose(ballot, data)
        return self._flush()

    def holds(self, plan: bytes, parts: Sequence[PartDone], others: Iterable[bytes] = ()) -> list[Instruction]:
        """What the host holds and keeps: these parts of this plan, and others by their digests. Replaces what it held.

        It keeps the parts of a record that this member accepted, whatever happens, until the lineage is decided.
        """
        self._held = (plan, tuple(parts))
        self._parts = {*(part.result.digest for part in parts), *others}
        if not self.decided:
            self._consider()
        return self._flush()

    def fork(self, data: bytes) -> list[Instruction]:
        """The majority has been gone for long: agree on this FORK, its roster all whom we reach. Empty: it is back.

        What the record says of state, plan and parts gives way to what one of its roster has accepted.

        Raises:
            ValueError: not a FORK of this lineage by such as may fork, this member among them.
        """
        value = self.tally.value(0, data) if data else None
        if data and (value is None or not value.is_fork or self.me not in value.record.roster):
            raise ValueError("a FORK in which this member may not take part")
        if not self.decided:
            self._proposer.want(value.record if value else None)
        return self._flush()

    def _handle(self, message: VoteMessage) -> None:
        if isinstance(message, Certificate):
            self._on_certificate(message)
        elif self.decided:
            if isinstance(message, StartBallot | Prepare | Propose | RecordRequest):
                self._standing.send([message.sender.peer], self.decided)
        elif self._concerns_us(message):
            self._handlers[type(message)](message)

    def _concerns_us(self, message: VoteMessage) -> bool:
        """Members hear members; heirs and former members hear each other, and of forks only."""
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
        standing = self._standing
        while standing.local:
            self._handle(standing.local.popleft())
        out, standing.out = standing.out, []
        return out

    # -- promising and accepting --------------------------------------------------------------------------------------

    def _on_prepare(self, message: Prepare) -> None:
        standing = self._standing
        if standing.outdated(message, message.sender.peer):
            return
        if message.fork and not self._proposer.consents(message.fork):
            return
        standing.reach(message.ballot)
        standing.promised = message.ballot
        standing.send([message.sender.peer], self._promise(bool(message.fork)))

    def _promise(self, fork: bool) -> Promise:
        values = [value for value in (self.accepted, self.forked if fork else None) if value]
        newest = max(values, key=lambda value: value.ballot, default=None)
        accepted, data = (newest.ballot, newest.data) if newest else (0, b"")
        plan, held = self._held
        return Promise(self.tally.key, self.me, self.promised, accepted, data, plan, () if newest else held)

    def _on_propose(self, message: Propose) -> None:
        if self._standing.outdated(message, message.sender.peer):
            return
        value, known = self.tally.value(message.ballot, message.record), self._proposal
        if value is None or (known and known.ballot >= value.ballot and known != value):
            return
        self._standing.reach(value.ballot)
        if value in (self.accepted, self.forked):
            return self._cast(value, [message.sender.peer])
        self._proposal, self._waiting = value, True
        self._consider()
        if missing := self._missing(value.record):
            self._standing.out.append(Fetch(value.data, missing))

    def _consider(self) -> None:
        """Accept the proposal, unless something is in the way."""
        value = self._proposal
        if value is None or not self._waiting or value.ballot < self.promised or self._missing(value.record):
            return
        if value.is_fork and not self._proposer.consents(value.record.roster):
            return
        self._waiting, self._standing.promised = False, value.ballot
        self.accepted, self.forked = (self.accepted, value) if value.is_fork else (value, self.forked)
        self._cast(value, peers(self.tally.roster if self.tally.counts(self.me) else value.record.roster))

    def _missing(self, record: Record) -> tuple[bytes, ...]:
        return tuple(part.digest for part in record.parts if part.digest not in self._parts)

    def _cast(self, value: Value, to: Iterable[PeerId]) -> None:
        signature = self.tally.sign(value, self.me)
        self._standing.send(to, Accept(self.tally.key, self.me, value.ballot, value.digest, signature))

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _on_accept(self, message: Accept) -> None:
        if not self.tally.add(message.ballot, message.digest, message.sender, message.signature):
            self._standing.out.append(ReportFault(message.sender.peer, "a forged vote"))
        else:
            self._standing.reach(message.ballot)
            self._conclude(message.ballot, message.digest, self._known(message.digest))

    def _on_certificate(self, message: Certificate) -> None:
        value = self.tally.value(message.ballot, message.record)
        if value is None:
            why = "a certificate of a record that may not be decided"
            return self._standing.out.append(ReportFault(message.sender.peer, why))
        if self.decided and self.decided.record == value.data:
            return
        entitled = self.tally.entitled(value)
        counted = [
            vote.voter in entitled and self.tally.add(value.ballot, value.digest, vote.voter, vote.signature)
            for vote in message.votes
        ]
        if not all(counted):
            self._standing.out.append(ReportFault(message.sender.peer, "a certificate with votes that nobody cast"))
        self._conclude(value.ballot, value.digest, value)

    def _on_want(self, message: RecordRequest) -> None:
        if value := self._known(message.digest):
            certificate = self.tally.certificate(replace(value, ballot=message.ballot), self.me)
            self._standing.send([message.sender.peer], certificate)

    def _known(self, digest: bytes) -> Value | None:
        values = (self.accepted, self.forked, self._proposal)
        return next((value for value in values if value and value.digest == digest), None)

    def _conclude(self, ballot: int, digest: bytes, value: Value | None) -> None:
        """Decide, if the votes that are in do; ask for the record, if we do not know it."""
        if value is None:
            voters = self.tally.voters(ballot, digest)
            if len(voters) == self.tally.quorum:
                self._standing.send(peers(voters), RecordRequest(self.tally.key, self.me, ballot, digest))
            return
        value = replace(value, ballot=ballot)
        if not self.tally.decides(value):
            return
        certificate, roster = self.tally.certificate(value, self.me), value.record.roster
        if self.decided or (value.is_fork and self.me not in roster):
            self._standing.out.append(ConflictingCertificate(certificate))
            return
        self.decided = certificate
        self._standing.out.append(Decided(certificate))
        self._standing.send(peers((*self.tally.roster, *roster)), certificate)
