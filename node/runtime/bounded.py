"""Dictionaries of bounded size for data from other peers: a new entry replaces the oldest."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MAX_COUNTED = 1024


def put_newest(entries: dict[K, V], key: K, value: V, most: int) -> None:
    """Set an entry as the newest one. If there are more than `most`, remove the oldest."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > most:
        del entries[next(iter(entries))]


def count(counter: Counter[K], key: K, most: int = MAX_COUNTED) -> bool:
    """Increase a count, with at most `most` keys: a new key replaces the oldest. Return whether the key is new."""
    new = key not in counter
    if new and len(counter) >= most:
        del counter[next(iter(counter))]
    counter[key] += 1
    return new
