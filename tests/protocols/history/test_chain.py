"""The chain as one peer sees it: what extends the head, what it remembers, where two chains part, how one is left."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols import wire
from protocols.base import BadPayload, Head, Member, RoundKey
from protocols.consensus import record as records
from protocols.consensus.record import Kind, Record
from protocols.history.chain import UNSETTLED, Chain, state_root
from protocols.history.round_log import DecidedRound
from tests.support.fake_rounds import ROOT, ROSTER, RUN, certified, decided, fresh, grown, line, lineages, state

# -- extending --------------------------------------------------------------------------------------------------------


def test_chain_begins_at_the_runs_genesis() -> None:
    chain = fresh()
    assert chain.head == Head(
        RoundKey(RUN, "run", records.genesis(RUN), 0), ROSTER, ROOT, records.genesis(RUN), fragments=3
    )
    assert chain.records == () and Chain(RUN, "run", ROSTER).head.state_root == UNSETTLED
    assert Chain(b"s" * 32, "run", ROSTER, ROOT).head.key.lineage != chain.head.key.lineage


def test_certificate_advances_the_head() -> None:
    chain = fresh()
    link = decided(chain.head, roster=(Member("bert"), Member("cleo", 3)))
    chain.extend(link.certificate)
    key, roster = RoundKey(RUN, "run", link.lineage, 1, 1), (Member("bert"), Member("cleo", 3))
    assert chain.head == Head(key, roster, UNSETTLED, anchor=link.lineage, fragments=3)
    assert chain.child(records.genesis(RUN)) == link and chain.records == (link.certificate.record,)


def test_each_training_round_takes_the_next_fragment() -> None:
    """Also one that is skipped, but not one for which nothing was trained."""
    chain, some, idle, found = fresh(), b"p" * 32, bytes(32), list[int]()
    for kind, plan in [
        *((Kind.MEAN, some), (Kind.SKIP, some), (Kind.FORK, idle), (Kind.MEAN, some)),
        *((Kind.SKIP, idle), (Kind.MEAN, some)),
    ]:
        found.append(chain.head.key.fragment)
        chain.extend(decided(chain.head, kind=kind, plan=plan).certificate)
    assert found == [0, 1, 2, 2, 0, 0] and chain.head.key.fragment == 1
    assert [link.certificate.key.fragment for link in chain.since(records.genesis(RUN))] == found


@pytest.mark.parametrize("kind", [Kind.SKIP, Kind.FORK])
def test_record_without_parts_keeps_the_anchor(kind: Kind) -> None:
    chain = grown(2)
    anchor = chain.head.anchor
    link = decided(chain.head, kind, roster=(ROSTER[0],))
    chain.extend(link.certificate)
    assert chain.head.key.round == 3 and chain.head.key.lineage == link.lineage
    assert chain.head.anchor == anchor == lineages(chain)[2]


@pytest.mark.parametrize(
    "parent, number",
    [
        (b"x" * 32, 1),  # another parent
        (None, 0),  # a round that was
        (None, 2),  # a round to come
        (records.genesis(RUN), 0),  # a second child of the genesis
        (records.genesis(RUN), 1),
    ],
)
def test_record_not_extending_head_is_rejected(parent: bytes | None, number: int) -> None:
    chain = grown(1)
    before = state(chain)
    bad = Record(parent or chain.head.key.lineage, ROOT, number, Kind.MEAN, b"e" * 32, (), ROSTER)
    with pytest.raises(ValueError, match=f"^record of round {number} does not extend the head at round 1$"):
        chain.extend(certified(chain.head, bad))
    assert state(chain) == before


def test_invalid_certificate_changes_nothing() -> None:
    """One without a record, that of another run, and that of a round that is decided already."""
    chain, link = fresh(), decided(fresh().head)
    data = link.certificate.record
    for bad in (b"", b"\xc0", data[:-1], data + b"\x00", wire.encode(link.certificate)):
        with pytest.raises(BadPayload):
            chain.extend(replace(link.certificate, record=bad))
    with pytest.raises(ValueError, match="certificate of round 0 does not extend"):
        chain.extend(decided(Chain(b"s" * 32, "run", ROSTER, ROOT).head).certificate)
    assert state(chain) == state(fresh())
    chain.extend(link.certificate)
    before = state(chain)
    with pytest.raises(ValueError, match="does not extend"):
        chain.extend(link.certificate)
    assert state(chain) == before


def test_settle_changes_only_the_state_root() -> None:
    chain = grown(1)
    before = chain.head
    assert before.state_root == UNSETTLED
    chain.settle(b"1" * 32)
    assert chain.head == replace(before, state_root=b"1" * 32)
    assert before == grown(1).head, "a round keeps the head that it began with"
    chain.extend(decided(chain.head).certificate)
    assert chain.head.state_root == UNSETTLED, "even a SKIP's root has to be settled again: it binds the round"


# -- looking ----------------------------------------------------------------------------------------------------------


def test_past_heads_have_the_recorded_state_roots() -> None:
    """Whatever state this peer itself settled."""
    chain = fresh()
    chain.settle(b"9" * 32)
    start = chain.at(records.genesis(RUN))
    assert start is not None and start.state_root == ROOT
    chain = grown(1)
    chain.settle(b"1" * 32)
    chain.extend(decided(chain.head, root=b"2" * 32).certificate)
    diverged = chain.at(lineages(chain)[1])
    assert diverged is not None and diverged.state_root == b"2" * 32


@given(rounds=st.integers(0, 300), shared=st.integers(0, 300))
@settings(max_examples=30)
def test_locator_finds_the_common_ancestor_approximately(rounds: int, shared: int) -> None:
    base, mine, theirs = line(fresh().head, min(shared, rounds)), fresh(), fresh()
    start = mine.head.key.lineage
    head = base[-1].head if base else mine.head
    mine.switch(start, [*base, *line(head, rounds - len(base))])
    theirs.switch(start, [*base, *line(head, 3, plan=b"e" * 32)])
    locator = mine.locator()
    assert locator[0] == mine.head.key.lineage and locator[-1] == start and len(locator) < 20
    common = theirs.common(locator)
    assert common is not None and common in mine and common in theirs
    found, parted = theirs.at(common), len(base)
    assert found is not None and 2 * (rounds - parted + 8) >= rounds - found.key.round >= rounds - parted
    assert theirs.common([b"x" * 32]) is None


# -- switching --------------------------------------------------------------------------------------------------------


def test_invalid_switch_changes_nothing() -> None:
    chain = grown(3)
    every, links = lineages(chain), line(fresh().head, 3, plan=b"e" * 32)
    before = state(chain)
    bad: list[tuple[bytes, list[DecidedRound]]] = [
        (b"x" * 32, links),
        (every[1], links),
        (every[0], [links[0], links[2]]),
    ]
    for lineage, branch in bad:
        with pytest.raises(ValueError, match="does not leave this chain"):
            chain.switch(lineage, branch)
    assert state(chain) == before


def test_forks_without_a_mean_train_nothing() -> None:
    """Also on a copy, which shares the first rounds and has the others to itself."""
    chain = grown(2)
    for kind in (Kind.FORK, Kind.MEAN, Kind.SKIP):
        chain.extend(decided(chain.head, kind).certificate)
    other = chain.copy()
    for kind in (Kind.MEAN, Kind.FORK, Kind.MEAN):
        other.extend(decided(other.head, kind).certificate)
    for each, wanted in ((chain, [0, 1, 2, 2, 3, 4]), (other, [0, 1, 2, 2, 3, 4, 5, 5, 6])):
        assert [each.trained_at(lineage) for lineage in lineages(each)] == wanted and each.trained == wanted[-1]
    assert chain.trained_at(b"x" * 32) == 0


def test_rounds_before_the_genesis_count_as_trained() -> None:
    """Those of a stage that begins again from a backup."""
    chain = Chain(RUN, "run/stage/1/1", ROSTER)
    chain.trained_before = 7
    before = chain.head.key.lineage
    chain.extend(decided(chain.head, Kind.MEAN).certificate)
    other = chain.copy()
    other.extend(decided(other.head, Kind.FORK).certificate)
    assert [chain.trained, other.trained, chain.trained_at(before)] == [8, 8, 7] and len(chain) == 1


# -- state roots ------------------------------------------------------------------------------------------------------


def test_state_root_depends_on_every_input() -> None:
    one, two = b"1" * 32, b"2" * 32
    roots = [state_root(p, v, n) for p in (one, two) for v in (one, two) for n in (0, 1, 256, 1 << 40)]
    assert len(set(roots)) == len(roots) == 16
    assert {len(root) for root in roots} == {32}
    assert state_root(one, two, 5) == state_root(bytes(one), bytes(two), 5)


def test_state_root_value_is_stable() -> None:
    """All peers of a run compare it, whatever their version."""
    assert (
        state_root(b"1" * 32, b"2" * 32, 7).hex() == "f543cee602b7233b9b45f14c2d72e8c4f19617500880af3faaa4fed495069822"
    )
