"""Times that a user gives: how long a pause lasts, or until what time of day."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from node.cli.remote import CommandError

MAX_DAYS = 365
_DURATION = re.compile(r"(?:(\d{1,5})d)?(?:(\d{1,5})h)?(?:(\d{1,5})m)?(?:(\d{1,6})s)?")


def end_of_pause(duration: str | None, until: str | None, now: datetime | None = None) -> float | None:
    """When a pause ends, in seconds since the epoch; None if neither is given.

    Args:
        duration: as `1h30m`.
        until: as `18:00`, in this machine's time zone.
        now: None for this machine's clock.

    Raises:
        CommandError: both are given, or one is no time.
    """
    if duration is not None and until is not None:
        raise CommandError("--for and --until both say when the pause ends: give one of them")
    now = now or datetime.now()
    if duration is not None:
        return now.timestamp() + _duration(duration).total_seconds()  # the local time may jump meanwhile
    return None if until is None else _time_of_day(until, now).timestamp()


def _duration(text: str) -> timedelta:
    found = _DURATION.fullmatch(text.strip().lower())
    days, hours, minutes, seconds = (int(each or 0) for each in found.groups()) if found else (0, 0, 0, 0)
    length = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if not timedelta(0) < length <= timedelta(days=MAX_DAYS):
        raise CommandError(f"--for {text!r} is not a duration; try 45m, 1h or 1h30m, at most {MAX_DAYS}d")
    return length


def _time_of_day(text: str, now: datetime) -> datetime:
    try:
        there = datetime.strptime(text.strip(), "%H:%M")
    except ValueError:
        raise CommandError(f"--until {text!r} is not a time; try 18:00") from None
    there = now.replace(hour=there.hour, minute=there.minute, second=0, microsecond=0)
    return there if there > now else there + timedelta(days=1)
