"""Which chunks of a download are missing, and who is bringing which. Pure.

All donors take from one queue, so that a fast one brings more than a slow one. Once it is empty, whoever is free asks
for what another has been slow to bring, so that the slowest does not keep the end waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable

from protocols.estimates import ewma

MAX_REQUESTED_CHUNKS = 8
"""Chunks that one donor is asked for ahead of what it has brought, at most."""
AHEAD_SECONDS = 1.0
"""It is asked for as many as it brings in so long: a round trip must not stop the flow, nor a slow one hold much."""
CRAWL_SECONDS = 4.0
"""Who takes so long for a chunk is asked for one at a time."""
SLOW_SECONDS = 5.0
"""What a donor has been asked for so long ago, another of whom nothing is known may be asked for as well."""
IMPATIENCE = 3.0
"""One of whom something is known: after so many times what a chunk takes it."""


class DonorRate:
    """How long one donor takes for a chunk, while it has some to bring."""

    def __init__(self) -> None:
        self.seconds: float | None = None

    def took(self, seconds: float) -> None:
        """One more."""
        self.seconds = seconds if self.seconds is None else ewma(self.seconds, seconds, 1 / 4)

    @property
    def window(self) -> int:
        """Chunks to ask for ahead."""
        if self.seconds is None:
            return 2
        least = 1 if self.seconds > CRAWL_SECONDS else 2
        return max(least, min(MAX_REQUESTED_CHUNKS, 1 + int(AHEAD_SECONDS / max(self.seconds, 1e-3))))

    @property
    def patience_seconds(self) -> float:
        """What another was asked for so long ago, this donor may be asked for as well."""
        return SLOW_SECONDS if self.seconds is None else max(1.0, IMPATIENCE * self.seconds)


class ChunkScheduler:
    """Attributes:
    missing: chunks that are not here.
    """

    def __init__(self, missing: Iterable[int], now: Callable[[], float]) -> None:
        self.missing = set(missing)
        self._now = now
        self._queue = deque(sorted(self.missing))
        self._asked: dict[int, list[float]] = {}  # chunk -> when donors were asked who are bringing it

    def share(self, donors: int) -> int:
        """Chunks to ask one of so many donors for ahead, at most: nobody holds most of what is left at the end."""
        return max(2, -(-len(self._queue) // max(1, donors)))

    def next(self, mine: Collection[int], patience_seconds: float) -> int | None:
        """The next chunk for one donor to bring: one that nobody was asked for, or only one other, long ago."""
        if self._queue:
            return self._queue[0]
        late = self._now() - patience_seconds
        slow = (index for index, asked in self._asked.items() if len(asked) == 1 and asked[0] <= late)
        return next((index for index in slow if index in self.missing and index not in mine), None)

    def claim(self, mine: Collection[int], patience_seconds: float) -> int | None:
        """As `next`; from now on a donor is bringing it."""
        index = self.next(mine, patience_seconds)
        if index is not None:
            if self._queue:
                self._queue.popleft()
            self._asked.setdefault(index, []).append(self._now())
        return index

    def release(self, index: int) -> None:
        """A donor that was asked for it brings it no more; if nobody has, it is for the next."""
        self._asked[index].pop()
        if not self._asked[index]:
            del self._asked[index]
            if index in self.missing:
                self._queue.append(index)
