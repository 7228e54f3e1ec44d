"""Decides from a machine's readings whether its peer should work, rest or be away. Pure: the time is an argument.

Each rule has a delay before it begins to hold and one before it ends, so that a short change does not pause the peer.
The hours in which a peer may train are ranges such as "mon-fri 18:00-08:00".
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple, Self

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


LEAST_MEMORY_BYTES, LEAST_MEMORY_SHARE = 300e6, 0.05
"""The memory rule holds if less than the larger of the two is available."""
MEMORY_PRESSURE_PERCENT = 10.0
"""The memory rule holds if processes waited for memory for a larger share of the last ten seconds."""
INPUT_SECONDS = 15.0  # A computer is in use if its keyboard or mouse moved within this time
BUSY_SHARE = 0.25
COOLER_CELSIUS = 5.0


class Mode(StrEnum):
    """What the peer should do, the least first."""

    WORK = "work"
    REST = "rest"
    AWAY = "away"


class Wish(NamedTuple):
    """What the machine wishes."""

    mode: Mode
    cause: str = ""  # as in "paused: on battery"
    is_firm: bool = False  # whether it also holds after the user asked the peer to resume


WORK = Wish(Mode.WORK)


@dataclass(frozen=True, slots=True)
class MachineReadings:
    """Readings of one moment. None or nan: this machine cannot tell."""

    local: datetime
    on_battery: bool | None = None
    memory_available_bytes: float = math.nan
    memory_bytes: float = math.nan
    memory_pressure_percent: float = math.nan  # share of the last 10 s in which some process waited for memory
    temperature_celsius: float = math.nan  # of the sensor that is closest to its limit
    high_celsius: float = math.nan
    input_idle_seconds: float = math.nan
    others_share: float = math.nan  # share of all cores that other programs keep busy
    is_metered: bool | None = None
    quota_is_spent: bool = False


@dataclass(frozen=True, slots=True)
class MachineRules:
    """Which rules hold on this machine. Memory, battery and a metered network make it leave, the rest makes it rest."""

    hours: tuple[WeeklyHours, ...] = ()  # empty: it may always work
    battery: bool = True
    metered: bool = True
    memory: bool = True
    heat: bool = True
    in_use: bool = False
    busy: bool = False


class Debounce:
    """A condition that begins to hold, and ends, only after it was seen for a while."""

    def __init__(self, on_seconds: float, off_seconds: float) -> None:
        self._delays = {True: on_seconds, False: off_seconds}
        self._changed_at: float | None = None
        self.holds = False

    def see(self, seen: bool, now: float) -> bool:
        if seen == self.holds:
            self._changed_at = None
        else:
            self._changed_at = now if self._changed_at is None else self._changed_at
            if now - self._changed_at >= self._delays[seen]:
                self.holds, self._changed_at = seen, None
        return self.holds


class MachinePolicy:
    """Applies the rules to one reading after another."""

    def __init__(self, rules: MachineRules) -> None:
        self._rules = rules
        self._memory, self._heat = Debounce(0, 300), Debounce(0, 30)
        self._battery, self._metered = Debounce(55, 60), Debounce(10, 60)
        self._in_use, self._busy = Debounce(10, 300), Debounce(20, 300)

    def decide(self, readings: MachineReadings, now: float) -> Wish:
        """The machine's wish, `now` being in seconds of a clock that does not jump."""
        rules = self._rules
        memory = self._memory.see(rules.memory and _is_short_of_memory(readings), now)
        heat = self._heat.see(rules.heat and self._is_hot(readings), now)
        battery = self._battery.see(rules.battery and readings.on_battery is True, now)
        metered = self._metered.see(rules.metered and readings.is_metered is True, now)
        in_use = self._in_use.see(rules.in_use and readings.input_idle_seconds < INPUT_SECONDS, now)
        busy = self._busy.see(rules.busy and readings.others_share > BUSY_SHARE, now)
        outside = bool(rules.hours) and not any(each.contains(readings.local) for each in rules.hours)
        candidates = (
            (memory, Wish(Mode.AWAY, "this machine is short of memory", is_firm=True)),
            (readings.quota_is_spent, Wish(Mode.AWAY, "this period's bytes are used up", is_firm=True)),
            (battery, Wish(Mode.AWAY, "on battery")),
            (metered, Wish(Mode.AWAY, "the network is metered")),
            (outside, Wish(Mode.AWAY, "outside the hours that you gave")),
            (heat, Wish(Mode.REST, "this machine is hot", is_firm=True)),
            (in_use, Wish(Mode.REST, "you are using the computer")),
            (busy, Wish(Mode.REST, "other programs are busy")),
        )
        return next((wish for holds, wish in candidates if holds), WORK)

    def _is_hot(self, readings: MachineReadings) -> bool:
        limit = readings.high_celsius - (COOLER_CELSIUS if self._heat.holds else 0.0)
        return readings.temperature_celsius >= limit


def _is_short_of_memory(readings: MachineReadings) -> bool:
    least = max(LEAST_MEMORY_BYTES, LEAST_MEMORY_SHARE * readings.memory_bytes)
    return readings.memory_available_bytes < least or readings.memory_pressure_percent > MEMORY_PRESSURE_PERCENT
