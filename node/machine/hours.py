"""Hours of the week in which a peer may train, such as "mon-fri 18:00-08:00". Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Self

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
EXAMPLES = '"mon-fri 18:00-08:00", "sat-sun" or "22:00-06:00"'
_DAY_MINUTES = 24 * 60
_FORM = re.compile(r"(?:(?P<days>[a-z,-]+)\s*)?(?:(?P<begin>\d{1,2}:\d{2})\s*-\s*(?P<end>\d{1,2}:\d{2}))?")


@dataclass(frozen=True, slots=True)
class WeeklyHours:
    """A range of hours on some days of the week. One that passes midnight belongs to the day on which it begins."""

    days: frozenset[int]  # on which it begins, 0 for Monday
    begin: int  # minutes since midnight
    end: int  # if not later than `begin`, on the next day

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a range. Raises ValueError with one line for the user."""
        found = _FORM.fullmatch(" ".join(text.lower().split()))
        if not found or not (found["days"] or found["begin"]):
            raise ValueError(f"{text[:60]!r} is not a range of hours: write {EXAMPLES}")
        days = _days(found["days"] or "mon-sun", text)
        if not found["begin"]:
            return cls(days, 0, _DAY_MINUTES)
        return cls(days, _minutes(found["begin"], text), _minutes(found["end"], text))

    def contains(self, local: datetime) -> bool:
        today, now = local.weekday(), 60 * local.hour + local.minute
        if self.begin < self.end:
            return today in self.days and self.begin <= now < self.end
        yesterday = (today - 1) % 7
        return (today in self.days and now >= self.begin) or (yesterday in self.days and now < self.end)


def _days(text: str, whole: str) -> frozenset[int]:
    days: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if first not in DAYS or (dash and last not in DAYS):
            raise ValueError(f"{whole[:60]!r}: {part!r} does not name days: write {', '.join(DAYS)}, or {EXAMPLES}")
        begin, end = DAYS.index(first), DAYS.index(last if dash else first)
        days.update(each % 7 for each in range(begin, end + 1 if end >= begin else end + 8))
    return frozenset(days)


def _minutes(text: str, whole: str) -> int:
    hours, minutes = map(int, text.split(":"))
    if hours > 24 or minutes > 59 or 60 * hours + minutes > _DAY_MINUTES:
        raise ValueError(f"{whole[:60]!r}: {text} is not a time of day")
    return 60 * hours + minutes
