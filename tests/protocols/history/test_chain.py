"""The chain as one peer sees it: what extends the head, what it remembers, where two chains part, how one is left."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols import wire
from protocols.base import BadPayload, Head, Member, RoundKey
from protocols.consensus import record as records
from protocols.consensus.record import Kind, Record
from protocols.history.chain import UNSETTLED, Chain, DecidedRound, genesis, state_root
from protocols.history.round_log import RECENT, ListArchive, RoundLog
from tests.support.fake_rounds import ROOT, RUN, certified, decided, encoded, line

ROSTER = (Member("anna"), Member("bert"))


def fresh() -> Chain:
    return Chain(RUN, "run", ROSTER, ROOT)


def grown(rounds: int, **changes: object) -> Chain:
    chain = fresh()
    for link in line(chain.head, rounds, **changes):
        chain.extend(encoded(link))
    return chain


def lineages(chain: Chain) -> list[bytes]:
    return [records.genesis(RUN), *(records.lineage(each) for each in chain.records)]


def state(chain: Chain) -> tuple[Head, tuple[bytes, ...], tuple[bytes, ...]]:
    return chain.head, chain.records, chain.locator()


# -- extending --------------------------------------------------------------------------------------------------------


def test_chain_begins_at_the_runs_genesis() -> None:
    chain = fresh()
    assert chain.head == Head(RoundKey(RUN, "run", records.genesis(RUN), 0), ROSTER, ROOT, records.genesis(RUN))
    assert chain.records == () and Chain(RUN, "run", ROSTER).head.state_root == UNSETTLED
    assert Chain(b"s" * 32, "run", ROSTER, ROOT).head.key.lineage != chain.head.key.lineage


def test_certificate_advances_the_head() -> None:
    chain = fresh()
    link = decided(chain.head, roster=(Member("bert"), Member("cleo", 3)))
    assert chain.extend(encoded(link)) == link.record
    key = RoundKey(RUN, "run", link.lineage, 1)
    assert chain.head == Head(key, (Member("bert"), Member("cleo", 3)), UNSETTLED, anchor=link.lineage)
    assert chain.child(records.genesis(RUN)) == link and chain.records == (link.certificate.record,)


@pytest.mark.parametrize("kind", [Kind.SKIP, Kind.FORK])
def test_record_without_parts_keeps_the_anchor(kind: Kind) -> None:
    chain = grown(2)
    anchor = chain.head.anchor
    link = decided(chain.head, kind, roster=(ROSTER[0],))
    chain.extend(encoded(link))
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
        chain.extend(wire.encode(certified(chain.head, bad)))
    assert state(chain) == before


def test_repeated_round_is_rejected() -> None:
    chain = fresh()
    link = decided(chain.head)
    chain.extend(encoded(link))
    with pytest.raises(ValueError, match="does not extend"):
        chain.extend(encoded(link))


def test_certificate_of_another_run_is_rejected() -> None:
    chain, other = fresh(), Chain(b"s" * 32, "run", ROSTER, ROOT)
    with pytest.raises(ValueError, match="certificate of round 0 does not extend"):
        chain.extend(encoded(decided(other.head)))
    assert state(chain) == state(fresh())


def test_invalid_certificate_bytes_change_nothing() -> None:
    chain = fresh()
    data = encoded(decided(chain.head))
    bare = decided(chain.head).certificate.record
    for bad in (b"", b"\xc0", data[:-1], data + b"\x00", bare):
        with pytest.raises(BadPayload):
            chain.extend(bad)
    assert state(chain) == state(fresh())


def test_settle_changes_only_the_state_root() -> None:
    chain = grown(1)
    before = chain.head
    assert before.state_root == UNSETTLED
    chain.settle(b"1" * 32)
    assert chain.head == replace(before, state_root=b"1" * 32)
    chain.extend(encoded(decided(chain.head)))
    assert chain.head.state_root == UNSETTLED, "even a SKIP's root has to be settled again: it binds the round"


def test_head_is_immutable() -> None:
    chain = fresh()
    before = chain.head
    chain.extend(encoded(decided(before)))
    chain.settle(b"1" * 32)
    assert before == fresh().head, "a round keeps the head that it began with"


# -- looking ----------------------------------------------------------------------------------------------------------


def test_heads_along_the_chain_match_the_past() -> None:
    chain = fresh()
    heads = [chain.head]
    for number in range(5):
        kind, roster = (Kind.SKIP, ROSTER[:1]) if number == 2 else (Kind.MEAN, ROSTER)
        chain.extend(encoded(decided(chain.head, kind, roster)))
        chain.settle(bytes([number]) * 32)
        heads.append(chain.head)
    assert [chain.at(head.key.lineage) for head in heads[:-1]] == heads[:-1]
    assert chain.at(heads[-1].key.lineage) == replace(heads[-1], state_root=UNSETTLED), "nobody has vouched for it"
    assert chain.at(b"x" * 32) is None


def test_head_of_diverged_peer_differs_from_chain() -> None:
    chain = grown(1)
    chain.settle(b"1" * 32)
    chain.extend(encoded(decided(chain.head, root=b"2" * 32)))
    head = chain.at(lineages(chain)[1])
    assert head is not None and head.state_root == b"2" * 32


def test_known_genesis_keeps_its_state_root() -> None:
    chain = fresh()
    chain.settle(b"9" * 32)
    head = chain.at(records.genesis(RUN))
    assert head is not None and head.state_root == ROOT


def test_since_and_child_return_following_records_or_none() -> None:
    chain = grown(6)
    every = lineages(chain)
    assert [link.lineage for link in chain.since(every[2])] == every[3:]
    assert [link.lineage for link in chain.since(every[0], 2)] == every[1:3]
    assert chain.since(every[6]) == chain.since(b"x" * 32) == ()
    assert chain.child(every[6]) is None and chain.child(b"x" * 32) is None
    assert every[3] in chain and b"x" * 32 not in chain


@given(rounds=st.integers(0, 300), shared=st.integers(0, 300))
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


def test_members_of_all_rosters_are_latest_first() -> None:
    chain = fresh()
    for roster in ((Member("anna"), Member("cleo", 1)), (Member("cleo", 2), Member("dora"))):
        chain.extend(encoded(decided(chain.head, roster=roster)))
    assert chain.members(9) == (Member("cleo", 2), Member("dora"), Member("anna"), Member("bert"))
    assert chain.members(2) == (Member("cleo", 2), Member("dora"))


# -- switching --------------------------------------------------------------------------------------------------------


def test_switch_replaces_our_branch_from_the_divergence() -> None:
    chain = grown(5)
    every = lineages(chain)
    head = chain.at(every[2])
    assert head is not None
    other = line(head, 2, plan=b"e" * 32, roster=ROSTER[:1])
    lost = chain.switch(every[2], other)
    assert [link.lineage for link in lost] == every[3:]
    assert lineages(chain) == [*every[:3], *(link.lineage for link in other)]
    assert chain.head == other[-1].head and every[4] not in chain
    chain.extend(encoded(decided(chain.head)))
    assert chain.head.key.round == 5


def test_switch_may_only_rewind_or_only_extend() -> None:
    chain = grown(3)
    every = lineages(chain)
    more = line(chain.head, 2)
    assert chain.switch(every[3], more) == () and chain.head.key.round == 5
    assert len(chain.switch(every[0], [])) == 5 and chain.head == replace(fresh().head, state_root=ROOT)


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


def test_copy_is_independent() -> None:
    chain = grown(3)
    before, other = state(chain), chain.copy()
    other.switch(lineages(chain)[1], line(fresh().head, 0))
    other.extend(encoded(decided(other.head, plan=b"e" * 32)))
    assert state(chain) == before and other.head.key.round == 2


# -- an archive -------------------------------------------------------------------------------------------------------


class Plain:
    """The rounds of a chain in one list: what it says of them, the long way round."""

    def __init__(self, links: list[DecidedRound]) -> None:
        self.links = links

    @property
    def heads(self) -> list[Head]:
        roots = [link.record.state_root for link in self.links]
        heads = [fresh().head, *(link.head for link in self.links)]
        return [*(replace(head, state_root=root) for head, root in zip(heads, roots, strict=False)), heads[-1]]

    def members(self, limit: int) -> tuple[Member, ...]:
        every = [member for head in reversed(self.heads) for member in head.roster]
        return tuple({member.peer: member for member in reversed(every)}[peer] for peer in dict.fromkeys(
            member.peer for member in every
        ))[:limit]  # fmt: skip


def former(heads: Sequence[Head]) -> list[tuple[Member, ...]]:
    """Rosters before that of the last head that are larger than all that came after them, the latest first."""
    rosters = [head.roster for head in heads]
    larger = (at for at in range(len(rosters) - 1) if len(rosters[at]) > max(map(len, rosters[at + 1 :])))
    return [rosters[at] for at in sorted(larger, reverse=True)]


def same(chain: Chain, plain: Plain) -> None:
    heads, links = plain.heads, plain.links
    assert list(chain.head.former) == former(heads)
    assert chain.head == heads[-1] and len(chain) == len(links)
    assert chain.records == tuple(link.certificate.record for link in links)
    for place, head in enumerate(heads):
        lineage = head.key.lineage
        assert lineage in chain and chain.at(lineage) == head and chain.count_since(lineage) == len(links) - place
        assert list(getattr(chain.at(lineage), "former", ())) == former(heads[: place + 1])
        assert chain.since(lineage) == tuple(links[place:]) and chain.since(lineage, 2) == tuple(links[place:][:2])
        assert tuple(chain.walk(lineage)) == tuple(links[place:])
        assert chain.child(lineage) == next(iter(links[place:]), None)
        some = chain.certificates(lineage)
        assert bool(some) == (place < len(links))
        assert some == [link.certificate for link in links[place : place + len(some)]]
    assert [chain.members(limit) for limit in (1, 3, 9)] == [plain.members(limit) for limit in (1, 3, 9)]
    at = [heads.index(head) for head in map(chain.at, chain.locator()) if head]
    assert at == sorted(at, reverse=True) and at[0] == len(links) and at[-1] == 0


ROSTERS = st.sampled_from([ROSTER, ROSTER[:1], (Member("bert"), Member("cleo", 1)), (Member("cleo", 2),)])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["extend", "extend", "switch", "copy", "restart"]),
        st.integers(0, 5),  # which of the chains: the first of them writes to the archive
        st.integers(0, 30),  # where it is left, from the end
        st.integers(0, 6),  # rounds
        st.sampled_from([Kind.MEAN, Kind.SKIP, Kind.FORK]),
        ROSTERS,
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=40)
@given(steps=STEPS, recent=st.integers(1, 4), piece=st.integers(1, 3))
def test_archived_chain_behaves_like_a_list(steps: list[Any], recent: int, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("protocols.history.round_log.RECENT", recent)
        patch.setattr("protocols.history.round_log.PIECE", piece)
        archive, plans = ListArchive(), iter(range(1000))
        pairs = [(Chain(RUN, "run", ROSTER, ROOT, archive), Plain([]))]
        lent: list[tuple[Sequence[DecidedRound], list[DecidedRound]]] = []
        for what, which, back, rounds, kind, roster in steps:
            at = which % len(pairs)
            chain, plain = pairs[at]
            place = max(0, len(plain.links) - back) if what == "switch" else len(plain.links)
            start = plain.heads[place]
            links = line(replace(start, state_root=ROOT), rounds, kind=kind, roster=roster, plan=plan(next(plans)))
            if what == "extend":
                for link in links:
                    chain.extend(encoded(link))
                plain.links = plain.links + links
            elif what == "switch":
                branch = links if rounds % 2 else judged(start, links)
                assert chain.switch(start.key.lineage, branch) == tuple(plain.links[place:])
                lent.append((branch, links))
                plain.links = plain.links[:place] + links
            elif what == "copy":
                pairs.append((chain.copy(), Plain(plain.links)))
            else:
                pairs = [(Chain(RUN, "run", ROSTER, ROOT, archive), pairs[0][1])]
                assert pairs[0][0].refused == 0
            for pair in pairs:
                same(*pair)
            assert all(list(branch) == links for branch, links in lent), "they are the contacts' still"


def judged(start: Head, links: list[DecidedRound]) -> RoundLog:
    """As contacts prove them: in an archive of their own, some of them out of another's."""
    other, branch = RoundLog(start), RoundLog(start)
    other.extend(links)
    branch.extend(links[: len(links) // 3])
    branch.adopt(other, len(links) // 3, len(links) // 2)
    branch.adopt(other, len(links) // 2, len(links))
    assert branch.forks == other.forks and branch.locator() == other.locator()
    return branch


def plan(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_extending_a_copy_leaves_judged_branch_unchanged() -> None:
    chain, start = fresh(), fresh().head
    copy, links = chain.copy(), line(start, 4)
    branch = judged(start, links)
    copy.switch(start.key.lineage, branch)
    copy.extend(encoded(decided(copy.head, plan=b"e" * 32)))
    assert list(branch) == links and len(copy) == 5 and len(chain) == 0
    other = chain.copy()
    other.switch(start.key.lineage, branch)
    other.switch(links[1].lineage, [])
    assert list(branch) == links and len(other) == 2


def archived(links: list[DecidedRound]) -> ListArchive:
    archive = ListArchive()
    for link in links:
        archive.extend([encoded(link)])
    return archive


def test_archived_records_after_a_break_are_dropped() -> None:
    links, other = line(fresh().head, 6), line(fresh().head, 6, plan=b"e" * 32)
    for held, good in (
        ([*links[:3], *other[3:]], 3),
        ([*links[:3], *links[4:]], 3),
        ([*links[:2], links[1]], 2),
        (line(Chain(b"s" * 32, "run", ROSTER, ROOT).head, 2), 0),
    ):
        archive = archived(held)
        chain = Chain(RUN, "run", ROSTER, ROOT, archive)
        assert len(chain) == len(archive) == good and chain.refused == len(held) - good
        assert chain.records == tuple(link.certificate.record for link in links[:good])
    archive = archived(links)
    archive._kept[4] = b"nonsense"
    assert len(Chain(RUN, "run", ROSTER, ROOT, archive)) == len(archive) == 4


@pytest.mark.parametrize("bad", [b"", b"nonsense", None])
def test_unreadable_record_drops_all_earlier_ones(bad: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocols.history.round_log.RECENT", 2)
    links = line(fresh().head, 20)
    archive = archived(links)
    chain = Chain(RUN, "run", ROSTER, ROOT, archive)
    every = lineages(chain)
    archive._kept[7] = encoded(decided(links[6].head, plan=b"e" * 32)) if bad is None else bad
    assert len(chain.since(every[9])) == 11, "nobody has asked for it yet"
    assert chain.since(every[0]) == () and chain.at(every[8]) is None
    assert every[8] not in chain and every[9] in chain and chain.locator()[-1] == every[9]
    assert chain.at(every[9]) == replace(links[8].head, state_root=links[9].record.state_root)
    assert len(chain.records) == 11 and chain.head == links[-1].head
    with pytest.raises(ValueError, match="does not leave this chain"):
        chain.switch(every[3], [])
    assert len(chain.switch(every[9], [])) == 11 and chain.head == links[8].head
    chain.extend(encoded(decided(chain.head)))


def test_switch_at_unreadable_record_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocols.history.round_log.RECENT", 2)
    archive = archived(line(fresh().head, 20))
    chain = Chain(RUN, "run", ROSTER, ROOT, archive)
    lineage = lineages(chain)[8]
    archive._kept[7] = b""
    with pytest.raises(ValueError, match="cannot be read any more"):
        chain.switch(lineage, [])
    assert len(chain) == len(archive) == 20
    chain.extend(encoded(decided(chain.head)))


def test_unreadable_abandoned_record_does_not_block_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocols.history.round_log.RECENT", 2)
    archive = archived(line(fresh().head, 20))
    chain = Chain(RUN, "run", ROSTER, ROOT, archive)
    every = lineages(chain)
    archive._kept[12] = b""
    assert [link.lineage for link in chain.switch(every[5], [])] == every[15:]
    assert len(archive) == 5 and len(chain.records) == 5 and every[5] in chain


@pytest.mark.parametrize("copied", [False, True])
def test_unreadable_branch_changes_nothing(copied: bool) -> None:
    chain = grown(5)
    chain, before = chain.copy() if copied else chain, state(chain)
    archive, start = ListArchive(), fresh().head
    branch = RoundLog(start, archive)
    branch.extend(line(start, 300, plan=b"e" * 32, voters=ROSTER[:1]))
    del archive._kept[20:]
    if not copied:
        with pytest.raises(ValueError, match="cannot be read any more"):
            chain.switch(start.key.lineage, branch)
        assert state(chain) == before
    else:
        chain.switch(start.key.lineage, branch)  # nothing is written, and nobody has looked yet
        assert chain.since(start.key.lineage) == () and chain.head == branch[-1].head


def test_long_chain_costs_little_memory() -> None:
    """Bytes in memory for each round of a chain whose certificates are elsewhere."""

    class Elsewhere(ListArchive):
        def extend(self, certificates: Sequence[bytes]) -> None:
            self._kept += [b""] * len(certificates)

    def grow(rounds: int) -> int:
        chain = Chain(RUN, "run", ROSTER, ROOT, Elsewhere())
        tracemalloc.start()
        chain.switch(chain.head.key.lineage, links[:rounds])
        gc.collect()  # what is garbage already is no memory of the chain
        traces = tracemalloc.take_snapshot().filter_traces([ours])
        tracemalloc.stop()
        return sum(trace.size for trace in traces.statistics("filename"))

    ours = tracemalloc.Filter(True, "*/protocols/*")
    links = line(fresh().head, 400 + 9 * RECENT, voters=ROSTER[:1])  # as many are at hand of either
    assert (grow(len(links)) - grow(400)) / (9 * RECENT) < 100


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


def test_certificates_of_one_record_give_one_head() -> None:
    head = genesis(RUN, "run", ROSTER, ROOT)
    record = decided(head).record
    ends = set()
    for voters in (ROSTER, ROSTER[:1]):
        chain = fresh()
        chain.switch(head.key.lineage, [DecidedRound(certified(head, record, voters), decided(head).head)])
        ends.add(chain.head.key.lineage)
    assert len(ends) == 1
