"""When a machine pauses its peer: delays, priorities, unknown readings, hours across midnight."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.machine.rules import WORK, MachinePolicy, MachineReadings, MachineRules, Mode, WeeklyHours

MONDAY = datetime(2026, 11, 23, 12, 0)
CALM = MachineReadings(MONDAY, False, 8e9, 16e9, 0.0, 50.0, 90.0, 900.0, 0.0, False)
ALL = MachineRules(in_use=True, busy=True)
CASES: dict[str, tuple[dict[str, Any], Mode, str, float, float]] = {
    "battery": ({"on_battery": True}, Mode.AWAY, "on battery", 55, 60),
    "memory": ({"memory_available_bytes": 2e8}, Mode.AWAY, "short of memory", 0, 300),
    "pressure": ({"memory_pressure_percent": 30.0}, Mode.AWAY, "short of memory", 0, 300),
    "metered": ({"is_metered": True}, Mode.AWAY, "metered", 10, 60),
    "input": ({"input_idle_seconds": 1.0}, Mode.REST, "using the computer", 10, 300),
    "busy": ({"others_share": 0.5}, Mode.REST, "other programs", 20, 300),
    "heat": ({"temperature_celsius": 91.0}, Mode.REST, "hot", 0, 30),
}


@pytest.mark.parametrize("case", CASES)
def test_rule_begins_and_ends_after_its_delays(case: str) -> None:
    changes, mode, cause, on_seconds, off_seconds = CASES[case]
    policy, bad = MachinePolicy(ALL), replace(CALM, **changes)
    assert policy.decide(CALM, 0) == WORK
    wishes = {second: policy.decide(bad, second) for second in range(5, 200, 5)}
    begun = min(second for second, wish in wishes.items() if wish.mode is mode)
    assert begun - 5 == math.ceil(on_seconds / 5) * 5 and cause in wishes[begun].cause
    ends = {second: policy.decide(CALM, second) for second in range(200, 700, 5)}
    assert min(second for second, wish in ends.items() if wish == WORK) - 200 == off_seconds


def test_short_change_pauses_nothing() -> None:
    policy = MachinePolicy(ALL)
    for second in range(0, 600, 5):
        flickering = replace(CALM, on_battery=second % 50 != 0, input_idle_seconds=0.0 if second % 20 == 0 else 60.0)
        assert policy.decide(flickering, second) == WORK


def test_unknown_readings_pause_nothing() -> None:
    policy = MachinePolicy(ALL)
    assert {policy.decide(MachineReadings(MONDAY), second) for second in range(0, 1000, 5)} == {WORK}


def test_heat_ends_only_when_cooler() -> None:
    policy = MachinePolicy(ALL)
    assert policy.decide(replace(CALM, temperature_celsius=90.0), 0).mode is Mode.REST
    for second in range(5, 100, 5):
        assert policy.decide(replace(CALM, temperature_celsius=87.0), second).mode is Mode.REST


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("mon-fri 18:00-08:00", ["mon 18:00", "sat 07:59", "wed 03:00"], ["mon 07:59", "mon 17:59", "sat 18:00"]),
        ("sat-sun", ["sat 00:00", "sun 23:59"], ["fri 23:59", "mon 00:00"]),
        ("22:00-06:00", ["sun 23:00", "mon 05:59"], ["mon 06:00", "tue 21:59"]),
        ("fri-mon,wed 9:00-17:00", ["sun 10:00", "wed 16:59"], ["tue 10:00", "wed 17:00"]),
        ("mon 00:00-24:00", ["mon 23:59"], ["tue 00:00"]),
    ],
)
def test_hours_hold_on_their_days(text: str, inside: list[str], outside: list[str]) -> None:
    hours = WeeklyHours.parse(text)
    assert [hours.contains(_at(each)) for each in inside] == [True] * len(inside)
    assert [hours.contains(_at(each)) for each in outside] == [False] * len(outside)


@given(st.text(max_size=30))
def test_wrong_hours_get_one_line(text: str) -> None:
    try:
        WeeklyHours.parse(text)
    except ValueError as error:
        assert "\n" not in str(error)


def _at(text: str) -> datetime:
    day, time = text.split()
    days = ("mon", "tue", "wed", "thu", "fri", "sat", "sun").index(day)
    return datetime.fromisoformat(f"2026-11-23 {time}") + timedelta(days=days)
