"""What a system's processes use in a round: processor time, memory, and the bytes that cross the loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import psutil

LOOK_SECONDS = 0.05
LOOPBACKS = ("lo", "lo0")


@dataclass(slots=True)
class Usage:
    """What a round took. It holds once the round is over.

    Attributes:
        cpu_seconds: of all processes.
        idle_bytes, peak_bytes: resident memory of the peer that held most, before the round and at its peak.
        wire_bytes: what the loopback carried, with all headers, and whatever else used it in that time.
    """

    cpu_seconds: float = 0.0
    idle_bytes: int = 0
    peak_bytes: int = 0
    wire_bytes: int = 0


class Meter:
    """Meters the peers of one system: their processes and all that these started, so create it when all are up."""

    def __init__(self, pids: Sequence[int]) -> None:
        roots = [psutil.Process(pid) for pid in pids]
        self._peers = [[root, *root.children(recursive=True)] for root in roots]

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[Usage]:
        usage = Usage(idle_bytes=self._memory_bytes())
        cpu, wire = self._cpu_seconds(), loopback_bytes()
        task = asyncio.create_task(self._watch(usage))
        try:
            yield usage
        finally:
            task.cancel()
        usage.wire_bytes = loopback_bytes() - wire
        usage.cpu_seconds = self._cpu_seconds() - cpu
        usage.peak_bytes = max(usage.peak_bytes, self._memory_bytes())

    async def _watch(self, usage: Usage) -> None:
        while True:
            usage.peak_bytes = max(usage.peak_bytes, self._memory_bytes())
            await asyncio.sleep(LOOK_SECONDS)

    def _cpu_seconds(self) -> float:
        times = [process.cpu_times() for processes in self._peers for process in processes]
        return sum(each.user + each.system for each in times)

    def _memory_bytes(self) -> int:
        return max(_resident_bytes(processes) for processes in self._peers)


def _resident_bytes(processes: Sequence[psutil.Process]) -> int:
    """Resident memory of one peer: private memory of its processes, and once what they share.

    The kernel counts shared memory and the files of libraries in each process.
    """
    private, shared = 0, [0]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            info = process.memory_info()
            shared.append(getattr(info, "shared", 0))
            private += info.rss - shared[-1]
    return private + max(shared)


def loopback_bytes() -> int:
    """What the loopback has received since the machine started.

    Raises:
        RuntimeError: there is no loopback interface.
    """
    counters = psutil.net_io_counters(pernic=True)
    for name in LOOPBACKS:
        if name in counters:
            return int(counters[name].bytes_recv)
    raise RuntimeError(f"no loopback interface among {', '.join(counters)}")
