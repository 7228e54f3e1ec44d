"""Wall time, for the expiry of records and log timestamps, and a stopwatch. Deadlines use the event loop's clock."""

from __future__ import annotations

import math
import os
import time

VARIABLE = "STARLING_CLOCK_FILE"
"""Environment variable that names a file with the seconds to add to the clock. For tests of wrong clocks with real
processes."""
_MAX_BYTES = 64
_MAX_OFF_SECONDS = 1e8


class WallClock:
    """`protocols.base.Clock` over this machine's wall clock."""

    def __init__(self) -> None:
        self._file = os.environ.get(VARIABLE, "")

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time() + (self._off_seconds() if self._file else 0.0)

    def _off_seconds(self) -> float:
        """Seconds that the file says now; 0 if it cannot be read, or holds no plausible number."""
        try:
            with open(self._file, "rb") as file:
                seconds = float(file.read(_MAX_BYTES))
        except (OSError, ValueError):
            return 0.0
        return seconds if math.isfinite(seconds) and abs(seconds) <= _MAX_OFF_SECONDS else 0.0


def monotonic_seconds() -> float:
    """A clock that never goes back, for measuring how long a computation takes outside the event loop."""
    return time.perf_counter()
