"""A quota of bytes for each day, week or month, which survives a crash.

What is stored is not what was used, but a little more: the bytes that may be used until the next write. So a process
that is killed has used at most what its file says, and the quota is not exceeded because of kills.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import datetime, timedelta

from node.config.sizes import megabytes

RESERVE_BYTES = 64 << 20
WARN_SHARE = 0.9
_RESERVE_SHARE, _MARGIN_SHARE = 0.05, 0.1


class QuotaDamaged(Exception):
    """The stored counts cannot be read."""


def period_name(period: str, wall_seconds: float) -> str:
    """The name of the period that this time is in, local time; later periods have names that sort later."""
    now = datetime.fromtimestamp(wall_seconds)
    return {"day": now.strftime("%Y-%m-%d"), "week": now.strftime("%G-W%V"), "month": now.strftime("%Y-%m")}[period]


def period_end(period: str, wall_seconds: float) -> datetime:
    today = datetime.fromtimestamp(wall_seconds).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        return today + timedelta(days=1)
    if period == "week":
        return today + timedelta(days=7 - today.weekday())
    return (today.replace(day=1) + timedelta(days=32)).replace(day=1)


class ByteQuota:
    """Counts the bytes of a period, in both directions together."""

    def __init__(self, limit_bytes: int, period: str, wall: Callable[[], float]) -> None:
        self.limit_bytes, self.period = limit_bytes, period
        self.used_bytes = 0  # in the present period, or a little more after a crash
        self.margin_bytes = 0  # what a last round may take: the quota counts as exhausted that much earlier
        self.changed = asyncio.Event()  # the counts should be stored
        self.used_up = asyncio.Event()  # from when `exhausted` is seen to when the period turns
        self._wall = wall
        self._name = period_name(period, wall())
        self._reserved = 0
        self._reserve = min(RESERVE_BYTES, int(_RESERVE_SHARE * limit_bytes))
        self._on_exhausted: Callable[[], None] = lambda: None
        self._on_warning: Callable[[], None] = lambda: None
        self._warned = self._told = False

    def listen(self, on_warning: Callable[[], None], on_exhausted: Callable[[], None]) -> None:
        """Have these called once in a period: at 90 % of the quota, and when it is exhausted."""
        self._on_warning, self._on_exhausted = on_warning, on_exhausted

    @property
    def exhausted(self) -> bool:
        """Whether no further round should begin."""
        margin = min(self.margin_bytes, int(_MARGIN_SHARE * self.limit_bytes))
        return self.used_bytes + margin >= self.limit_bytes

    @property
    def spent(self) -> bool:
        """Whether no bulk data may move any more."""
        return self.used_bytes >= self.limit_bytes

    def count(self, count: int) -> None:
        self.used_bytes += count
        if self.used_bytes > self._reserved - self._reserve // 2:
            self.changed.set()
        if not self._warned and self.used_bytes >= WARN_SHARE * self.limit_bytes:
            self._warned = True
            self._on_warning()
        if not self._told and self.exhausted:
            self._told = True
            self.used_up.set()
            self._on_exhausted()

    def turn(self) -> bool:
        """Begin a new period if it is time; returns whether one began. A clock that is set back begins none."""
        name = period_name(self.period, self._wall())
        if name <= self._name:
            return False
        self._name, self.used_bytes, self._reserved, self._warned, self._told = name, 0, 0, False, False
        self.used_up.clear()
        self.changed.set()
        return True

    def load(self, stored: bytes) -> None:
        """Take the counts that `store` or `final` returned before a restart; b"" if there are none."""
        if not stored:
            return
        try:
            found = json.loads(stored)
            period, name, used = str(found["period"]), str(found["name"]), int(found["used_bytes"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise QuotaDamaged("it is not what a peer writes") from None
        if period == self.period and name >= self._name:
            self._name, self.used_bytes = name, max(0, used)

    def store(self) -> bytes:
        """What to store now, before more bytes pass: the bytes used, and a reserve."""
        self.changed.clear()
        self._reserved = self.used_bytes + self._reserve
        return self._packed(self._reserved)

    def final(self) -> bytes:
        return self._packed(self.used_bytes)

    def _packed(self, used_bytes: int) -> bytes:
        return json.dumps({"period": self.period, "name": self._name, "used_bytes": used_bytes}).encode() + b"\n"

    def describe(self) -> str:
        return f"{megabytes(self.used_bytes)} of {megabytes(self.limit_bytes)} used this {self.period}"

    def until(self) -> str:
        return f"{period_end(self.period, self._wall()):%d %B}".lstrip("0")
