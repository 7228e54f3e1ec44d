"""Health of a peer's processes: event loop lag, memory, open files, tasks. All measured, none estimated."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

_TICK_SECONDS = 0.05  # each tick wakes an idle process
_BIN_SECONDS = 0.001  # as fine as uvloop's clock
_BINS = 2000
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Vitals:
    """A peer's health in a round's report: the event loop's lag since the last report; present values of the rest."""

    loop_lag_p99_seconds: float
    loop_lag_max_seconds: float
    rss_bytes: int
    open_files: int
    tasks: int


def vitals(lag: LoopLag, pids: Iterable[int]) -> Vitals:
    """Take the lag since the last call, and measure everything else for the peer's processes: own, worker's, p2pd's."""
    p99_seconds, max_seconds = lag.take()
    return Vitals(p99_seconds, max_seconds, rss_bytes(pids), int(psutil.Process().num_fds()), len(asyncio.all_tasks()))


class LoopLag:
    """How long a callback has to wait for the event loop. Use as an async context manager.

    A timer measures every 50 ms how late it fires. One that is 500 ms late counts as the ten that were due meanwhile,
    each 50 ms less late than the one before, so the 99th percentile is over time, not over timers that fired.
    """

    def __init__(self) -> None:
        self._counts = [0] * _BINS
        self._max_seconds = 0.0

    async def __aenter__(self) -> LoopLag:
        self._loop = asyncio.get_running_loop()
        self._schedule()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()

    def take(self) -> tuple[float, float]:
        p99_seconds, max_seconds = self.peek(), self._max_seconds
        self._counts, self._max_seconds = [0] * _BINS, 0.0
        return p99_seconds, max_seconds

    def peek(self) -> float:
        wanted, seen = math.ceil(0.99 * sum(self._counts)), 0
        for bin_number, count in enumerate(self._counts):
            seen += count
            if wanted and seen >= wanted:
                return min((bin_number + 1) * _BIN_SECONDS, self._max_seconds)
        return 0.0

    def _schedule(self) -> None:
        self._due = self._loop.time() + _TICK_SECONDS
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        late = max(0.0, self._loop.time() - self._due)
        self._max_seconds = max(self._max_seconds, late)
        for step in range(min(int(late / _TICK_SECONDS) + 1, _BINS)):
            bin_number = int((late - step * _TICK_SECONDS) / _BIN_SECONDS)
            self._counts[min(bin_number, _BINS - 1)] += 1
        self._schedule()


def rss_bytes(pids: Iterable[int]) -> int:
    """Resident memory of these processes together; a process that has ended counts 0.

    Shared memory (the vectors) counts once on Linux, as the largest share that one process has touched; libraries count
    in each process.
    """
    private_bytes, shared_bytes = 0, 0
    for pid in set(pids):
        rss, shared = _memory_bytes(pid)
        private_bytes += rss - shared
        shared_bytes = max(shared_bytes, shared)
    return private_bytes + shared_bytes


def _memory_bytes(pid: int) -> tuple[int, int]:
    """(resident memory, shared part of it)"""
    try:
        if not _PROC.is_dir():
            return int(psutil.Process(pid).memory_info().rss), 0
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except (psutil.Error, OSError):
        return 0, 0
    kilobytes = {name: value.split()[0] for name, _, value in (line.partition(":") for line in lines) if value.strip()}
    return 1024 * int(kilobytes.get("VmRSS", 0)), 1024 * int(kilobytes.get("RssShmem", 0))


def with_children(pid: int) -> list[int]:
    """This process, and those that its main thread has forked: the ranks of a worker. Without them except on Linux."""
    try:
        return [pid, *map(int, (_PROC / str(pid) / "task" / str(pid) / "children").read_text().split())]
    except OSError:
        return [pid]


class CpuMeter:
    def __init__(self) -> None:
        self._before: dict[int, float] = {}
        self._at = 0.0

    def cores(self, pids: Iterable[int], now: float) -> float:
        """Cores that these processes kept busy since the last call, such as 1.7; nan at the first."""
        seconds = {pid: _cpu_seconds(pid) for pid in set(pids)}
        elapsed, self._at = now - self._at, now
        before, self._before = self._before, seconds
        if not before or elapsed <= 0:
            return math.nan
        return max(0.0, sum(used - before.get(pid, used) for pid, used in seconds.items())) / elapsed


def _cpu_seconds(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


_WORKERS = ("node.training.worker", "node.training.stage_worker", "node.ranks.worker")


def workers_here() -> int:
    """Worker processes that this user can see on this machine, without those that a worker has forked."""
    parents = {}
    for process in psutil.process_iter(["cmdline", "ppid"]):
        line = process.info["cmdline"] or ()
        if any(first == "-m" and second in _WORKERS for first, second in pairwise(line)):
            parents[process.pid] = process.info["ppid"]
    return sum(parent not in parents for parent in parents.values())


def interface_of(address: str) -> str:
    """Name of the network interface that has this IP address; empty if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address.partition("%")[0] for each in addresses):
            return str(name)
    return ""


def available_memory_bytes() -> int:
    """Memory that this process may still take, with what it has taken already."""
    return int(psutil.virtual_memory().available) + int(psutil.Process().memory_info().rss)
