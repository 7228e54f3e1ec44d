"""Detects from two clocks that this machine slept, that the process was stopped, or that the clock is wrong. No I/O.

While a machine sleeps, its monotonic clock stands still and its wall clock continues. While a process is stopped, both
continue, and its next tick is late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

STOPPED_SECONDS = 2.0
"""A tick later than this shows that the process did not run for a while."""
ASLEEP_SECONDS = 10.0
"""After this long, other peers suspect this one, and routers may have dropped its connections."""
JUMP_SECONDS = 5.0
"""Change of the wall clock against the monotonic clock that counts as a jump."""
SKEW_SECONDS = 5.0
"""A smaller difference between two peers' clocks is ignored."""


@dataclass(frozen=True, slots=True)
class TimeJump:
    """An interruption between two ticks."""

    seconds: float
    line: str = ""


class SuspendDetector:
    def __init__(self) -> None:
        self._due: float | None = None
        self._ahead = 0.0  # wall clock minus monotonic clock

    def tick(self, now: float, wall: float, next_seconds: float) -> TimeJump | None:
        """Note a tick at these times of both clocks; returns the interruption before it, or None."""
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


_ANEW = "it greets all peers again, and suspects none of them for that time"


def skew(offsets: Sequence[float], limit_seconds: float) -> str:
    """User-facing line if this machine's clock differs from the other peers'; else empty.

    `offsets`: how far each other peer's wall clock is ahead. `limit_seconds`: what the directory can correct.
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
