"""Wall time, for the expiry of records and log timestamps, and a stopwatch. Deadlines use the event loop's clock."""

from __future__ import annotations

import time


class WallClock:
    """`protocols.base.Clock` over this machine's wall clock."""

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()


def monotonic_seconds() -> float:
    """A clock that never goes back, for measuring how long a computation takes outside the event loop."""
    return time.perf_counter()
