"""Chains whose rounds are in an archive: they behave like lists, survive unreadable records, and cost little memory."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocols.base import Head, Member
from protocols.consensus.record import Kind
from protocols.history.chain import Chain, DecidedRound
from protocols.history.round_log import RECENT, LineageIndex, ListArchive, RoundLog
from tests.support.fake_rounds import ROOT, ROSTER, decided, encoded, fresh, grown, line, lineages, state


class Plain:
    """The rounds of a chain in a plain list, and what a chain must say of them."""

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
        assert chain.child(lineage) == next(iter(links[place:]), None)
        some = chain.certificates(lineage)
        assert bool(some) == (place < len(links))
        assert some == [link.certificate for link in links[place : place + len(some)]]
    assert [chain.members(limit) for limit in (1, 3, 9)] == [plain.members(limit) for limit in (1, 3, 9)]
    unknown = b"x" * 32
    assert unknown not in chain and chain.at(unknown) is None
    assert chain.child(unknown) is None and chain.since(unknown) == ()
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


def step(what: str, which: int, rounds: int) -> tuple[Any, ...]:
    return what, which, 0, rounds, Kind.MEAN, ROSTER


@settings(deadline=None, max_examples=40)
@given(steps=STEPS, recent=st.integers(1, 4), piece=st.integers(1, 3))
@example([step("extend", 0, 2), step("copy", 0, 0), step("switch", 1, 3), step("switch", 1, 1)], 2, 2)
@example([step("extend", 0, 2), step("copy", 0, 0), step("switch", 1, 4), step("switch", 1, 3)], 2, 2)
def test_archived_chain_behaves_like_a_list(steps: list[Any], recent: int, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("protocols.history.round_log.RECENT", recent)
        patch.setattr("protocols.history.round_log.PIECE", piece)
        archive, plans = ListArchive(), iter(range(1000))
        pairs = [(fresh(archive), Plain([]))]
        lent: list[tuple[Sequence[DecidedRound], list[DecidedRound]]] = []
        for what, which, back, rounds, kind, roster in steps:
            at = which % len(pairs)
            chain, plain = pairs[at]
            place = max(0, len(plain.links) - back) if what == "switch" else len(plain.links)
            start = plain.heads[place]
            links = line(replace(start, state_root=ROOT), rounds, kind=kind, roster=roster, plan=plan(next(plans)))
            if what == "extend":
                for link in links:
                    chain.extend(link.certificate)
                plain.links = plain.links + links
            elif what == "switch":
                branch = links if rounds % 2 else judged(start, links)
                assert chain.switch(start.key.lineage, branch) == tuple(plain.links[place:])
                lent.append((branch, links))
                plain.links = plain.links[:place] + links
            elif what == "copy":
                pairs.append((chain.copy(), Plain(plain.links)))
            else:
                pairs = [(fresh(archive), pairs[0][1])]
                assert len(archive) == len(pairs[0][1].links), "none is refused"
            for pair in pairs:
                same(*pair)
            assert all(list(branch) == links for branch, links in lent), "the branch that was lent is unchanged"


def judged(start: Head, links: list[DecidedRound]) -> RoundLog:
    """The rounds as contacts prove them: in an archive of their own, some of them taken from another."""
    other, branch = RoundLog(start), RoundLog(start)
    other.extend(links)
    branch.extend(links[: len(links) // 3])
    branch.adopt(other, len(links) // 3, len(links) // 2)
    branch.adopt(other, len(links) // 2, len(links))
    assert branch.forks == other.forks and branch.locator() == other.locator()
    return branch


def plan(number: int) -> bytes:
    return number.to_bytes(32, "big")


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
        chain = fresh(archive)
        assert len(chain) == len(archive) == good
        assert chain.records == tuple(link.certificate.record for link in links[:good])
    archive = archived(links)
    archive._kept[4] = b"nonsense"
    assert len(fresh(archive)) == len(archive) == 4


@pytest.mark.parametrize("bad", [b"", b"nonsense", "of another branch", "of another round"])
def test_unreadable_record_drops_all_earlier_ones(bad: bytes | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocols.history.round_log.RECENT", 2)
    links = line(fresh().head, 20)
    archive = archived(links)
    chain = fresh(archive)
    every = lineages(chain)
    whole = {"of another branch": decided(links[6].head, plan=b"e" * 32), "of another round": links[9]}
    archive._kept[7] = encoded(whole[bad]) if isinstance(bad, str) else bad
    assert len(chain.since(every[9])) == 11, "nothing has read it yet"
    assert chain.since(every[0]) == () and chain.at(every[8]) is None
    assert every[8] not in chain and every[9] in chain and chain.locator()[-1] == every[9]
    assert chain.at(every[9]) == replace(links[8].head, state_root=links[9].record.state_root)
    assert len(chain.records) == 11 and chain.head == links[-1].head
    with pytest.raises(ValueError, match="does not leave this chain"):
        chain.switch(every[3], [])
    assert len(chain.switch(every[9], [])) == 11 and chain.head == links[8].head
    chain.extend(decided(chain.head).certificate)


def test_switch_at_unreadable_record_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocols.history.round_log.RECENT", 2)
    archive = archived(line(fresh().head, 20))
    chain = fresh(archive)
    lineage = lineages(chain)[8]
    archive._kept[7] = b""
    with pytest.raises(ValueError, match="cannot be read any more"):
        chain.switch(lineage, [])
    assert len(chain) == len(archive) == 20
    chain.extend(decided(chain.head).certificate)


def test_unreadable_abandoned_record_does_not_block_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocols.history.round_log.RECENT", 2)
    archive = archived(line(fresh().head, 20))
    chain = fresh(archive)
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
        chain.switch(start.key.lineage, branch)  # nothing is written, and nothing has read it yet
        assert chain.since(start.key.lineage) == () and chain.head == branch[-1].head


def test_long_chain_costs_little_memory() -> None:
    """Bytes in memory for each round of a chain whose certificates are elsewhere."""

    class Elsewhere(ListArchive):
        def extend(self, certificates: Sequence[bytes]) -> None:
            self._kept += [b""] * len(certificates)

    def grow(rounds: int) -> int:
        chain = fresh(Elsewhere())
        tracemalloc.start()
        chain.switch(chain.head.key.lineage, links[:rounds])
        gc.collect()  # garbage does not count
        traces = tracemalloc.take_snapshot().filter_traces([ours])
        tracemalloc.stop()
        return sum(trace.size for trace in traces.statistics("filename"))

    ours = tracemalloc.Filter(True, "*/protocols/*")
    links = line(fresh().head, 400 + 9 * RECENT, voters=ROSTER[:1])  # as many are in memory of either
    assert (grow(len(links)) - grow(400)) / (9 * RECENT) < 100


# -- the index of lineages --------------------------------------------------------------------------------------------


# Two of these begin alike.
LINEAGES = [bytes([number % 7]) * 4 + bytes([number]) * 28 for number in range(20)]


@given(steps=st.lists(st.one_of(st.just(None), st.integers(0, 20)), max_size=40))
def test_lineage_index_behaves_like_a_list(steps: list[int | None]) -> None:
    lineages, plain = LineageIndex(), list[bytes]()
    for length in steps:
        if length is not None:
            lineages.cut(length)
            del plain[length:]
        elif len(plain) < len(LINEAGES):
            lineages.append(LINEAGES[len(plain)])
            plain.append(LINEAGES[len(plain)])
        assert len(lineages) == len(plain) and [lineages[place] for place in range(len(plain))] == plain
        assert [lineages.find(each) for each in LINEAGES] == [
            plain.index(each) if each in plain else None for each in LINEAGES
        ]
