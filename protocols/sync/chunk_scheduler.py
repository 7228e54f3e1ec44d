"""Which chunks of a download are missing, and which donor is sending which. No I/O.

All donors take chunks from one queue, so a fast donor sends more than a slow one. Once the queue is empty, an idle
donor is asked for chunks that another has been slow to send, or will be by its rate. So the slowest donor does not
delay the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from protocols.peers.estimates import ewma

MAX_REQUESTED_CHUNKS = 32
"""Limit of chunks requested from one donor ahead of what it has sent. They fill 2.5 Gbit/s for a round trip of .1 s."""
AHEAD_SECONDS = 1.0
"""A donor is asked for as many chunks as it sends in this time. This covers a round trip, and leaves a slow donor few.
"""
PIECE_BYTES, FAST_PIECE_BYTES = 1 << 16, 1 << 18
"""A chunk is received in such pieces, each of which has a time limit; in larger ones from a donor that is fast."""
FAST_SECONDS = 1.0
"""A donor that takes less than this for a chunk is fast."""
CRAWL_SECONDS = 4.0
"""A donor that takes this long for a chunk is asked for one at a time."""
SLOW_SECONDS = 5.0
"""After this time, a chunk requested from one donor may also be requested from another one of unknown rate."""
IMPATIENCE = 3.0
"""The same for a donor of known rate, as a multiple of the time that it takes for a chunk.

It may be asked at once if the other donor, by its own rate, needs more than this multiple of the time.
"""


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
    def piece_bytes(self) -> int:
        """How much of a chunk to receive within one time limit."""
        return FAST_PIECE_BYTES if self.seconds is not None and self.seconds < FAST_SECONDS else PIECE_BYTES

    @property
    def patience_seconds(self) -> float:
        """Age at which a chunk requested from another donor may also be requested from this one."""
        return SLOW_SECONDS if self.seconds is None else max(1.0, IMPATIENCE * self.seconds)


@dataclass(frozen=True, slots=True)
class _Request:
    """When a donor was asked for a chunk, and when it should have sent it by its rate; None if that is not known."""

    asked: float
    due: float | None


class ChunkScheduler:
    """Assigns the missing chunks of one download to donors.

    Attributes:
        missing: chunks that have not arrived.
    """

    def __init__(self, missing: Iterable[int], now: Callable[[], float]) -> None:
        self.missing = set(missing)
        self._now = now
        self._queue = deque(sorted(self.missing))
        self._requests: dict[int, dict[DonorRate, _Request]] = {}  # chunk -> for each donor that is sending it
        self._arrived: set[int] = set()  # those of them that are being verified

    def share(self, donors: int) -> int:
        """Limit of chunks to request ahead from one of this many donors, so that none gets most of the rest."""
        return max(2, -(-len(self._queue) // max(1, donors)))

    def next(self, rate: DonorRate, ahead: int = 0) -> int | None:
        """The next chunk for one donor: one that no donor was asked for, or only one other donor, which is slow.

        Args:
            rate: of this donor. It also stands for the donor: each has a `DonorRate` of its own.
            ahead: number of chunks that this donor was asked for and has not sent.
        """
        if self._queue:
            return self._queue[0]
        others, now = self._others(rate), self._now()
        for index, request in others.items():
            if request.asked + rate.patience_seconds <= now:
                return index
        return self._slowest(others, rate, ahead + 1)

    def next_at(self, rate: DonorRate) -> float:
        """When `next` may return another donor's chunk because of its age, if nothing else changes."""
        asked = min((request.asked for request in self._others(rate).values()), default=float("inf"))
        return asked + rate.patience_seconds

    def _others(self, rate: DonorRate) -> dict[int, _Request]:
        """The missing chunks that exactly one other donor is sending."""
        return {
            index: next(iter(requests.values()))
            for index, requests in self._requests.items()
            if len(requests) == 1 and rate not in requests and index in self.missing and index not in self._arrived
        }

    def _slowest(self, others: dict[int, _Request], rate: DonorRate, turn: int) -> int | None:
        """The chunk that comes last by the other donors' rates, if this donor sends it far earlier as its next one."""
        known = {index: request.due for index, request in others.items() if request.due is not None}
        last = max(known, key=lambda index: known[index], default=None)
        if last is None or rate.seconds is None:
            return None
        return last if known[last] - self._now() > IMPATIENCE * turn * rate.seconds else None

    def claim(self, rate: DonorRate, ahead: int = 0) -> int | None:
        """Like `next`, and mark the chunk as requested."""
        index = self.next(rate, ahead)
        if index is not None:
            if self._queue:
                self._queue.popleft()
            now = self._now()
            due = None if rate.seconds is None else now + (ahead + 1) * rate.seconds
            self._requests.setdefault(index, {})[rate] = _Request(now, due)
        return index

    def arrived(self, index: int) -> None:
        """Note that a donor has sent the chunk, which is now verified: until `release`, no donor needs to be asked."""
        self._arrived.add(index)

    def release(self, index: int, rate: DonorRate) -> None:
        """Note that a donor will not send the chunk any more. Unless another donor sends it, it is queued again."""
        del self._requests[index][rate]
        self._arrived.discard(index)
        if not self._requests[index]:
            del self._requests[index]
            if index in self.missing:
                self._queue.append(index)
