"""Members removed for good, in a private run: their rounds among themselves, and the fork of those before them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.base import BadPayload, Head, Member
from protocols.consensus.record import Kind
from protocols.consensus.vote_tally import VoteTally, majority, max_admitted
from protocols.history.chain import Chain, DecidedRound, genesis
from protocols.history.fork_choice import Branch, ForkChoice
from protocols.history.round_log import RoundLog
from tests.sim.host import SimSigner
from tests.support.fake_rounds import RUN, SEED, decided, line

ANNA, BERT, CLEO, DORA, EMIL = ROSTER = tuple(Member(name) for name in ("anna", "bert", "cleo", "dora", "emil"))
REMOVED = (CLEO, DORA, EMIL)
GUEST = Member("gus")


def rules(*removed: Member) -> ForkChoice:
    me = Member("zeno")
    return ForkChoice(me, SimSigner(me.peer, SEED), removed={member.peer for member in removed}.__contains__)


def tally(head: Head, *removed: Member, fork_peers: int = 1, voters: int = len(ROSTER)) -> VoteTally:
    made = VoteTally(head.key, head.roster, SimSigner("anna", SEED), None, fork_peers, head.former)
    made.most_voters, made.removed = voters, {member.peer for member in removed}.__contains__
    return made


def start() -> Head:
    return genesis(RUN, "run", ROSTER)


def path(*steps: tuple[Kind, tuple[Member, ...]]) -> list[DecidedRound]:
    """Rounds from the start, each with the roster after it."""
    links: list[DecidedRound] = []
    for kind, roster in steps:
        links.append(decided(links[-1].head if links else start(), kind, roster))
    return links


def chain_of(links: list[DecidedRound]) -> Chain:
    chain = Chain(RUN, "run", ROSTER)
    chain.switch(chain.head.key.lineage, links)
    return chain


def follows(known: ForkChoice, ours: list[DecidedRound], theirs: list[DecidedRound]) -> bool:
    """Whether a peer with these rounds follows those; the same for both forms in which rounds are held."""
    chain, log = chain_of(ours), RoundLog(start())
    log.extend(theirs)
    found = {known.beating(chain, start().key.lineage, links) is not None for links in (theirs, log)}
    assert len(found) == 1
    return found.pop()


APART = path((Kind.MEAN, ROSTER), (Kind.MEAN, REMOVED))
"""Three decide without anna and bert."""
LONG = [*APART, *line(APART[-1].head, 20)]
GROWN = [*APART, decided(APART[-1].head, roster=(*REMOVED, GUEST)), decided(APART[-1].head, plan=b"x" * 32)][:3]
FORK = path((Kind.MEAN, ROSTER), (Kind.FORK, (ANNA, BERT)))


@pytest.mark.parametrize("theirs", (APART, LONG), ids=("short", "long"))
def test_rounds_of_removed_peers_lose_to_a_fork(theirs: list[DecidedRound]) -> None:
    assert follows(rules(), FORK, theirs) and not follows(rules(), theirs, FORK)
    for some in itertools.combinations(REMOVED, 2):
        assert follows(rules(*some), FORK, theirs), "one of them is left, and continues"
    assert not follows(rules(*REMOVED), FORK, theirs) and follows(rules(*REMOVED), theirs, FORK)


def test_rounds_of_removed_peers_count_where_nothing_rivals_them() -> None:
    """A founder with an empty disk follows them instead of beginning at the start again."""
    assert follows(rules(*REMOVED), [], LONG) and follows(rules(*REMOVED), APART, LONG)
    assert not follows(rules(*REMOVED), LONG, APART)


def test_member_admitted_by_removed_peers_is_left() -> None:
    assert follows(rules(*REMOVED), FORK, GROWN), "the guest may fork there"
    assert not follows(rules(*REMOVED, GUEST), FORK, GROWN)
    beginning = GROWN[:2]
    assert rules(*REMOVED).depends_on_growth(chain_of(FORK), start().key.lineage, beginning)


def test_former_members_replace_a_roster_that_was_removed() -> None:
    head = APART[-1].head
    back = replace(BERT, incarnation=3)
    for left in ((ANNA,), (back,), (ANNA, back)):
        assert tally(head, *REMOVED).may_fork(left) and not tally(head, CLEO, DORA).may_fork(left)
        assert tally(head, *REMOVED, ANNA).may_fork(left), "a fork that stands is not undone by later removals"
        assert tally(head, *REMOVED, fork_peers=2).may_fork(left) is (len(left) == 2)
        assert not tally(head, *REMOVED, fork_peers=0).may_fork(left)
        certificate = decided(head, Kind.FORK, left).certificate
        assert rules(*REMOVED).judge(head, certificate).head.roster == left
        with pytest.raises(BadPayload, match="may not extend"):
            rules().judge(head, certificate)
    assert not tally(head, *REMOVED).may_fork((ANNA, GUEST)) and not tally(head, *REMOVED).may_fork((GUEST,))
    assert not tally(head, *REMOVED).may_fork((ANNA, CLEO))
    waiting = (ANNA, back, GUEST)
    assert tally(head, *REMOVED).former_members(waiting) == (ANNA, back)
    assert tally(head, *REMOVED, ANNA).former_members(waiting) == (back,)
    assert tally(head, *REMOVED, voters=1).former_members(waiting) == (ANNA,), "as many as may fork"
    assert tally(head).former_members(waiting) == ()


def test_fork_after_a_removal_wins_over_what_the_removed_decide() -> None:
    """Where one that was not removed continues what they decided, that counts as before the removal."""
    after = [*APART, decided(APART[-1].head, Kind.FORK, (ANNA,))]
    assert follows(rules(*REMOVED), LONG, after) and not follows(rules(*REMOVED), after, LONG)
    assert follows(rules(*REMOVED), FORK, after) and not follows(rules(*REMOVED), after, FORK)
    assert follows(rules(*REMOVED), after, GROWN) and not follows(rules(*REMOVED), GROWN, after)


def test_fork_of_a_former_majority_stays_one_after_removals() -> None:
    alone = path((Kind.MEAN, (EMIL,)))
    many = [*alone, decided(alone[-1].head, Kind.FORK, ROSTER[:4])]
    grown = [*alone, decided(alone[-1].head, roster=(EMIL, GUEST))]
    for known in (rules(), rules(EMIL)):
        assert follows(known, grown, many) and not follows(known, many, grown)


# -- all peers agree --------------------------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> tuple[set[Member], list[list[DecidedRound]]]:
    """Removed peers, and paths through one tree. Rosters shrink, admit and fork, and are replaced after removals.

    None is replaced by a majority: two children may then differ by what comes after them, whatever was removed.
    """
    removed = draw(st.sets(st.sampled_from((*ROSTER[1:], GUEST))))
    paths: list[list[DecidedRound]] = [[]]
    for number in range(draw(st.integers(1, 6))):
        base = draw(st.sampled_from(paths))
        made = base[: draw(st.integers(0, len(base)))]
        for depth in range(draw(st.integers(1, 3))):
            head = made[-1].head if made else start()
            kept = draw(st.sets(st.sampled_from(head.roster), min_size=1))
            before = sorted({member for each in head.former for member in each} - set(head.roster))
            kinds = [Kind.MEAN, Kind.MEAN, Kind.FORK] if len(kept) < majority(len(head.roster)) else [Kind.MEAN]
            kind = draw(st.sampled_from(kinds))
            if kind == Kind.MEAN and draw(st.booleans()):
                others = sorted({*ROSTER, GUEST} - set(head.roster))
                kept |= set(draw(st.permutations(others))[: max_admitted(len(head.roster))])
            elif before and removed.issuperset(head.roster) and draw(st.booleans()):
                some = draw(st.sets(st.sampled_from(before), min_size=1))
                if not tally(head).may_fork(sorted(some)):
                    kind, kept = Kind.FORK, some
            plan = bytes([number, depth]) * 16
            made = [*made, decided(head, kind, tuple(sorted(kept)), plan=plan)]
        paths.append(made)
    return removed, paths


def settle(known: list[ForkChoice], ours: list[DecidedRound], order: list[list[DecidedRound]], at_once: bool) -> bytes:
    """The head on which a peer settles that is shown these paths again and again, while its knowledge grows."""
    chain, before = chain_of(ours), b""
    origin = start().key.lineage
    for which in known:
        for _ in range(20):
            before = chain.head.key.lineage
            for batch in [order] if at_once else [[each] for each in order]:
                best: Branch | None = None
                for shown in batch:
                    if branch := which.beating(chain, origin, shown):
                        best = which.better(best, branch) if best else branch
                if best:
                    chain.switch(best.ancestor.key.lineage, best.links)
            if chain.head.key.lineage == before:
                break
    assert chain.head.key.lineage == before, "it switches for ever"
    return before


@given(tree=trees(), data=st.data())
def test_peers_agree_once_they_know_the_same_removals(
    tree: tuple[set[Member], list[list[DecidedRound]]], data: st.DataObject
) -> None:
    removed, paths = tree
    ends = set()
    for at_once in (True, False, True, False):
        known = []
        if removed:  # before, it knew of some
            known.append(rules(*data.draw(st.sets(st.sampled_from(sorted(removed))))))
        known.append(rules(*removed))
        ours, order = data.draw(st.sampled_from(paths)), data.draw(st.permutations(paths))
        ends.add(settle(known, ours, order, at_once))
    assert len(ends) == 1


@given(tree=trees(), more=st.sets(st.sampled_from(ROSTER)))
def test_fork_that_was_allowed_stays_allowed(
    tree: tuple[set[Member], list[list[DecidedRound]]], more: set[Member]
) -> None:
    removed, paths = tree
    for head in {link.lineage: link.head for made in paths for link in made}.values():
        for size in range(1, 4):
            for left in itertools.combinations(ROSTER, size):
                if tally(head, *removed).may_fork(left):
                    assert tally(head, *removed, *more).may_fork(left)
