"""What this machine's own clocks tell of it: that it slept, was stopped, or shows another time than others do. Pure.

While a machine sleeps, its monotonic clock stands still and its wall clock goes on; for a process that is stopped both
go on, and it comes late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

STOPPED_SECONDS = 2.0
"""A tick that is so late shows that nobody looked for a while."""
ASLEEP_SECONDS = 10.0
"""After so long others have given us up, and routers may have forgotten our connections."""
JUMP_SECONDS = 5.0
"""Of the wall clock, against the monotonic one."""
SKEW_SECONDS = 5.0
"""Clocks that differ by less are right enough."""


@dataclass(frozen=True, slots=True)
class TimeJump:
    """What lay between two ticks.

    Attributes:
        seconds: that nobody looked, or that the wall clock jumped by.
        line: for a person; empty where it was short, and nothing has to be begun anew.
    """

    seconds: float
    line: str = ""


class SuspendDetector:
    """The time between ticks, as two clocks have it."""

    def __init__(self) -> None:
        self._due: float | None = None
        self._ahead = 0.0  # of the wall clock, before the monotonic one

    def tick(self, now: float, wall: float, next_seconds: float) -> TimeJump | None:
        """A tick comes; what it shows, if it shows anything.

        Args:
            now: seconds of the monotonic clock.
            wall: of the wall clock.
            next_seconds: until the next tick is due.
        """
        first, late, jump = self._due is None, now - (self._due or now), wall - now - self._ahead
        self._due, self._ahead = now + next_seconds, wall - now
        if first:
            return None
        if jump >= JUMP_SECONDS:
            return TimeJump(jump + late, f"this machine slept for {_long(jump + late)}, or its clock was set: {_ANEW}")
        if jump <= -JUMP_SECONDS:
            return TimeJump(-jump, f"this machine's clock was set back by {_long(-jump)}: {_ANEW}")
        if late >= ASLEEP_SECONDS:
            return TimeJump(late, f"this peer was stopped for {_long(late)}: {_ANEW}")
        return TimeJump(late) if late > STOPPED_SECONDS else None


_ANEW = "it meets everybody anew, and suspects nobody for that time"


def skew(offsets: Sequence[float], limit_seconds: float) -> str:
    """One line for a person if this machine's clock is not the one that the others have; empty if it is.

    Args:
        offsets: how far each of the others' wall clocks is ahead of ours.
        limit_seconds: what the directory can make up for.
    """
    if not offsets or abs(off := median(offsets)) < SKEW_SECONDS:
        return ""
    much, way = _long(abs(off)), "behind" if off > 0 else "ahead of"
    agree = sum(abs(each - off) < SKEW_SECONDS for each in offsets)
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
