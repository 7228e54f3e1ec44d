"""The vote: transcripts of single rounds, random scheduling over many seeds, and planted bugs that it must catch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest

from protocols import wire
from protocols.base import Member, PeerId, RoundKey
from protocols.consensus import messages as votes
from protocols.consensus import record as records
from protocols.consensus.paxos import PaxosInstance
from protocols.consensus.record import Kind, Record
from protocols.consensus.vote_tally import VoteTally, majority
from protocols.wire import ChunkSpan, PartDigest, PartDone
from tests.sim.invariants import Remembering, Seal
from tests.sim.scheduling import play

SEEDS = range(2000)
"""Of 50,000 by `python -m tests.sim.scheduling --seeds 0:50000`."""
KEY = RoundKey(b"r" * 32, "all", b"l" * 32, 7)
PLAN = b"p" * 32
PART = PartDone(0, 0, PartDigest(b"1" * 32, (ChunkSpan(1, 3),)), b"")
Some = TypeVar("Some")


@dataclass
class Flight:
    sender: PeerId
    to: PeerId
    message: votes.VoteMessage


class Table:
    """Members of one vote, in the order in which they coordinate; messages wait until they are delivered by name."""

    def __init__(self, members: int = 3, fork_peers: int = 1) -> None:
        roster = [Member(f"m{index}") for index in range(members)]
        order = records.coordinators(KEY.lineage, roster)
        self.roster = tuple(roster)
        self.members = tuple(Member(peer) for peer in order)
        self.votes = {
            m.peer: PaxosInstance(m, VoteTally(KEY, self.roster, Seal(m.peer), fork_peers=fork_peers))
            for m in self.members
        }
        self.flying: list[Flight] = []
        self.said: list[tuple[PeerId, votes.Instruction]] = []

    def name(self, index: int) -> PeerId:
        return self.members[index].peer

    def vote(self, index: int) -> PaxosInstance:
        return self.votes[self.name(index)]

    def do(self, index: int, event: str, *arguments: Any) -> list[votes.Instruction]:
        """An event at a member; what it sends begins to fly."""
        out: list[votes.Instruction] = getattr(self.vote(index), event)(*arguments)
        for each in out:
            self.said.append((self.name(index), each))
            if isinstance(each, votes.Send):
                self.flying += [Flight(self.name(index), to, each.message) for to in each.to]
        return out

    def deliver(self, kind: type[votes.VoteMessage] | None = None, to: int | None = None, keep: bool = False) -> int:
        """Deliver all that flies, or one kind of it, or to one member, and what follows from it; how many."""
        count = 0
        while matching := [
            flight
            for flight in self.flying
            if (kind is None or isinstance(flight.message, kind)) and (to is None or flight.to == self.name(to))
        ]:
            self.flying = [flight for flight in self.flying if keep or flight not in matching]
            for flight in matching:
                if flight.to in self.votes:
                    self.do(self._index(flight.to), "receive", flight.sender, flight.message)
                    count += 1
            if keep or kind is not None:
                break
        return count

    def lose(self, *indices: int) -> None:
        """What flies to or from these members is lost; without any, everything is."""
        names = {self.name(index) for index in indices} or set(self.votes)
        self.flying = [flight for flight in self.flying if not {flight.sender, flight.to} & names]

    def die(self, *indices: int) -> None:
        self.lose(*indices)
        for index in indices:
            del self.votes[self.name(index)]

    def heard(self, index: int, kind: type[Some]) -> list[Some]:
        """Instructions of a kind that a member gave, so far."""
        return [each for peer, each in self.said if peer == self.name(index) and isinstance(each, kind)]

    def sent(self, kind: type[Some]) -> list[Some]:
        return [
            each.message for _, each in self.said if isinstance(each, votes.Send) and isinstance(each.message, kind)
        ]

    def decided(self) -> list[tuple[int, bytes] | None]:
        """Ballot and record that each living member decided."""
        certificates = [self.votes[member.peer].decided for member in self.members if member.peer in self.votes]
        return [each and (each.ballot, each.record) for each in certificates]

    def record(self, kind: Kind = Kind.SKIP, *parts: PartDone, without: int = -1, **other: Any) -> bytes:
        roster = tuple(member for member in self.roster if without < 0 or member != self.members[without])
        made = Record(KEY.lineage, bytes(32), KEY.round, kind, PLAN, tuple(part.result for part in parts), roster)
        return records.encode(replace(made, **other))

    def fork(self, *indices: int) -> bytes:
        return self.record(Kind.FORK, plan=bytes(32), roster=tuple(sorted(self.members[index] for index in indices)))

    def hold(self, *indices: int) -> None:
        for index in indices:
            self.do(index, "holds", PLAN, (PART,))

    def _index(self, peer: PeerId) -> int:
        return next(index for index, member in enumerate(self.members) if member.peer == peer)


# -- the normal case --------------------------------------------------------------------------------------------------


def test_all_members_get_certificate_after_three_messages() -> None:
    table = Table()
    mean = table.record(Kind.MEAN, PART)
    table.hold(0, 1, 2)
    table.do(0, "chosen", 0, mean)
    assert table.deliver(votes.Propose) == 2
    assert table.decided() == [None, None, None]
    table.deliver(votes.Accept)
    assert table.decided() == [(0, mean)] * 3
    assert len(table.heard(0, votes.Decided)) == 1
    (certificate,) = [each.certificate for each in table.heard(2, votes.Decided)]
    assert [vote.voter for vote in certificate.votes] == sorted(vote.voter for vote in certificate.votes)
    assert len(certificate.votes) >= majority(3)
    table.deliver()
    assert not table.sent(votes.Prepare) and not table.heard(0, votes.ConflictingCertificate)


def test_single_member_decides_at_once() -> None:
    table = Table(1)
    table.do(0, "chosen", 0, table.record())
    assert table.decided() == [(0, table.record())] and table.flying == []


def test_skip_evicts_silent_member_without_parts() -> None:
    table = Table()
    table.die(2)
    skip = table.record(without=2)
    table.do(0, "chosen", 0, skip)
    table.deliver()
    assert table.decided() == [(0, skip)] * 2


def test_invalid_roster_or_parent_is_not_proposed() -> None:
    table = Table()
    new = tuple(Member(f"n{index}") for index in range(2))
    for bad in (
        table.record(roster=(*table.roster, *new)),
        table.record(roster=()),
        table.record(roster=(*table.roster, replace(table.roster[0], incarnation=1))),
        table.record(parent=b"x" * 32),
        table.record(round=8),
        table.fork(0),
        b"no record",
    ):
        with pytest.raises(ValueError, match="may not be proposed"):
            table.do(0, "chosen", 0, bad)
        table.do(1, "receive", table.name(0), votes.Propose(KEY, table.members[0], 0, bad))
        assert table.vote(1).accepted is None
    table.do(0, "chosen", 0, table.record(roster=(*table.roster, new[0])))
    table.deliver()
    assert None not in table.decided()
    assert (new[0].peer) in [to for each in table.heard(0, votes.Send) for to in each.to]


@pytest.mark.parametrize("kind", (Kind.MEAN, Kind.SKIP))
@pytest.mark.parametrize("members", (1, 2, 3, 5))
def test_record_must_keep_one_member(members: int, kind: Kind) -> None:
    roster, new = tuple(Member(f"m{index}") for index in range(members)), Member("n0")
    tally = VoteTally(KEY, roster, Seal("m0"))
    for next_roster, allowed in ((roster[:1], True), ((roster[0], new), True), ((new,), False), ((), False)):
        record = Record(KEY.lineage, bytes(32), KEY.round, kind, PLAN, (), next_roster)
        assert (tally.value(0, records.encode(record)) is not None) is allowed


def test_leaving_majority_needs_a_remaining_voter() -> None:
    """They are a majority, and gone with the mean as soon as they have decided."""
    roster = tuple(Member(f"m{index}") for index in range(3))
    polls = [VoteTally(KEY, roster, Seal(member.peer)) for member in roster]
    record = Record(KEY.lineage, bytes(32), KEY.round, Kind.SKIP, PLAN, (), roster[2:])
    value = polls[0].value(0, records.encode(record))
    assert value is not None
    for voter, tally, decided in zip(roster, polls, (False, False, True), strict=True):
        polls[0].add(0, value.digest, voter, tally.sign(value, voter))
        assert polls[0].decides(value) is decided


def test_missing_parts_are_fetched_before_accepting() -> None:
    table = Table()
    mean = table.record(Kind.MEAN, PART)
    table.hold(0)
    table.do(0, "chosen", 0, mean)
    table.deliver()
    assert table.decided() == [None] * 3 and len(table.sent(votes.Accept)) == 1
    (wanted,) = table.heard(1, votes.Fetch)
    assert wanted == votes.Fetch(mean, (PART.result.digest,))
    assert table.vote(1).tally.voters(0, records.lineage(mean)) == (table.members[0],)  # whom to fetch it from
    table.hold(1)
    table.deliver()
    assert table.decided() == [(0, mean)] * 3


# -- when something is lost -------------------------------------------------------------------------------------------


def test_coordinator_death_before_proposal_is_survived() -> None:
    table = Table()
    table.hold(2)
    table.die(0)
    assert table.do(2, "progress") == [votes.SetTimer(0, 1)]
    table.do(2, "timeout", 0)
    assert table.heard(2, votes.SetTimer)[-1] == votes.SetTimer(1, 2)
    table.deliver()
    (choose,) = table.heard(1, votes.ProposalNeeded)
    assert choose.ballot == 1
    assert {promise.sender: promise.held for promise in choose.promises} == {
        table.members[1]: (),
        table.members[2]: (PART,),
    }
    repaired = table.record(Kind.MEAN, PART, without=0)
    table.do(1, "chosen", 1, repaired)
    table.deliver()
    assert table.heard(1, votes.Fetch)
    table.hold(1)
    table.deliver()
    assert table.decided() == [(1, repaired)] * 2


def test_disconnected_coordinator_is_not_waited_for() -> None:
    table = Table()
    table.do(1, "gone", table.name(2))
    assert table.flying == []
    table.do(1, "gone", table.name(0))
    assert len(table.sent(votes.Prepare)) == 1


def test_next_coordinator_carries_over_accepted_record() -> None:
    table = Table(5)
    mean = table.record(Kind.MEAN, PART)
    table.hold(0, 3)
    table.do(0, "chosen", 0, mean)
    table.deliver(votes.Propose, to=3)
    table.die(0)
    table.lose()
    table.do(1, "timeout", 0)
    table.deliver(votes.Prepare, to=3)
    table.deliver(votes.Prepare, to=4)
    table.deliver()
    assert not table.heard(1, votes.ProposalNeeded)
    assert table.heard(1, votes.Fetch)[0].record == mean
    table.hold(1, 2, 4)
    table.deliver()
    assert table.decided() == [(1, mean)] * 4


def test_record_of_highest_ballot_is_proposed_again() -> None:
    table = Table(5)
    first, second = table.record(without=4), table.record(without=3)
    table.do(0, "chosen", 0, first)
    table.lose()  # only 0 has accepted it
    table.do(1, "timeout", 0)
    table.lose(0)
    table.deliver(votes.Prepare)
    table.deliver(votes.Promise)
    table.do(1, "chosen", 1, second)
    table.lose()  # only 1 has accepted it
    table.do(2, "timeout", 0)
    table.do(2, "timeout", 1)
    table.deliver(votes.Prepare, to=0)
    table.deliver(votes.Prepare, to=1)
    table.deliver()
    assert table.decided() == [(2, second)] * 5


def test_late_coordinator_yields_to_promises() -> None:
    table = Table()
    table.do(1, "timeout", 0)
    table.deliver(votes.Prepare, to=2)
    table.deliver(votes.Promise)
    table.lose(0)
    table.do(0, "chosen", 0, table.record())
    table.deliver(votes.Propose)
    assert [each.ballot for each in table.sent(votes.BallotNack)] == [1, 1]
    table.deliver(votes.BallotNack)
    assert table.vote(0).ballot == 1 and table.vote(0).promised == 0 and table.vote(2).accepted is None
    skip = table.record(without=0)
    table.do(1, "chosen", 1, skip)
    table.deliver()
    assert table.decided() == [(1, skip)] * 3


def test_late_proposal_is_dropped() -> None:
    table = Table()
    table.do(1, "timeout", 0)
    table.deliver()
    table.do(2, "timeout", 1)
    table.deliver()
    assert table.do(1, "chosen", 1, table.record()) == []
    table.do(2, "chosen", 2, table.record(without=0))
    table.deliver()
    assert table.decided() == [(2, table.record(without=0))] * 3


def test_promise_survives_a_fetch() -> None:
    table = Table()
    table.hold(0)
    table.do(0, "chosen", 0, table.record(Kind.MEAN, PART))
    table.deliver(votes.Propose, to=2)
    table.lose(0)
    table.do(1, "timeout", 0)
    table.deliver(votes.Prepare, to=2)
    table.hold(2)
    assert table.vote(2).promised == 1 and table.vote(2).accepted is None


def test_member_without_messages_gets_certificate_on_timeout() -> None:
    table = Table()
    table.do(0, "chosen", 0, table.record())
    for kind in (votes.Propose, votes.Accept):
        table.lose(2)
        table.deliver(kind)
    table.lose()
    assert table.decided() == [(0, table.record()), (0, table.record()), None]
    table.do(2, "timeout", 0)
    table.deliver()
    assert table.decided() == [(0, table.record())] * 3


def test_member_without_record_requests_it_from_voters() -> None:
    table = Table()
    table.do(0, "chosen", 0, table.record())
    table.deliver(votes.Propose, to=1)
    table.lose(0)  # 2 never sees the proposal
    for index in (0, 1):
        accept = table.vote(index).tally.sign(table.vote(index).accepted, table.members[index])  # type: ignore[arg-type]
        message = votes.Accept(KEY, table.members[index], 0, records.lineage(table.record()), accept)
        table.do(2, "receive", table.name(index), message)
    table.deliver(votes.Accept)
    assert table.sent(votes.RecordRequest)
    table.deliver()
    assert table.vote(2).decided is not None


def test_observer_decides_only_by_certificate() -> None:
    table = Table()
    table.do(0, "chosen", 0, table.record())
    table.deliver()
    certificate = table.vote(0).decided
    assert certificate
    onlooker = PaxosInstance(Member("new"), VoteTally(KEY, table.roster, Seal("new")))
    assert onlooker.receive(table.name(0), table.sent(votes.Propose)[0]) == []
    few = replace(certificate, votes=certificate.votes[:1])
    assert onlooker.receive(table.name(0), few) == []
    forged = [replace(vote, signature=b"no") for vote in certificate.votes]
    accused = onlooker.receive(table.name(0), replace(certificate, votes=tuple(forged)))
    assert accused == [votes.ReportFault(table.name(0), "a certificate with invalid votes")]
    accused = onlooker.receive(table.name(0), replace(certificate, record=table.record(roster=(onlooker.me,))))
    assert accused == [votes.ReportFault(table.name(0), "a certificate of a record that may not be decided")]
    assert isinstance(onlooker.receive(table.name(0), certificate)[0], votes.Decided)


# -- duplicates, strangers --------------------------------------------------------------------------------------------


def test_duplicate_messages_change_nothing() -> None:
    table = Table()
    table.do(0, "chosen", 0, table.record())
    for kind in (votes.Propose, votes.Accept, votes.Certificate):
        table.deliver(kind, keep=True)
        table.deliver(kind, keep=True)
    assert table.decided() == [(0, table.record())] * 3
    assert all(len(table.heard(index, votes.Decided)) == 1 for index in range(3))
    assert not any(table.heard(index, votes.ConflictingCertificate) for index in range(3))


def test_votes_of_non_members_are_not_counted() -> None:
    table = Table()
    table.do(0, "chosen", 0, table.record())
    stranger, reborn = Member("x"), replace(table.members[1], incarnation=1)
    for member in (stranger, reborn):
        value = table.vote(0).accepted
        assert value
        signature = VoteTally(KEY, table.roster, Seal(member.peer)).sign(value, member)
        table.do(0, "receive", member.peer, votes.Accept(KEY, member, 0, value.digest, signature))
    assert table.vote(0).decided is None
    table.do(0, "receive", "x", votes.Accept(KEY, table.members[2], 0, value.digest, b""))
    assert table.vote(0).decided is None
    for message in (
        votes.Prepare(KEY, reborn, 1, ()),
        votes.StartBallot(KEY, stranger, 3, ()),
        votes.BallotNack(KEY, reborn, 9),
    ):
        assert table.do(0, "receive", message.sender.peer, message) == []
    assert table.vote(0).ballot == 0


def test_only_the_coordinator_may_lead_a_ballot() -> None:
    table = Table()
    wrong = votes.Propose(KEY, table.members[2], 0, table.record())
    assert table.do(1, "receive", table.name(2), wrong) == []
    assert table.do(1, "receive", table.name(2), votes.Prepare(KEY, table.members[2], 1, ())) == []
    other = replace(KEY, lineage=b"o" * 32)
    assert table.do(1, "receive", table.name(0), votes.Propose(other, table.members[0], 0, table.record())) == []


def test_second_record_in_one_ballot_is_ignored() -> None:
    table = Table()
    for record in (table.record(), table.record(without=2)):
        table.do(1, "receive", table.name(0), votes.Propose(KEY, table.members[0], 0, record))
    assert table.vote(1).accepted and table.vote(1).accepted.data == table.record()


def test_timers_double_to_limit_and_stale_are_ignored() -> None:
    table = Table()
    table.die(0, 1)
    factors = []
    for ballot in range(9):
        table.do(2, "timeout", ballot)
        assert table.do(2, "timeout", ballot) == []
        factors.append(table.heard(2, votes.SetTimer)[-1].factor)
    assert factors == [2, 4, 8, 16, 32, 64, 64, 64, 64]


# -- forks ------------------------------------------------------------------------------------------------------------


def test_survivors_must_fork_unanimously() -> None:
    table = Table(5)
    table.die(0, 2, 4)
    fork = table.fork(1, 3)
    table.do(3, "fork", fork)
    table.deliver()
    assert table.decided() == [None, None]  # 1 does not agree yet
    table.do(1, "fork", fork)
    table.deliver()
    assert [each and each[1] for each in table.decided()] == [fork] * 2
    assert len(table.vote(1).decided.votes) == 2  # type: ignore[union-attr]


def test_fork_adopts_record_accepted_by_survivor() -> None:
    table = Table(5)
    table.hold(0, 3)
    table.do(0, "chosen", 0, table.record(Kind.MEAN, PART))
    table.deliver(votes.Propose, to=3)
    table.lose()
    table.die(0, 2, 4)
    for index in (1, 3):
        table.do(index, "fork", table.fork(1, 3))
    table.deliver()
    assert table.decided() == [None, None]
    table.hold(1)
    table.deliver()
    (_, data), _ = [each for each in table.decided() if each]
    forked = records.decode(data)
    assert (forked.kind, forked.plan, forked.parts) == (Kind.FORK, PLAN, (PART.result,))


def test_single_survivor_forks_only_where_allowed() -> None:
    table = Table(2)
    table.die(0)
    table.do(1, "fork", table.fork(1))
    assert [each and each[1] for each in table.decided()] == [table.fork(1)]
    for fewest in (0, 2):
        table = Table(3, fork_peers=fewest)
        with pytest.raises(ValueError, match="may not take part"):
            table.do(1, "fork", table.fork(1))
    with pytest.raises(ValueError, match="may not take part"):
        Table().do(0, "fork", Table().fork(0, 1))  # the majority is not gone
    with pytest.raises(ValueError, match="may not take part"):
        Table().do(0, "fork", Table().fork(1))


def test_returning_majority_ignores_unfinished_fork() -> None:
    table = Table(5)
    for index in (1, 3):
        table.do(index, "fork", table.fork(1, 3))
    table.deliver(votes.StartBallot)
    table.deliver(votes.Prepare)
    table.deliver(votes.Promise)
    assert table.vote(1).forked
    table.lose()
    for index in (1, 3):
        table.do(index, "fork", b"")
    ballot = table.vote(1).ballot
    for index in range(5):
        while table.vote(index).ballot < ballot:
            table.do(index, "timeout", table.vote(index).ballot)
    table.lose()
    table.do(2, "timeout", ballot)
    table.deliver()
    (choose,) = table.heard(2, votes.ProposalNeeded)
    table.do(2, "chosen", choose.ballot, table.record())
    table.deliver()
    assert table.decided() == [(choose.ballot, table.record())] * 5


def test_fork_and_majority_report_conflicting_certificates() -> None:
    table = Table()
    table.do(1, "fork", table.fork(1))
    table.deliver()
    assert (
        table.vote(0).decided is None
        and table.heard(0, votes.ConflictingCertificate)
        and table.heard(2, votes.ConflictingCertificate)
    )
    table.do(0, "chosen", 0, table.record())
    table.deliver()
    assert table.vote(0).decided and table.vote(2).decided and table.heard(1, votes.ConflictingCertificate)


# -- on the wire ------------------------------------------------------------------------------------------------------


def test_vote_messages_round_trip_on_the_wire() -> None:
    me, record = Member("anna", 3), Table().record(Kind.MEAN, PART)
    signed = (votes.Signed(me, b"s" * 64),)
    messages: list[votes.VoteMessage] = [
        votes.StartBallot(KEY, me, 1, (me,)),
        votes.Prepare(KEY, me, 1, ()),
        votes.Promise(KEY, me, 2, 1, record, PLAN, (PART,)),
        votes.BallotNack(KEY, me, 4),
        votes.Propose(KEY, me, 5, record),
        votes.Accept(KEY, me, 6, records.lineage(record), b"s" * 64),
        votes.RecordRequest(KEY, me, 7, records.lineage(record)),
        votes.Certificate(KEY, me, 8, record, signed),
    ]
    assert {type(message) for message in messages} == set(votes.MESSAGES)
    for message in messages:
        assert wire.unpack_body(type(message), wire.body(message)) == message


# -- random scheduling ------------------------------------------------------------------------------------------------


def test_random_schedules_break_no_invariant() -> None:
    assert [f"seed {seed}: {error}" for seed, error in play(SEEDS)] == []


class HalfAQuorum(Remembering):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.quorum = max(1, len(self.roster) // 2)


class CountsStrangers(Remembering):
    def counts(self, member: Member) -> bool:
        return member.peer in {each.peer for each in self.roster}


class CountsHeirs(Remembering):
    def counts(self, member: Member) -> bool:
        return super().counts(member) or self.is_successor(member)


class CountsAcrossBallots(Remembering):
    def voters(self, ballot: int, digest: bytes) -> tuple[Member, ...]:
        return tuple({voter: None for (_, named), cast in self._votes.items() if named == digest for voter in cast})


class ForksWithoutAll(Remembering):
    def decides(self, value: Any) -> bool:
        return super().decides(value) or (value.is_fork and bool(self.voters(value.ballot, value.digest)))


class AcceptsBelowItsPromise(PaxosInstance):
    def _on_propose(self, message: votes.Propose) -> None:
        promised, self._standing.promised = self._standing.promised, 0
        super()._on_propose(message)
        self._standing.promised = max(promised, self._standing.promised)


class PromiseForgetsAccepted(PaxosInstance):
    def _promise(self, fork: bool) -> votes.Promise:
        return replace(super()._promise(fork), accepted=0, record=b"")


class ForkForgetsAccepted(PaxosInstance):
    def _promise(self, fork: bool) -> votes.Promise:
        promise = super()._promise(fork)
        return replace(promise, accepted=0, record=b"") if fork else promise


class CoordinatorIgnoresAccepted(PaxosInstance):
    def _handle(self, message: votes.VoteMessage) -> None:
        forgotten = isinstance(message, votes.Promise)
        super()._handle(replace(message, accepted=0, record=b"") if forgotten else message)  # type: ignore[call-arg]


class CoordinatorTakesTheLowest(PaxosInstance):
    def _handle(self, message: votes.VoteMessage) -> None:
        if isinstance(message, votes.Promise) and message.record:
            message = replace(message, accepted=votes.MAX_BALLOT - message.accepted)
        super()._handle(message)


class AcceptsUnheld(PaxosInstance):
    def _missing(self, record: Record) -> tuple[bytes, ...]:
        return ()


@pytest.mark.parametrize(
    "planted, rules",
    [
        ({"tally": HalfAQuorum}, {"proof", "one child"}),
        ({"tally": CountsStrangers}, {"proof", "one child", "proposal"}),
        ({"tally": CountsHeirs}, {"proof", "one child", "proposal"}),
        ({"tally": CountsAcrossBallots}, {"proof", "one child"}),
        ({"tally": ForksWithoutAll}, {"fork"}),
        ({"vote": AcceptsBelowItsPromise}, {"one child", "proposal"}),
        ({"vote": PromiseForgetsAccepted}, {"one child", "proposal"}),
        ({"vote": ForkForgetsAccepted}, {"fork"}),
        ({"vote": CoordinatorIgnoresAccepted}, {"one child", "proposal"}),
        ({"vote": CoordinatorTakesTheLowest}, {"one child", "proposal"}),
        ({"vote": AcceptsUnheld}, {"held"}),
        ({"same_incarnation": True}, {"one child", "proposal"}),
    ],
    ids=lambda value: getattr(next(iter(value.values())), "__name__", "same life") if isinstance(value, dict) else "",
)
def test_planted_bug_is_caught(planted: dict[str, Any], rules: set[str]) -> None:
    caught = (error.rule for seed in SEEDS for _, error in play([seed], **planted))
    assert any(rule in rules for rule in caught)
