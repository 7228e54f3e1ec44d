"""Tables that other peers fill stay bounded: the newest entries and counts are kept."""

from __future__ import annotations

from collections import Counter

from node.runtime.bounded import MAX_COUNTED, count
from protocols.peers.estimates import RecentDict


def test_oldest_entries_are_dropped_and_rewritten_are_newest() -> None:
    entries: RecentDict[str, int] = RecentDict(3)
    for number, key in enumerate("abcad"):
        entries[key] = number
    assert entries == {"c": 2, "a": 3, "d": 4}


def test_count_reports_new_keys_and_drops_oldest() -> None:
    counter: Counter[str] = Counter()
    assert [count(counter, key, 2) for key in "aabac"] == [True, False, True, False, True]
    assert counter == {"b": 1, "c": 1}
    numbers: Counter[int] = Counter()
    for number in range(2 * MAX_COUNTED):
        count(numbers, number)
    assert len(numbers) == MAX_COUNTED and MAX_COUNTED in numbers
