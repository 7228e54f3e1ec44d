"""Caps on the bytes per second of all streams together: a token bucket for each direction, and who is served first.

Small control messages never wait. They put the bucket into debt, which bulk data pays off by waiting longer: up to a
limit, so that no flood of them stops bulk data for long. Of bulk data, that of rounds goes first. Data for peers that
catch up gets what is left, and at least one piece in sixteen. Large control messages, and all messages of strangers,
pass at once while an allowance lasts. Then they wait like data for peers that catch up.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable

from node.streams.byte_meter import TrafficClass
from protocols.aio import loop_time

PIECE_BYTES = 64 << 10  # bytes that a stream may move in one turn
BURST_SECONDS = 0.05
"""An idle bucket fills up to one piece, or to what this time brings if that is more: timers are late by some ms."""
_LEAST_SECONDS = 0.001  # timers are no finer
SMALL_BYTES = 4 << 10  # messages up to this size do not wait either, since others wait for the answers to them
MAX_SMALL_DEBT_SECONDS = 1.0
"""They do wait while the bucket's debt is larger than this, so that no flood of them gets around the cap."""
MAX_DEBT_SECONDS = 5.0
"""The bucket's debt is never larger. What control traffic sends beyond that is not made up for."""
ALLOWANCE_BYTES = 320 << 10
"""What large control messages and strangers may send at once: as much as a joiner gets when it asks about the run."""
_ALLOWANCE_SHARE = 1 / 16  # the allowance is refilled at this share of the rate
CATCH_UP_EVERY = 16
"""While both wait, every 16th piece is for peers that catch up: they would fail if nothing came for half a minute."""


class TokenBucket:
    """Says when bytes may pass at a rate; None: at any. Pure: the caller passes the time.

    An idle bucket fills up to `burst_bytes`, or what `BURST_SECONDS` bring. Its debt is what `debt_seconds` bring at
    most.
    """

    def __init__(
        self, rate: float | None, now: float, burst_bytes: int = PIECE_BYTES, debt_seconds: float = MAX_DEBT_SECONDS
    ) -> None:
        self.rate = rate
        self._burst_bytes, self._debt_seconds = burst_bytes, debt_seconds
        self._at, self._balance = now, self._burst

    @property
    def _burst(self) -> float:
        return max(self._burst_bytes, (self.rate or 0.0) * BURST_SECONDS)

    def set_rate(self, rate: float | None, now: float) -> None:
        """A debt stays, to be paid at the new rate, within its limit."""
        self._refill(now)
        self.rate = rate
        self._balance = min(self._balance, self._burst)
        self.spend(0, now)

    def spend(self, count: int, now: float) -> None:
        """Take bytes out, whatever is in it; a negative `count` gives them back."""
        if self.rate is not None:
            self._refill(now)
            self._balance = max(self._balance - count, -self._debt_seconds * self.rate)

    def wait_seconds(self, now: float, debt_seconds: float = 0.0) -> float:
        """How long to wait until the debt is below what `debt_seconds` bring."""
        if self.rate is None:
            return 0.0
        self._refill(now)
        return max(0.0, -self._balance / self.rate - debt_seconds)

    def _refill(self, now: float) -> None:
        self._balance = min(self._burst, self._balance + (self.rate or 0.0) * max(0.0, now - self._at))
        self._at = now


class ByteLimiter:
    """Caps one direction. Streams wait in two queues, of rounds and of catching up: first come, first served."""

    def __init__(self, rate: float | None = None, now: Callable[[], float] = loop_time) -> None:
        self._now = now
        # Both are full. No event loop may run yet, so that there is no time to ask for.
        self._bucket = TokenBucket(rate, 0.0)
        self._allowance = TokenBucket(_allowance_rate(rate), 0.0, ALLOWANCE_BYTES, math.inf)
        self._rounds: deque[tuple[asyncio.Future[None], int]] = deque()
        self._catch_up: deque[tuple[asyncio.Future[None], int]] = deque()
        self._since_catch_up = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def rate(self) -> float | None:
        return self._bucket.rate

    def set_rate(self, rate: float | None) -> None:
        self._bucket.set_rate(rate, self._now())
        self._allowance.set_rate(_allowance_rate(rate), self._now())
        self._serve()

    async def take(self, traffic: TrafficClass, count: int, by_stranger: bool = False) -> None:
        """Spend `count` bytes, after waiting for this class's turn. If cancelled, nothing is spent."""
        if self.rate is None:
            return
        if self._passes(traffic, count, by_stranger):
            return self._bucket.spend(count, self._now())
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._rounds if traffic is TrafficClass.ROUND else self._catch_up
        queue.append((turn, count))
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came, and was paid for, just before
                self.spend(-count)
                self._serve()
            raise

    def spend(self, count: int) -> None:
        """Of bytes that have passed already."""
        if self.rate is not None:
            self._bucket.spend(count, self._now())

    def _passes(self, traffic: TrafficClass, count: int, by_stranger: bool) -> bool:
        if traffic is TrafficClass.CONTROL:
            if count <= SMALL_BYTES and not by_stranger:
                return True
            if self._allowance.wait_seconds(self._now()):
                return False
            self._allowance.spend(count, self._now())
            return True
        debt_seconds = MAX_SMALL_DEBT_SECONDS if count <= SMALL_BYTES else 0.0
        is_first = count <= SMALL_BYTES or not (self._rounds or self._catch_up)
        return is_first and not self._bucket.wait_seconds(self._now(), debt_seconds)

    def _serve(self) -> None:
        """Let pieces pass while the bucket is not in debt, then wait until it is not."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        while queue := self._next_queue():
            if seconds := self._bucket.wait_seconds(self._now()):
                self._timer = asyncio.get_running_loop().call_later(max(seconds, _LEAST_SECONDS), self._serve)
                return
            turn, count = queue.popleft()
            self._since_catch_up = 0 if queue is self._catch_up else self._since_catch_up + 1
            self._bucket.spend(count, self._now())
            turn.set_result(None)

    def _next_queue(self) -> deque[tuple[asyncio.Future[None], int]] | None:
        for queue in (self._rounds, self._catch_up):
            while queue and queue[0][0].done():  # it was cancelled
                queue.popleft()
        if self._catch_up and (not self._rounds or self._since_catch_up >= CATCH_UP_EVERY - 1):
            return self._catch_up
        return self._rounds or None


def _allowance_rate(rate: float | None) -> float | None:
    return None if rate is None else rate * _ALLOWANCE_SHARE
