"""Reads this machine's sensors. What a machine does not have is left unknown. Blocks for a few milliseconds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from node.machine.rules import MachineReadings

DEFAULT_HIGH_CELSIUS = 90.0
"""Limit of a sensor that names none."""
PRESSURE = Path("/proc/pressure/memory")
_AVG10 = re.compile(r"^some avg10=([\d.]+)", re.MULTILINE)


class MachineProbes:
    """Reads the sensors of one machine, again and again.

    The processor's load is that since the last reading. Processes of this program count as the peer's own, so that two
    peers on one machine do not pause each other.
    """

    def __init__(self, program: str = "node") -> None:
        """
        Args:
            program: the package whose processes are this program's: `python -m <program>...`.
        """
        self._program = program
        self._busy: tuple[float, float] | None = None
        self._used: dict[int, float] = {}

    def read(self, *, load: bool) -> MachineReadings:
        """Read all sensors but those of `node.machine.desktop`.

        Args:
            load: whether to look at other programs' processor time, which costs the most.
        """
        memory, temperature, high = psutil.virtual_memory(), *_hottest()
        return MachineReadings(
            local=datetime.now(),
            on_battery=_on_battery(),
            memory_available_bytes=float(memory.available),
            memory_bytes=float(memory.total),
            memory_pressure_percent=_memory_pressure_percent(),
            temperature_celsius=temperature,
            high_celsius=high,
            others_share=self._others_share() if load else math.nan,
        )

    def _others_share(self) -> float:
        """Share of all cores that other programs have kept busy since the last call; nan at the first."""
        times = psutil.cpu_times()
        whole = math.fsum(times)
        busy = whole - times.idle - getattr(times, "iowait", 0.0)
        used = dict(self._own_seconds())
        before, self._busy = self._busy, (whole, busy)
        earlier, self._used = self._used, used
        if before is None or whole <= before[0]:
            return math.nan
        own = sum(seconds - earlier.get(pid, seconds) for pid, seconds in used.items())
        return float(max(0.0, busy - before[1] - own) / (whole - before[0]))

    def _own_seconds(self) -> Iterable[tuple[int, float]]:
        """(pid, processor time so far) of this program's processes, and of p2pd."""
        for process in psutil.process_iter(["cmdline", "cpu_times", "name"]):
            line, times = process.info["cmdline"] or (), process.info["cpu_times"]
            is_ours = process.info["name"] == "p2pd" or self._is_program(line)
            if times and is_ours:
                yield process.pid, times.user + times.system

    def _is_program(self, line: Iterable[str]) -> bool:
        modules = [after for each, after in pairwise(line) if each == "-m"]
        return any(each == self._program or each.startswith(f"{self._program}.") for each in modules)


def _on_battery() -> bool | None:
    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, ValueError):  # not on this system, or an odd driver
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def _memory_pressure_percent() -> float:
    """Linux's pressure stall information; nan elsewhere."""
    try:
        found = _AVG10.search(PRESSURE.read_text())
    except OSError:
        return math.nan
    return float(found[1]) if found else math.nan


def _hottest() -> tuple[float, float]:
    """Temperature and limit of the sensor that is closest to its limit, or furthest above it; nan if there is none."""
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError):
        return math.nan, math.nan
    known = [
        (float(each.current), float(each.high or DEFAULT_HIGH_CELSIUS)) for all_ in sensors.values() for each in all_
    ]
    return max(known, key=lambda pair: pair[0] - pair[1], default=(math.nan, math.nan))
