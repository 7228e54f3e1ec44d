"""What others fill stays bounded: the newest entries and counts are kept."""

from __future__ import annotations

from collections import Counter

from node.runtime.bounded import MAX_COUNTED, count, renew


def test_the_newest_entries_are_kept_and_what_is_set_again_is_new() -> None:
    entries: dict[str, int] = {}
    for number, key in enumerate("abcad"):
        renew(entries, key, number, 3)
    assert entries == {"c": 2, "a": 3, "d": 4}


def test_counts_tell_what_is_new_and_forget_the_oldest_kind() -> None:
    counter: Counter[str] = Counter()
    assert [count(counter, key, 2) for key in "aabac"] == [True, False, True, False, True]
    assert counter == {"b": 1, "c": 1}
    numbers: Counter[int] = Counter()
    for number in range(2 * MAX_COUNTED):
        count(numbers, number)
    assert len(numbers) == MAX_COUNTED and MAX_COUNTED in numbers
