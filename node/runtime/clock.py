"""Wall time, for the expiry of records and log timestamps, and a stopwatch. Deadlines use the event loop's clock."""

from __future__ import annotations

import time


class WallClock:
    def wall(self) -> float:
        return time.time()


def monotonic_seconds() -> float:
    return time.perf_counter()
