"""Many lineages in little memory: what is in comes out, by its place and by itself, and what is cut off is gone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocols.history.lineage_index import LineageIndex

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
