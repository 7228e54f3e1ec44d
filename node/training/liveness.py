"""Whether a worker that does not answer works or hangs: by its steps, and by what the kernel counts for its process.

How long a step or an evaluation takes says nothing: a slow disk, a large validation set and a first step that compiles
are all slow, and none of them hangs. A worker that works uses processor time, or reads or writes.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_SECONDS = 600.0
"""Longest time without any sign of work, unless the user or the task gives another."""
BUSY_FACTOR = 10
"""A command, or an inner step, that only computes may take this many timeouts: an endless loop looks like work."""
STOPPED_SECONDS = 5.0
"""A stopped process does not continue by itself, so the peer does not wait for it."""
LATE_LOOK_SECONDS = 10.0
"""A look that comes later than this after the one before comes after a pause of the peer itself."""
WORKING_SHARE = 0.01
"""Share of the time on a core that counts as work. A thread that wakes up now and then to look takes less."""
WORKING_BYTES = 4096
_POLLING = "gloo_tcp_loop\n"
"""A thread of each rank that wakes up a hundred times a second: on a busy machine it waits for a core each time."""
_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    processor_seconds: float  # on a core, or ready to run while no core was free
    io_bytes: int  # read and written
    stopped: str = ""  # which process a signal or a debugger has stopped: the worker, or a rank that it has forked
    ranks: int = 1


def usage(pid: int, proc: Path = _PROC) -> Usage | None:
    """None if the kernel does not say, or if there is no such process."""
    try:
        program = _command_line(proc / str(pid))[1:4]
    except (OSError, ValueError, IndexError):
        return None
    stopped, seconds, size, ranks, waiting, seen = "", 0.0, 0, 1, [pid], set[int]()
    while waiting:
        if (each := waiting.pop()) in seen:
            continue
        seen.add(each)
        process = proc / str(each)
        with suppress(OSError, ValueError, IndexError):
            state, used = _stat(process)
            seconds += used
            line = _command_line(process)
            if line[1:4] == program:
                ranks += line[4:5] == ["rank"]
                if state in "Tt" and not stopped:
                    stopped = "the worker" if each == pid else " ".join(line[4:])
            size += _io_bytes(process)
            for thread in (process / "task").iterdir():
                with suppress(OSError, ValueError, IndexError):  # not all kernels have these two
                    if (thread / "comm").read_text() != _POLLING:
                        seconds += int((thread / "schedstat").read_text().split()[1]) / 1e9
                    waiting += map(int, (thread / "children").read_text().split())
    return Usage(seconds, size, stopped, ranks)


def _command_line(process: Path) -> list[str]:
    return (process / "cmdline").read_text(errors="replace").rstrip("\0").replace("\0", " ").split(" ")


def _stat(process: Path) -> tuple[str, float]:
    """State, and seconds on a core."""
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS


def _io_bytes(process: Path) -> int:
    """Page faults of mapped files included."""
    size = 0
    with suppress(OSError, ValueError):
        for line in (process / "io").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("rchar", "wchar", "read_bytes"):
                size += int(value)
    return size


class Watchdog:
    """Judges one command from one look to the next. It knows no clock and no process."""

    def __init__(self, command: str, timeout_seconds: float, now: float) -> None:
        self._command = "an inner step" if command == "train" else command
        self._timeout_seconds = timeout_seconds
        self._began = self._worked = self._looked = now
        self._steps: int | None = None
        self._usage: Usage | None = None
        self._stopped: float | None = None  # since when

    def look(self, now: float, steps: int, usage: Usage | None) -> str:
        """Why the worker hangs; empty while it works. `steps` changes with each sign of progress; `usage` may be
        unknown.
        """
        self._excuse(now - self._looked)
        if steps != self._steps:
            self._steps, self._began = steps, now
        if self._began == now or self._works(usage, now - self._looked):
            self._worked = now
        if usage is None or not usage.stopped:
            self._stopped = None
        elif self._stopped is None:
            self._stopped = now
        self._usage, self._looked = usage, now
        return self._verdict(now)

    def _excuse(self, seconds: float) -> None:
        """Do not count time in which nothing looked: this process, and perhaps the worker, was stopped or frozen."""
        if (away_seconds := seconds - LATE_LOOK_SECONDS) > 0:
            self._began, self._worked = self._began + away_seconds, self._worked + away_seconds
            if self._stopped is not None:
                self._stopped += away_seconds

    def _works(self, usage: Usage | None, seconds: float) -> bool:
        before = self._usage
        if usage is None or before is None:
            return True
        used = usage.processor_seconds - before.processor_seconds
        return used >= WORKING_SHARE * seconds * usage.ranks or usage.io_bytes - before.io_bytes >= WORKING_BYTES

    def _verdict(self, now: float) -> str:
        limit_seconds, what = self._timeout_seconds, self._command
        if self._stopped is not None and now - self._stopped >= STOPPED_SECONDS:
            which = self._usage.stopped if self._usage else ""
            return f"{which} was stopped (by SIGSTOP or a debugger) in {what}"
        if now - self._worked >= limit_seconds:
            return (
                f"the worker hangs in {what}: for {limit_seconds:g} s it finished nothing, used no processor time and "
                "neither read nor wrote; --worker-timeout sets this limit"
            )
        if now - self._began >= BUSY_FACTOR * limit_seconds:
            return (
                f"the worker hangs in {what}: it computed for {BUSY_FACTOR * limit_seconds:g} s and finished nothing; "
                f"that is {BUSY_FACTOR} times --worker-timeout"
            )
        return ""
