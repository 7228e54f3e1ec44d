"""Which chunks of a download are missing, and which holder is sending which. No I/O.

All holders take chunks from one queue, so a fast holder sends more than a slow one. Once the queue is empty, an idle
holder is asked for chunks that another has been slow to send, or will be by its rate. So the slowest holder does not
delay the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from protocols.base import CHUNK_BYTES
from protocols.peers.estimates import ewma

MAX_REQUESTED_CHUNKS = 32
"""Limit of chunks requested from one holder ahead of what it has sent: 2.5 Gbit/s for a round trip of .1 s."""
AHEAD_SECONDS = 1.0
"""A holder is asked for as many chunks as it sends in this time: enough for a round trip, and few for a slow holder."""
FIRST_BYTES = 1 << 16
"""A holder is asked for so much at least, so that small chunks do not take a round trip each."""
PIECE_BYTES, FAST_PIECE_BYTES = 1 << 16, 1 << 18
"""A chunk is received in such pieces, each of which has a time limit; in larger ones from a holder that is fast."""
FAST_SECONDS = 1.0  # a holder that takes less than this for a chunk is fast
CRAWL_SECONDS = 4.0  # a holder that takes this long for a chunk is asked for one at a time
SLOW_SECONDS = 5.0
"""After this time, a chunk requested from one holder may also be requested from another one of unknown rate."""
IMPATIENCE = 3.0
"""The same for a holder of known rate, as a multiple of the time that it takes for a chunk.

It may be asked at once if the other holder, by its own rate, needs more than this multiple of the time.
"""


class HolderRate:
    """How long one holder takes for a chunk, while it has requests to answer. No chunk is larger than `chunk_bytes`."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.seconds: float | None = None
        self._first = max(2, min(MAX_REQUESTED_CHUNKS, FIRST_BYTES // max(1, chunk_bytes)))

    def record_time(self, seconds: float) -> None:
        self.seconds = seconds if self.seconds is None else ewma(self.seconds, seconds, 1 / 4)

    @property
    def least(self) -> int:
        return 1 if self.seconds is not None and self.seconds > CRAWL_SECONDS else self._first

    @property
    def window(self) -> int:
        """Chunks to request ahead; of a holder of unknown rate, few."""
        if self.seconds is None:
            return self.least
        return max(self.least, min(MAX_REQUESTED_CHUNKS, 1 + int(AHEAD_SECONDS / max(self.seconds, 1e-3))))

    @property
    def piece_bytes(self) -> int:
        """How much of a chunk to receive within one time limit."""
        return FAST_PIECE_BYTES if self.seconds is not None and self.seconds < FAST_SECONDS else PIECE_BYTES

    @property
    def patience_seconds(self) -> float:
        """Age at which a chunk requested from another holder may also be requested from this one."""
        return SLOW_SECONDS if self.seconds is None else max(1.0, IMPATIENCE * self.seconds)


@dataclass(frozen=True, slots=True)
class _Request:
    """When a holder was asked for a chunk, and when it should have sent it by its rate; None if that is not known."""

    asked: float
    due: float | None


class ChunkScheduler:
    """Assigns the chunks of one download that have not arrived, `missing`, to holders."""

    def __init__(self, missing: Iterable[int], now: Callable[[], float]) -> None:
        self.missing = set(missing)
        self._now = now
        self._queue = deque(sorted(self.missing))
        self._requests: dict[int, dict[HolderRate, _Request]] = {}  # chunk -> for each holder that is sending it
        self._arrived: set[int] = set()  # those of them that are being verified

    def share(self, holders: int) -> int:
        """Limit of chunks to request ahead from one of this many holders, so that none gets most of the rest."""
        return max(2, -(-len(self._queue) // max(1, holders)))

    def next(self, rate: HolderRate, ahead: int = 0) -> int | None:
        """The next chunk for one holder: one that no holder was asked for, or only one other holder, which is slow.

        `rate` also stands for the holder: each has one of its own. `ahead` chunks it was asked for and has not sent.
        """
        if self._queue:
            return self._queue[0]
        others, now = self._others(rate), self._now()
        for index, request in others.items():
            if request.asked + rate.patience_seconds <= now:
                return index
        return self._slowest(others, rate, ahead + 1)

    def next_at(self, rate: HolderRate) -> float:
        """When `next` may return another holder's chunk because of its age, if nothing else changes."""
        asked = min((request.asked for request in self._others(rate).values()), default=float("inf"))
        return asked + rate.patience_seconds

    def _others(self, rate: HolderRate) -> dict[int, _Request]:
        """The missing chunks that exactly one other holder is sending."""
        return {
            index: next(iter(requests.values()))
            for index, requests in self._requests.items()
            if len(requests) == 1 and rate not in requests and index in self.missing and index not in self._arrived
        }

    def _slowest(self, others: dict[int, _Request], rate: HolderRate, turn: int) -> int | None:
        """The chunk that comes last by the other holders' rates, if this one sends it far earlier as its next."""
        known = {index: request.due for index, request in others.items() if request.due is not None}
        last = max(known, key=lambda index: known[index], default=None)
        if last is None or rate.seconds is None:
            return None
        return last if known[last] - self._now() > IMPATIENCE * turn * rate.seconds else None

    def claim(self, rate: HolderRate, ahead: int = 0) -> int | None:
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
        """A holder has sent the chunk, which is now verified: until `release`, no holder needs to be asked."""
        self._arrived.add(index)

    def release(self, index: int, rate: HolderRate) -> None:
        """Note that a holder will not send the chunk any more. Unless another holder sends it, it is queued again."""
        del self._requests[index][rate]
        self._arrived.discard(index)
        if not self._requests[index]:
            del self._requests[index]
            if index in self.missing:
                self._queue.append(index)
