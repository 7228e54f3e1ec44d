"""Reads this machine's sensors, and asks its desktop's services by `busctl`. What there is not is left unknown.

The sensors block for a few milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import psutil

from node.machine.rules import MachineReadings
from node.runtime.child_process import ChildProcess

COMMAND = "starling"  # Its script is the second word of the process: the first is Python
DEFAULT_HIGH_CELSIUS = 90.0  # Limit of a sensor that names none, or one that no working machine has
PLAUSIBLE_CELSIUS = (1.0, 119.0)  # Sensors that are not connected show values outside of these
LIMIT_CELSIUS = (60.0, 115.0)
PRESSURE = Path("/proc/pressure/memory")
_AVG10 = re.compile(r"^some avg10=([\d.]+)", re.MULTILINE)


class MachineProbes:
    """Reads the sensors of one machine, again and again.

    The processor's load is that since the last reading. Processes of `python -m <program>...` and of the command count
    as the peer's own, so that two peers on one machine do not pause each other.
    """

    def __init__(self, program: str = "node") -> None:
        self._program = program
        self._busy: tuple[float, float] | None = None
        self._used: dict[int, float] = {}

    def read(self, *, load: bool) -> MachineReadings:
        """Read all sensors but the desktop's. `load`: also other programs' processor time, which costs the most."""
        available, total = _memory_bytes()
        temperature, high = hottest_celsius()
        return MachineReadings(
            local=datetime.now(),
            on_battery=_on_battery(),
            memory_available_bytes=available,
            memory_bytes=total,
            memory_pressure_percent=_memory_pressure_percent(),
            temperature_celsius=temperature,
            high_celsius=high,
            others_share=self._others() if load else math.nan,
        )

    def _others(self) -> float:
        try:
            return self._others_share()
        except (psutil.Error, OSError, ValueError):  # a process ended meanwhile, or /proc is not readable
            return math.nan

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
            is_ours = process.pid == os.getpid() or process.info["name"] == "p2pd" or self._is_program(line)
            if times and is_ours:
                yield process.pid, times.user + times.system

    def _is_program(self, line: Sequence[str]) -> bool:
        modules = [after for each, after in pairwise(line) if each == "-m"]
        runs = any(each == self._program or each.startswith(f"{self._program}.") for each in modules)
        return runs or any(Path(each).name == COMMAND for each in line[:2])


def _memory_bytes() -> tuple[float, float]:
    try:
        memory = psutil.virtual_memory()
    except (OSError, ValueError, RuntimeError):
        return math.nan, math.nan
    return float(memory.available), float(memory.total)


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
    except (OSError, ValueError):
        return math.nan
    return float(found[1]) if found else math.nan


def hottest_celsius() -> tuple[float, float]:
    """Temperature and limit of the sensor that is closest to its limit, or furthest above it; nan if there is none."""
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError, ValueError):
        return math.nan, math.nan
    low, high = PLAUSIBLE_CELSIUS
    known = [
        (float(each.current), _limit(each.critical or each.high))
        for all_ in sensors.values()
        for each in all_
        if low <= each.current <= high
    ]
    return max(known, key=lambda pair: pair[0] - pair[1], default=(math.nan, math.nan))


def _limit(named: float | None) -> float:
    low, high = LIMIT_CELSIUS
    return float(named) if named and low <= named <= high else DEFAULT_HIGH_CELSIUS


# -- the desktop -------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

ASK_SECONDS = 3.0
_IDLE_SOURCES = {
    "GNOME": (
        "--user", "call", "org.gnome.Mutter.IdleMonitor", "/org/gnome/Mutter/IdleMonitor/Core",
        "org.gnome.Mutter.IdleMonitor", "GetIdletime",
    ),
    "KDE and others": (
        "--user", "call", "org.freedesktop.ScreenSaver", "/org/freedesktop/ScreenSaver",
        "org.freedesktop.ScreenSaver", "GetSessionIdleTime",
    ),
}  # fmt: skip
"""Desktop -> how to ask it for the milliseconds since the last input."""
_METERED = (
    "--system", "get-property", "org.freedesktop.NetworkManager", "/org/freedesktop/NetworkManager",
    "org.freedesktop.NetworkManager", "Metered",
)  # fmt: skip
_METERED_VALUES = {1: True, 2: False, 3: True, 4: False}  # NetworkManager's NMMetered: yes, no, and two guesses
_NUMBER = re.compile(r"^[utx] (\d{1,18})$")


class Desktop:
    """The services of the desktop session in which this peer runs, if it runs in one."""

    def __init__(self) -> None:
        self._busctl = shutil.which("busctl")
        self._idle_sources = list(_IDLE_SOURCES.values())

    async def input_idle_seconds(self) -> float:
        """Time since the keyboard or the mouse was used; nan if no service tells."""
        for source in self._idle_sources:
            if (value := await self._ask(source)) is not None:
                self._idle_sources = [source]  # ask only this one from now on
                return value / 1000
        return math.nan

    async def is_metered(self) -> bool | None:
        """Whether the network's traffic costs money; None if NetworkManager does not tell."""
        value = await self._ask(_METERED)
        return None if value is None else _METERED_VALUES.get(value)

    async def _ask(self, arguments: Sequence[str]) -> int | None:
        if self._busctl is None:
            return None
        lines: list[str] = []
        take = lambda line: lines.append(line) if line and len(lines) < 2 else None  # noqa: E731
        try:
            child = await ChildProcess.start("busctl", (self._busctl, *arguments), take)
        except OSError as error:
            log.debug("busctl does not start: %s", error)
            return None
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await child.ended()
        except TimeoutError:
            return None
        finally:
            await child.kill()
        found = _NUMBER.match(lines[0]) if lines and child.code == 0 else None
        return int(found[1]) if found else None
