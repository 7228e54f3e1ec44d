"""Which records may be put to the vote, which votes decide, and which peers may fork."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from protocols.base import BadPayload, Member
from protocols.consensus import record as records
from protocols.consensus.record import Kind, Record
from protocols.consensus.vote_tally import OBSERVER, VoteTally
from protocols.history.chain import genesis
from protocols.history.fork_choice import ForkChoice
from tests.sim.host import SimSigner
from tests.sim.invariants import Seal
from tests.support.fake_rounds import RUN, SEED, decided
from tests.support.vote_table import KEY, PLAN

ROSTER = tuple(Member(f"m{index}") for index in range(3))


@pytest.mark.parametrize("kind", (Kind.MEAN, Kind.SKIP))
@pytest.mark.parametrize("members", (1, 2, 3, 5))
def test_record_must_keep_one_member(members: int, kind: Kind) -> None:
    roster, new = tuple(Member(f"m{index}") for index in range(members)), Member("n0")
    tally = VoteTally(KEY, roster, Seal("m0"))
    for next_roster, allowed in ((roster[:1], True), ((roster[0], new), True), ((new,), False), ((), False)):
        record = Record(KEY.lineage, bytes(32), KEY.round, kind, PLAN, (), next_roster)
        assert (tally.value(0, records.encode(record)) is not None) is allowed


@pytest.mark.parametrize("voters", (3, 4))
def test_record_never_names_more_than_the_voters(voters: int) -> None:
    """Neither in a vote nor in a certificate, which a majority of liars may have signed."""
    head = genesis(RUN, "run", ROSTER)
    tally = VoteTally(head.key, ROSTER, Seal("m0"))
    tally.most_voters = voters
    for next_roster, allowed in (((*ROSTER, Member("n0")), voters > 3), ((*ROSTER[:2], Member("n0")), True)):
        link = decided(head, roster=next_roster)
        assert (tally.value(0, link.certificate.record) is not None) is allowed
        rules = ForkChoice(Member("zeno"), SimSigner("zeno", SEED), voters=voters)
        with nullcontext() if allowed else pytest.raises(BadPayload):
            rules.judge(head, link.certificate)


def test_leaving_majority_needs_a_remaining_voter() -> None:
    """Leavers are gone with the mean as soon as they have decided, even where they are a majority."""
    tally = VoteTally(KEY, ROSTER, Seal("m0"))
    record = Record(KEY.lineage, bytes(32), KEY.round, Kind.SKIP, PLAN, (), ROSTER[2:])
    value = tally.value(0, records.encode(record))
    assert value is not None
    for voter, is_decided in zip(ROSTER, (False, False, True), strict=True):
        signature = VoteTally(KEY, ROSTER, Seal(voter.peer)).sign(value, voter)
        assert tally.add(0, value.digest, voter, signature)
        assert tally.decides(value) is is_decided


@pytest.mark.parametrize(
    "incarnation, is_successor", ((0, False), (4, False), (5, False), (6, True), (OBSERVER, False))
)
def test_successor_is_a_later_incarnation(incarnation: int, is_successor: bool) -> None:
    tally = VoteTally(KEY, (Member("m0", 5), Member("m1")), Seal("m0"))
    assert tally.is_successor(Member("m0", incarnation)) == is_successor
    assert not tally.is_successor(Member("x", incarnation))


@pytest.mark.parametrize("fork_peers, enough", ((0, 9), (1, 1), (2, 2), (3, 3), (4, 3)))
def test_successors_may_fork_from_configured_count(fork_peers: int, enough: int) -> None:
    tally = VoteTally(KEY, ROSTER, Seal("m0"), fork_peers=fork_peers)
    successors = [replace(member, incarnation=1) for member in ROSTER]
    assert [tally.may_fork(successors[:count]) for count in range(4)] == [count >= enough for count in range(4)]
    assert not tally.may_fork([successors[0], ROSTER[1]]) and not tally.may_fork([*successors, Member("x", 1)])


def test_former_members_that_are_gone_own_ballots_in_turn() -> None:
    """Besides the members: else a silent one would keep the others from a fork."""
    gone = tuple(Member(f"f{index}") for index in range(3))
    tally = VoteTally(KEY, ROSTER, Seal("f0"), former=((*ROSTER, *gone), gone))
    owners = [[each.peer for each in (*ROSTER, *gone) if tally.owns(ballot, each.peer)] for ballot in range(6)]
    members, others = zip(*owners, strict=True)
    assert sorted(members) == sorted(2 * [each.peer for each in ROSTER]) and members[:3] == members[3:]
    assert sorted(others) == sorted(2 * [each.peer for each in gone]) and others[:3] == others[3:]
