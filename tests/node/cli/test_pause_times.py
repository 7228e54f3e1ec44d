"""Times that a user gives to `pause`."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

import pytest

from node.cli.remote import CommandError, end_of_pause
from tests.support.refusals import one_line

NOW = datetime(2026, 3, 5, 17, 30, 20)


@pytest.mark.parametrize(
    ("duration", "until", "after"),
    [
        ("45m", None, timedelta(minutes=45)),
        ("1h30m", None, timedelta(minutes=90)),
        ("2d", None, timedelta(days=2)),
        ("90S", None, timedelta(seconds=90)),
        (None, "18:00", timedelta(minutes=29, seconds=40)),
        (None, "17:30", timedelta(days=1, seconds=-20)),
    ],
)
def test_end_of_pause_is_ahead(duration: str | None, until: str | None, after: timedelta) -> None:
    assert end_of_pause(duration, until, NOW) == (NOW + after).timestamp()


def test_no_time_means_no_end() -> None:
    assert end_of_pause(None, None, NOW) is None


@pytest.mark.parametrize(
    ("duration", "until"),
    [("1h", "18:00"), ("", None), ("0m", None), ("h", None), ("1x", None), ("-1h", None), ("99999d", None),
     (None, "25:00"), (None, "18"), (None, "")],
)  # fmt: skip
def test_wrong_times_get_one_line(duration: str | None, until: str | None) -> None:
    line = one_line(CommandError, end_of_pause, duration, until, NOW)
    assert "is not a duration; try" in line or "is not a time; try" in line or "give one of them" in line


def test_length_holds_over_the_end_of_summer_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        evening = datetime(2026, 10, 24, 23)
        assert end_of_pause("8h", None, evening) == evening.timestamp() + 8 * 3600
    finally:
        monkeypatch.undo()
        time.tzset()
