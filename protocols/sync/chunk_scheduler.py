"""Which chunks of a download are missing, and which donor is sending which. No I/O.

All donors take chunks from one queue, so a fast donor sends more than a slow one. Once the queue is empty, an idle
donor is asked for chunks that another is slow to send, so that the slowest donor does not delay the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable

from protocols.estimates import ewma

MAX_REQUESTED_CHUNKS = 8
"""Limit of chunks requested from one donor ahead of what it has sent."""
AHEAD_SECONDS = 1.0
"""A donor is asked for as many chunks as it sends in this time. This covers a round trip, and leaves a slow donor few.
"""
CRAWL_SECONDS = 4.0
"""A donor that takes this long for a chunk is asked for one at a time."""
SLOW_SECONDS = 5.0
"""After this time, a chunk requested from one donor may also be requested from another one of unknown rate."""
IMPATIENCE = 3.0
"""The same for a donor of known rate, as a multiple of the time that it takes for a chunk."""


class DonorRate:
    """How long one donor takes for a chunk, while it has requests to answer."""

    def __init__(self) -> None:
        self.seconds: float | None = None

    def took(self, seconds: float) -> None:
        """Record the time of another chunk."""
        self.seconds = seconds if self.seconds is None else ewma(self.seconds, seconds, 1 / 4)

    @property
    def window(self) -> int:
        """How many chunks to request ahead."""
        if self.seconds is None:
            return 2
        least = 1 if self.seconds > CRAWL_SECONDS else 2
        return max(least, min(MAX_REQUESTED_CHUNKS, 1 + int(AHEAD_SECONDS / max(self.seconds, 1e-3))))

    @property
    def patience_seconds(self) -> float:
        """Age at which a chunk requested from another donor may also be requested from this one."""
        return SLOW_SECONDS if self.seconds is None else max(1.0, IMPATIENCE * self.seconds)


class ChunkScheduler:
    """Assigns the missing chunks of one download to donors.

    Attributes:
        missing: chunks that have not arrived.
    """

    def __init__(self, missing: Iterable[int], now: Callable[[], float]) -> None:
        self.missing = set(missing)
        self._now = now
        self._queue = deque(sorted(self.missing))
        self._asked: dict[int, list[float]] = {}  # chunk -> when it was requested, for each donor that is sending it

    def share(self, donors: int) -> int:
        """Limit of chunks to request ahead from one of this many donors, so that none gets most of the rest."""
        return max(2, -(-len(self._queue) // max(1, donors)))

    def next(self, mine: Collection[int], patience_seconds: float) -> int | None:
        """The next chunk for one donor: one that no donor was asked for, or only one other donor, long ago.

        Args:
            mine: chunks that this donor was asked for.
            patience_seconds: how long ago the other donor must have been asked.
        """
        if self._queue:
            return self._queue[0]
        late = self._now() - patience_seconds
        slow = (index for index, asked in self._asked.items() if len(asked) == 1 and asked[0] <= late)
        return next((index for index in slow if index in self.missing and index not in mine), None)

    def claim(self, mine: Collection[int], patience_seconds: float) -> int | None:
        """Like `next`, and mark the chunk as requested."""
        index = self.next(mine, patience_seconds)
        if index is not None:
            if self._queue:
                self._queue.popleft()
            self._asked.setdefault(index, []).append(self._now())
        return index

    def release(self, index: int) -> None:
        """Note that a donor will not send the chunk any more. Unless another donor sends it, it is queued again."""
        self._asked[index].pop()
        if not self._asked[index]:
            del self._asked[index]
            if index in self.missing:
                self._queue.append(index)
