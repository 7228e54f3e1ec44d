"""What a peer keeps of its observations of other peers: moving averages, and the entries that changed last. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def ewma(mean: float, observed: float, gain: float) -> float:
    """The exponentially weighted moving average, after one more observation that counts for `gain` of it."""
    return (1 - gain) * mean + gain * observed


class RecentDict(OrderedDict[K, V]):
    """A dict of at most `limit` entries: the one that was set longest ago is forgotten first."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)

    def renew(self, key: K, new: Callable[[], V]) -> V:
        """The entry of that key, made if there is none; it now counts as the one that was set last."""
        self[key] = entry = self[key] if key in self else new()
        return entry
