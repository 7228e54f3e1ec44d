"""A moving average and a bounded dict, for what a peer observes of other peers. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def ewma(mean: float, observed: float, gain: float) -> float:
    """Update an exponentially weighted moving average with an observation of weight `gain`."""
    return (1 - gain) * mean + gain * observed


class RecentDict(OrderedDict[K, V]):
    """A dict of at most `limit` entries. Beyond the limit, the entry that was set longest ago is dropped."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)

    def renew(self, key: K, new: Callable[[], V]) -> V:
        """Return the entry of this key, created if missing, and mark it as the one that was set last."""
        self[key] = entry = self[key] if key in self else new()
        return entry
