"""A count of bounded size, by keys from other peers. (A dictionary: `protocols.peers.estimates.RecentDict`.)"""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

K = TypeVar("K")

MAX_COUNTED = 1024


def count(counter: Counter[K], key: K, most: int = MAX_COUNTED) -> bool:
    """Increase a count, with at most `most` keys: a new key replaces the oldest. Return whether the key is new."""
    new = key not in counter
    if new and len(counter) >= most:
        del counter[next(iter(counter))]
    counter[key] += 1
    return new
