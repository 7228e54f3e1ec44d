"""Notices when this peer's machine slept, when its clock is wrong, and when its addresses change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from node.membership.suspend_detector import SuspendDetector, TimeJump, skew
from protocols.base import Clock

log = logging.getLogger(__name__)

ADDRESSES_SECONDS = 2.0
SKEW_SECONDS = 10.0
MAX_OFFSET_SECONDS = 600.0


class HostMonitor:
    """Checks clock and addresses of this machine at each tick."""

    def __init__(
        self, clock: Clock, addresses: Callable[[], Sequence[str]], say: Callable[[str], None] = log.warning
    ) -> None:
        self._say = say
        self.clock = ""  # user-facing line while this machine's clock differs from the other peers'
        self.announce_again = asyncio.Event()  # cleared by the code that announces this peer's addresses
        self._wall, self._addresses = clock, addresses
        self._ticks = SuspendDetector()
        self._known: frozenset[str] = frozenset()
        self._skewed = ""
        self._looked = self._compared = 0.0

    def tick(self, now: float, next_seconds: float, offsets: Callable[[], Iterable[float]]) -> TimeJump | None:
        """Check the machine; returns what happened since the last tick. If that has a line, greet all peers again.

        `offsets` returns how far the other peers' wall clocks are ahead of this one, in seconds.
        """
        gap = self._ticks.tick(now, self._wall.wall(), next_seconds)
        if gap is None and now - self._looked >= ADDRESSES_SECONDS:
            self._looked, gap = now, self._moved()
        if now - self._compared >= SKEW_SECONDS:
            self._compared = now
            self._compare(sorted(offsets()))
        if gap and gap.line:
            self._say(gap.line)
            self.announce_again.set()
        return gap

    def _moved(self) -> TimeJump | None:
        before, here = self._known, frozenset(self._addresses())
        self._known = here or before  # while p2pd is down there are none
        if not before or not here or here == before:
            return None
        now = ", ".join(sorted(here)[:2])
        return TimeJump(0.0, f"this machine's addresses have changed (now {now}): all peers get the new ones")

    def _compare(self, offsets: Sequence[float]) -> None:
        """Report a skew that was seen twice in a row: after a suspend, a delayed echo shows a wrong skew once."""
        if not offsets:
            return
        before, self._skewed = self._skewed, skew(offsets, MAX_OFFSET_SECONDS)
        if bool(before) == bool(self._skewed) == (not self.clock):
            self._say(self._skewed or "this machine's clock is the one that the others have again")
        if bool(before) == bool(self._skewed):
            self.clock = self._skewed
