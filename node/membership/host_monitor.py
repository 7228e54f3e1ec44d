"""Notices when this peer's machine slept, when its clock is wrong, and when its addresses change. No I/O.

While a machine sleeps, its monotonic clock stands still and its wall clock continues. While a process is stopped, both
continue, and its next tick is late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from node.network.address_scope import has_moved, undialled
from protocols.base import Clock

log = logging.getLogger(__name__)

ADDRESSES_SECONDS = 2.0
COMPARE_SECONDS = 10.0
MAX_OFFSET_SECONDS = 600.0
STOPPED_SECONDS = 2.0  # a tick later than this shows that the process did not run for a while
ASLEEP_SECONDS = 10.0  # after this long, other peers suspect this one, and routers may have dropped its connections
JUMP_SECONDS = 5.0  # change of the wall clock against the monotonic clock that counts as a jump
IGNORED_SKEW_SECONDS = 5.0  # a smaller difference between two peers' clocks is ignored


@dataclass(frozen=True, slots=True)
class TimeJump:
    seconds: float
    line: str = ""
    anew: bool = False  # this peer has to greet all peers again
    doubtful: bool = True  # connections may be dead


class SuspendDetector:
    def __init__(self) -> None:
        self._due: float | None = None
        self._ahead = 0.0  # wall clock minus monotonic clock

    def tick(self, now: float, wall: float, next_seconds: float) -> TimeJump | None:
        """Note a tick at these times of both clocks; returns the interruption before it."""
        first, late, jump = self._due is None, now - (self._due or now), wall - now - self._ahead
        self._due, self._ahead = now + next_seconds, wall - now
        if first:
            return None
        if jump >= JUMP_SECONDS:
            line = f"this machine slept for {_long(jump + late)}, or its clock was set: {_ANEW}"
            return TimeJump(jump + late, line, anew=True)
        if jump <= -JUMP_SECONDS:
            return TimeJump(-jump, f"this machine's clock was set back by {_long(-jump)}: {_ANEW}", anew=True)
        if late >= ASLEEP_SECONDS:
            return TimeJump(late, f"this peer was stopped for {_long(late)}: {_ANEW}", anew=True)
        return TimeJump(late) if late > STOPPED_SECONDS else None


_ANEW = "it greets all peers again, and suspects none of them for that time"


def skew(offsets: Sequence[float], limit_seconds: float) -> str:
    """User-facing line if this machine's clock differs from the others', which are ahead by `offsets`; else empty."""
    if not offsets or abs(off := median(offsets)) < IGNORED_SKEW_SECONDS:
        return ""
    much, way = _long(abs(off)), "behind" if off > 0 else "ahead of"
    agree = sum(abs(each - off) < IGNORED_SKEW_SECONDS for each in offsets)
    whose = f"that of {agree} of {len(offsets)} other peers"
    if len(offsets) == 1:
        whose = "the only other peer's, and one of the two is wrong"
    elif agree <= len(offsets) / 2:
        whose = "the other peers', which do not agree either"
    what = f"this machine's clock is {much} {way} {whose}"
    if abs(off) > limit_seconds:
        what += ", too far to be made up for: others do not find this peer in the directory"
    return f"{what}; set it by the network (timedatectl set-ntp true, or chrony)"


def _long(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class HostMonitor:
    def __init__(
        self, clock: Clock, addresses: Callable[[], Sequence[str]], say: Callable[[str], None] = log.warning
    ) -> None:
        self._say = say
        self.clock = ""  # user-facing line while this machine's clock differs from the other peers'
        self.announce_again = asyncio.Event()  # cleared by the code that announces this peer's addresses
        self._wall, self._addresses = clock, addresses
        self._ticks = SuspendDetector()
        self._known: frozenset[str] = frozenset()
        self._undialled = False  # whether the line that others cannot dial this peer was said
        self._skewed = ""
        self._looked = self._compared = 0.0

    def tick(self, now: float, next_seconds: float, offsets: Callable[[], Iterable[float]]) -> TimeJump | None:
        """What happened since the last tick. `offsets` as for `skew`."""
        gap = self._ticks.tick(now, self._wall.wall(), next_seconds)
        if gap is None and now - self._looked >= ADDRESSES_SECONDS:
            self._looked, gap = now, self._moved()
        if now - self._compared >= COMPARE_SECONDS:
            self._compared = now
            self._compare(sorted(offsets()))
        if gap and gap.line:
            self._say(gap.line)
        if gap and gap.anew:
            self.announce_again.set()
        return gap

    def _moved(self) -> TimeJump | None:
        before, here = self._known, frozenset(self._addresses())
        self._known = here or before  # while p2pd is down there are none
        if not here or here == before:
            return None
        if undialled({*before, *here}) and not has_moved(before or here, here):
            line = "" if self._undialled else undialled(here)
            self._undialled = self._undialled or bool(line)
            return TimeJump(0.0, line, anew=bool(before), doubtful=False)
        if not before:
            return None
        now = ", ".join(sorted(here)[:2])
        line = f"this machine's addresses have changed (now {now}): all peers get the new ones"
        return TimeJump(0.0, line, anew=True)

    def _compare(self, offsets: Sequence[float]) -> None:
        """Report a skew that was seen twice in a row: after a suspend, a delayed echo shows a wrong skew once."""
        if not offsets:
            return
        before, self._skewed = self._skewed, skew(offsets, MAX_OFFSET_SECONDS)
        if bool(before) == bool(self._skewed) == (not self.clock):
            self._say(self._skewed or "this machine's clock is back in sync with the others'")
        if bool(before) == bool(self._skewed):
            self.clock = self._skewed
