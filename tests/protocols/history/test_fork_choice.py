"""Judging what others say was decided: forgeries are refused with a reason, and two branches compare alike for all."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.base import BadPayload, Head, Member
from protocols.consensus import record as records
from protocols.consensus.messages import Signed
from protocols.consensus.record import Kind
from protocols.consensus.vote_tally import VoteTally
from protocols.history.chain import UNSETTLED, Chain, DecidedRound, follow, genesis
from protocols.history.fork_choice import Branch, ForkChoice
from tests.sim.host import SimSigner
from tests.support.fake_rounds import ROOT, RUN, SEED, certified, decided, line, vote

ANNA, BERT, CLEO, DORA, EMIL = ROSTER = tuple(Member(name) for name in ("anna", "bert", "cleo", "dora", "emil"))
OUTSIDER = Member("zeno")


def rules(me: Member = OUTSIDER, **changes: Any) -> ForkChoice:
    return ForkChoice(me, SimSigner(me.peer, SEED), **changes)


def start(members: int = 3, root: bytes = UNSETTLED) -> Head:
    return genesis(RUN, "run", ROSTER[:members], root)


def chain_of(members: int, links: list[DecidedRound]) -> Chain:
    chain = Chain(RUN, "run", ROSTER[:members])
    chain.switch(chain.head.key.lineage, links)
    return chain


# -- judging ----------------------------------------------------------------------------------------------------------


def test_decided_rounds_verify_up_to_the_head() -> None:
    head = start()
    links = line(head, 2)
    links.append(decided(links[-1].head, Kind.SKIP, roster=ROSTER[:2]))
    links.append(decided(links[-1].head, roster=(ANNA, BERT, OUTSIDER)))
    links.append(decided(links[-1].head, voters=(BERT, OUTSIDER)))
    links.append(decided(links[-1].head, Kind.FORK, roster=(BERT,)))
    assert rules().verify(head, [link.certificate for link in links]) == tuple(links)
    assert rules().verify(head, []) == ()


def test_certificate_of_any_ballot_counts() -> None:
    head = start()
    link = decided(head)
    certificate = certified(head, link.record, ROSTER[:2], ballot=77)
    assert rules().judge(head, certificate).head == link.head


@pytest.mark.parametrize("voters, members", [((), 3), ((ANNA,), 3), ((ANNA, ANNA), 3), ((ANNA, BERT), 4), ((ANNA,), 2)])
def test_too_few_votes_decide_nothing(voters: tuple[Member, ...], members: int) -> None:
    head = start(members)
    with pytest.raises(BadPayload, match="too few to decide"):
        rules().judge(head, certified(head, decided(head).record, voters))


def test_manifest_may_require_more_votes() -> None:
    head = start(5)
    certificate = certified(head, decided(head).record, ROSTER[:3])
    assert rules().judge(head, certificate)
    with pytest.raises(BadPayload, match="too few"):
        rules(quorum=lambda members: 2 * members // 3 + 1).judge(head, certificate)


def test_votes_of_non_members_are_rejected() -> None:
    head = start()
    record = decided(head).record
    for stranger in (OUTSIDER, Member("anna", 1)):
        with pytest.raises(BadPayload, match="has no vote"):
            rules().judge(head, certified(head, record, (ANNA, BERT, stranger)))


def test_forged_vote_is_rejected_among_valid_ones() -> None:
    head = start()
    good = certified(head, decided(head).record)
    other = decided(head, plan=b"e" * 32)
    forged = [
        b"",
        b"x" * 32,
        good.votes[0].signature,  # anna's, in cleo's name
        other.certificate.votes[2].signature,  # for another record
        vote(head, 1, good.record, CLEO).signature,  # in another ballot
        vote(start(4), 0, good.record, ANNA).signature,
    ]
    for signature in forged:
        bad = replace(good, votes=(*good.votes[:2], Signed(CLEO, signature)))
        with pytest.raises(BadPayload, match="a forged vote of"):
            rules().judge(head, bad)


def test_vote_from_another_round_does_not_count() -> None:
    head, link = start(), decided(start())
    later = certified(link.head, decided(link.head).record)
    moved = replace(later, key=head.key)
    with pytest.raises(BadPayload, match="may not extend"):
        rules().judge(head, moved)
    with pytest.raises(BadPayload, match="does not extend"):
        rules().judge(head, later)


def test_records_breaking_the_rules_are_rejected() -> None:
    head = start(2)
    strangers = tuple(Member(f"s{number}") for number in range(3))
    for roster in ((), (ANNA, ANNA), (ANNA, BERT, *strangers), strangers[:1], (Member("anna", 1), Member("bert", 1))):
        record = replace(decided(head).record, roster=roster)
        with pytest.raises(BadPayload, match="may not extend"):
            rules().judge(head, certified(head, record))
    for data in (b"", b"\xc0", records.encode(decided(head).record) + b"\x00"):
        with pytest.raises(BadPayload, match="may not extend"):
            rules().judge(head, replace(decided(head).certificate, record=data))


def test_fork_needs_votes_of_its_whole_roster() -> None:
    head = start(5)
    link = decided(head, Kind.FORK, roster=(ANNA, BERT))
    assert rules().judge(head, link.certificate) == link
    for voters in ((ANNA,), (ANNA, CLEO), (CLEO, DORA, EMIL)):
        with pytest.raises(BadPayload, match="too few"):
            rules().judge(head, certified(head, link.record, voters))
    for roster in (ROSTER[:3], (ANNA, OUTSIDER)):
        with pytest.raises(BadPayload, match="may not extend"):
            rules().judge(head, decided(head, Kind.FORK, roster=roster, voters=ROSTER).certificate)
    with pytest.raises(BadPayload, match="may not extend"):
        rules(fork_peers=0).judge(head, link.certificate)


def test_chain_from_another_genesis_state_is_rejected() -> None:
    other = decided(start(), root=b"x" * 32).certificate
    assert rules().judge(start(), other)
    with pytest.raises(BadPayload, match="another state"):
        rules().judge(start(root=ROOT), other)


def test_non_consecutive_links_are_rejected() -> None:
    head = start()
    one, two, three = (link.certificate for link in line(head, 3))
    for bad in ([two], [one, three], [one, one], [two, one]):
        with pytest.raises(BadPayload, match="does not extend"):
            rules().verify(head, bad)


# -- which branch -----------------------------------------------------------------------------------------------------


def beats(
    ours: list[DecidedRound],
    theirs: list[DecidedRound],
    members: int = 5,
    me: Member = OUTSIDER,
    stranded: bool = False,
) -> int:
    """How many rounds of theirs are to be followed."""
    chain = chain_of(members, ours)
    branch = rules(me).beating(chain, chain.locator()[-1], theirs, stranded)
    return len(branch.links) if branch else 0


def forked(head: Head, *members: Member, plan: bytes = b"d" * 32) -> DecidedRound:
    return decided(head, Kind.FORK, roster=members, plan=plan)


def test_longer_chain_on_same_branch_is_ahead() -> None:
    links = line(start(5), 6)
    assert beats(links[:4], links) == 2 and beats([], links) == 6
    assert beats(links, links[:4]) == beats(links, links) == beats(links, []) == 0


def test_more_signatures_beat_a_longer_branch() -> None:
    base = line(start(5), 2)
    head = base[-1].head
    majority = [decided(head, voters=ROSTER[:3])]
    pair, single = forked(head, DORA, EMIL), forked(head, CLEO)
    long = [pair, *line(pair.head, 7)]
    assert beats([*base, *long], base + majority) == 1
    assert beats(base + majority, [*base, *long]) == 0
    assert beats([*base, single, *line(single.head, 7)], [*base, *long]) == 8
    assert beats([*base, *long], [*base, single]) == 0


def test_successor_fork_ranks_by_roster_below_majority() -> None:
    base = line(start(5), 2)
    head = base[-1].head
    successors = tuple(replace(member, incarnation=1) for member in ROSTER)
    many, few, two = forked(head, *successors), forked(head, *successors[:2]), forked(head, CLEO, DORA)
    majority = decided(head, voters=ROSTER[:3])
    assert rules().judge(head, many.certificate).head == many.head
    for better, worse in (
        (majority, many),
        (majority, two),
        (many, two),
        (many, few),
        (two, few),
        (few, forked(head, EMIL)),
    ):
        assert beats([*base, worse], [*base, better]) == 1 and beats([*base, better], [*base, worse]) == 0


FIVE = tuple(Member(f"m{number}", 1) for number in range(5))
BACK = tuple(replace(member, incarnation=2) for member in FIVE)


def shrinking(*rosters: tuple[Member, ...]) -> list[DecidedRound]:
    """Rounds that lead from the first of these rosters to the last."""
    links: list[DecidedRound] = []
    for before, roster in itertools.pairwise(rosters):
        head = links[-1].head if links else genesis(RUN, "run", before)
        links.append(decided(head, roster=roster, voters=before))
    return links


@pytest.mark.parametrize(
    "rosters, back, may",
    (
        ((FIVE, FIVE[2:], FIVE[4:]), BACK[2:4], True),
        ((FIVE, FIVE[2:], FIVE[4:]), BACK[:3], True),
        ((FIVE, FIVE[2:], FIVE[4:]), BACK[1:3], False),  # most of none
        ((FIVE, FIVE[2:], FIVE[4:]), BACK[3:4], False),
        ((FIVE, FIVE[2:], FIVE[4:]), (BACK[3], FIVE[4]), False),  # one of them still votes
        ((FIVE, FIVE[2:], FIVE[4:]), (BACK[3], BACK[4]), True),  # with a successor
        ((FIVE, FIVE[2:], FIVE[3:]), BACK[2:4], False),  # no more than they replace
        ((FIVE[:3], FIVE[2:3], (*FIVE[2:], OUTSIDER)), BACK[:2], False),  # it has grown again since
        ((FIVE, FIVE[4:]), (*BACK[:2], replace(OUTSIDER, incarnation=2)), False),
        ((FIVE, FIVE[4:]), FIVE[:3], True),  # an evicted member that never restarted
    ),
)
def test_former_majority_of_shrunken_roster_may_fork(
    rosters: tuple[tuple[Member, ...], ...], back: tuple[Member, ...], may: bool
) -> None:
    head = shrinking(*rosters)[-1].head
    tally = VoteTally(head.key, head.roster, SimSigner("m0", SEED), former=head.former)
    assert tally.may_fork(back) == may
    assert not VoteTally(head.key, head.roster, SimSigner("m0", SEED), fork_peers=0, former=head.former).may_fork(back)
    if may and not any(map(tally.is_successor, back)):
        assert set(tally.former_members(back)) <= set(back)
        assert rules().judge(head, forked(head, *back).certificate).head.roster == back


def test_largest_branch_wins_among_former_and_other_members() -> None:
    """For each peer, and whatever their lengths; of two equal branches, not that of the former members."""
    before = shrinking(FIVE, FIVE[2:], FIVE[4:])
    head = before[-1].head
    two, three, successor = [forked(head, *BACK[2:4])], [forked(head, *BACK[:3])], [forked(head, BACK[4])]
    alone = line(head, 5, voters=FIVE[4:])
    grown = [*alone, decided(alone[-1].head, roster=(FIVE[4], *ROSTER[:2]), voters=FIVE[4:])]
    grown += line(grown[-1].head, 2)
    for order in ([three, two, alone, successor], [grown, three, two, successor]):
        for better, worse in itertools.combinations(order, 2):
            for kept, shown in ((better, worse), (worse, better)):
                chain = Chain(RUN, "run", FIVE)
                chain.switch(chain.head.key.lineage, [*before, *kept])
                branch = rules().beating(chain, head.key.lineage, shown)
                assert (branch is not None) == (shown is better)
            both = Branch(head, better), Branch(head, worse)
            assert rules().better(*both) is rules().better(*both[::-1]) is both[0]
    chain = Chain(RUN, "run", FIVE)
    chain.switch(chain.head.key.lineage, [*before, *three])
    assert rules().depends_on_growth(chain, head.key.lineage, grown[:3]), "its growth is still to come"


def test_tie_goes_to_the_lower_hash() -> None:
    head = start(4)
    pairs = sorted([forked(head, ANNA, BERT), forked(head, CLEO, DORA)], key=lambda link: link.lineage)
    assert beats([pairs[1]], [pairs[0]], 4) == 1 and beats([pairs[0]], [pairs[1]], 4) == 0


def test_between_two_single_member_forks_lower_hash_wins() -> None:
    head = start(2)
    lower, higher = sorted([forked(head, ANNA), forked(head, BERT)], key=lambda link: link.lineage)
    mine = next(member for member in ROSTER[:2] if member in higher.record.roster)
    assert beats([higher, *line(higher.head, 9)], [lower], 2, mine) == 1
    assert beats([lower], [higher, *line(higher.head, 9)], 2, ANNA) == 0


def test_vote_count_of_certificate_does_not_matter() -> None:
    """Two peers hold different certificates of the same rounds, and must choose alike."""
    head = start(5)
    every = [decided(head, plan=bytes([plan]) * 32).record for plan in range(2)]
    answers = set()
    for many, few in itertools.product((ROSTER, ROSTER[:3]), repeat=2):
        pairs = zip(every, (many, few), strict=True)
        links = [follow(head, certified(head, one, by)) for one, by in pairs]
        answers.add((beats(links[:1], links[1:]), beats(links[1:], links[:1])))
    assert len(answers) == 1 and sum(answers.pop()) == 1, "only liars bring this about; still, all agree"


def test_divergence_is_found_above_common_ancestor() -> None:
    links = line(start(5), 6)
    other = line(links[3].head, 3, plan=b"\x00" * 32)
    chain = chain_of(5, links)
    branch = rules().beating(chain, chain.locator()[-1], [*links[:4], *other])
    assert (branch is None) == (links[4].lineage < other[0].lineage)
    if branch:
        assert branch.ancestor.key == links[3].head.key and branch.links == tuple(other)


# -- forks, and peers that wait ----------------------------------------------------------------------------------------


def test_single_member_fork_cannot_capture_a_majority() -> None:
    """R = 4, quorum 3: without dora the others are enough, without two they are not."""
    head = start(4)
    alone, pair = forked(head, DORA), forked(head, CLEO, DORA)
    longer = [alone, *line(alone.head, 9)]
    assert beats([], longer, 4, ANNA) == 0
    assert beats([], longer, 4, DORA) == 10, "its own"
    assert beats([], longer, 4, Member("anna", 1)) == beats([], longer, 4) == 10, "a peer without a vote follows it"
    assert beats([], [pair], 4, ANNA) == 1
    assert beats([], [forked(start(2), BERT)], 2, ANNA) == 1


def test_stranded_peer_follows_the_fork() -> None:
    alone = forked(start(4), DORA)
    assert beats([], [alone, *line(alone.head, 2)], 4, ANNA, stranded=True) == 3


def test_branch_is_followed_up_to_suspected_capture() -> None:
    links = line(start(4), 3)
    fork = forked(links[-1].head, DORA)
    for ours, stranded in itertools.product((links[:1], links[:2]), (False, True)):
        assert beats(ours, [*links, fork], 4, ANNA, stranded) == 3 - len(ours)
    assert beats(links, [*links, fork], 4, ANNA) == 0
    assert beats(links, [*links, fork], 4, ANNA, stranded=True) == 1


def test_larger_fork_beats_our_smaller_one() -> None:
    head = start(5)
    assert beats([forked(head, ANNA)], [forked(head, DORA, EMIL)], 5, ANNA) == 1


# -- the best of several ----------------------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> list[list[DecidedRound]]:
    """Paths from the genesis through one tree: each forks off another, or goes on with it."""
    paths: list[list[DecidedRound]] = [[]]
    for number in range(draw(st.integers(1, 6))):
        base = draw(st.sampled_from(paths))
        path = base[: draw(st.integers(0, len(base)))]
        for depth in range(draw(st.integers(0, 3))):
            head = path[-1].head if path else start(5)
            fork = len(head.roster) >= 3 and draw(st.booleans())
            kind, roster = (Kind.FORK, head.roster[: len(head.roster) // 2]) if fork else (Kind.MEAN, head.roster)
            path = [*path, decided(head, kind, roster, plan=bytes([number, depth]) * 16)]
        paths.append(path)
    return paths


@given(paths=trees(), data=st.data())
def test_all_peers_converge_in_any_order(paths: list[list[DecidedRound]], data: st.DataObject) -> None:
    def follow_all(ours: list[DecidedRound], order: list[list[DecidedRound]], at_once: bool) -> bytes:
        chain = chain_of(5, ours)
        genesis_lineage = chain.locator()[-1]
        pending = [order] if at_once else [[each] for each in order]
        for batch in pending:
            found = [branch for path in batch if (branch := rules().beating(chain, genesis_lineage, path))]
            best: Branch | None = None
            for branch in found:
                best = rules().better(best, branch) if best else branch
            if best:
                chain.switch(best.ancestor.key.lineage, best.links)
        return chain.head.key.lineage

    ends = {
        follow_all(data.draw(st.sampled_from(paths)), data.draw(st.permutations(paths)), at_once)
        for at_once in (True, False, True, False)
    }
    assert len(ends) == 1
