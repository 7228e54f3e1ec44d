"""Dictionaries that others fill, and that do not grow for it: the oldest entry makes room."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MAX_COUNTED = 1024


def renew(entries: dict[K, V], key: K, value: V, most: int) -> None:
    """Set an entry as the newest; the oldest beyond `most` goes."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > most:
        del entries[next(iter(entries))]


def count(counter: Counter[K], key: K, most: int = MAX_COUNTED) -> bool:
    """Count one more of it, keeping `most` kinds: a new one replaces the oldest. Returns whether it is new."""
    new = key not in counter
    if new and len(counter) >= most:
        del counter[next(iter(counter))]
    counter[key] += 1
    return new
