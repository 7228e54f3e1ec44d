"""Wall time: record expiry and log stamps only. Deadlines belong to the event loop."""

from __future__ import annotations

import time


class WallClock:
    """`protocols.base.Clock`."""

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()
