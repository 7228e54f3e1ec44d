"""The peers that watch this one: how many it answers, which it turns away, and whether they are still there. No I/O.

A peer that sends heartbeats is alive, and continues only while it gets the answers. So this peer counts it as live even
if it does not watch it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from node.membership.failure_detector import FailureDetector
from protocols.base import PeerId

MAX_WATCHERS = 192
REOPEN_SECONDS = 2.0
"""A watcher whose stream ended counts as gone unless it sends heartbeats on another one within this time."""


@dataclass(slots=True)
class _Watcher:
    detector: FailureDetector
    gone_at: float = math.inf


class Watchers:
    def __init__(self, lot: Callable[[PeerId], bytes]) -> None:
        """`lot` orders the watchers of which there are too many: those of the smallest values are answered."""
        self._lot = lot
        self._watchers: dict[PeerId, _Watcher] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._watchers

    def __iter__(self) -> Iterator[PeerId]:
        return iter(tuple(self._watchers))

    def hear(self, peer: PeerId, now: float, needed: Callable[[], Collection[PeerId]]) -> bool:
        """Note a heartbeat; returns whether to answer it. Peers that are `needed` always have a place."""
        watcher = self._watchers.get(peer)
        if watcher is None:
            if len(self._watchers) >= MAX_WATCHERS and not self._make_room(peer, needed()):
                return False
            watcher = self._watchers[peer] = _Watcher(FailureDetector(now))
        watcher.detector.hear(now)
        watcher.gone_at = math.inf
        return True

    def _make_room(self, peer: PeerId, needed: Collection[PeerId]) -> bool:
        others = [each for each in (*self._watchers, peer) if each not in needed]
        last = max(others, key=self._lot, default=peer)
        self._watchers.pop(last, None)  # it hears so when it sends its next heartbeat
        return last != peer or peer in needed

    def ended(self, peer: PeerId, now: float) -> None:
        """A stream of a watcher ended; a heartbeat on another one undoes that."""
        if watcher := self._watchers.get(peer):
            watcher.gone_at = now + REOPEN_SECONDS

    def tick(self, now: float, slept: bool) -> None:
        """Forget those that are silent for long, or whose stream ended. If this process `slept`, silence says nothing
        about them.
        """
        for watcher in self._watchers.values() if slept else ():
            watcher.detector.slept(now)
        lost = [peer for peer, each in self._watchers.items() if now >= min(each.gone_at, each.detector.due())]
        for peer in lost:
            del self._watchers[peer]
