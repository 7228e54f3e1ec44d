"""The vote, in transcripts of single rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocols.base import Member
from protocols.consensus import messages as votes
from protocols.consensus import record as records
from protocols.consensus.paxos import PaxosInstance
from protocols.consensus.record import Kind
from protocols.consensus.vote_tally import VoteTally, majority
from tests.sim.invariants import Seal
from tests.support.vote_table import KEY, PART, Table

# -- the normal case --------------------------------------------------------------------------------------------------


def test_all_members_decide_after_three_messages() -> None:
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
    assert not table.sent(votes.Certificate)


def test_certificate_goes_to_admitted_and_removed_members() -> None:
    table, new = Table(4), Member("new")
    removed = table.members[2]
    table.do(0, "chosen", 0, table.record(roster=(*(each for each in table.roster if each != removed), new)))
    table.deliver()
    assert None not in table.decided()
    told = [each.to for each in table.heard(1, votes.Send) if isinstance(each.message, votes.Certificate)]
    assert told == [(removed.peer, new.peer)]


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


def test_missing_parts_are_fetched_before_accepting() -> None:
    table = Table()
    mean = table.record(Kind.MEAN, PART)
    table.hold(0)
    table.do(0, "chosen", 0, mean)
    table.deliver()
    assert table.decided() == [None] * 3 and len(table.sent(votes.Accept)) == 1
    (wanted,) = table.heard(1, votes.Fetch)
    assert wanted == votes.Fetch(mean, (PART.result.digest,))
    assert table.vote(1).tally.voters(0, records.lineage(mean)) == (table.members[0],)  # those it can fetch from
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
        value = table.vote(index).accepted
        assert value
        accept = table.vote(index).tally.sign(value, table.members[index])
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
    observer = PaxosInstance(Member("new"), VoteTally(KEY, table.roster, Seal("new")))
    assert observer.receive(table.name(0), table.sent(votes.Propose)[0]) == []
    few = replace(certificate, votes=certificate.votes[:1])
    assert observer.receive(table.name(0), few) == []
    forged = [replace(vote, signature=b"no") for vote in certificate.votes]
    accused = observer.receive(table.name(0), replace(certificate, votes=tuple(forged)))
    assert accused == [votes.ReportFault(table.name(0), "a certificate with invalid votes")]
    accused = observer.receive(table.name(0), replace(certificate, record=table.record(roster=(observer.me,))))
    assert accused == [votes.ReportFault(table.name(0), "a certificate of a record that may not be decided")]
    assert isinstance(observer.receive(table.name(0), certificate)[0], votes.Decided)


# -- duplicates, non-members -------------------------------------------------------------------------------------------


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
    value = table.vote(0).accepted
    assert value
    for member in (stranger, reborn):
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
    accepted = table.vote(1).accepted
    assert accepted and accepted.data == table.record()


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
    table.do(0, "chosen", 0, table.record(without=1))
    table.deliver()
    assert table.vote(0).decided and table.vote(2).decided and table.heard(1, votes.ConflictingCertificate)
