"""What a system's processes use in a round: processor time, memory, and the bytes that cross the loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil

LOOK_SECONDS = 0.05
LOOPBACKS = ("lo", "lo0")


@dataclass(slots=True)
class Usage:
    """What a round took. It holds once the round is over.

    Attributes:
        cpu_seconds: of all processes.
        added_bytes: how far the resident memory of a peer rose above what it was before the round, at most.
        wire_bytes: what the loopback carried, with all headers, and whatever else used it in that time.
        p2pd_bytes: what our p2pds wrote to their sockets, to the peer's process and to other p2pds; 0 without them.
    """

    cpu_seconds: float = 0.0
    added_bytes: int = 0
    wire_bytes: int = 0
    p2pd_bytes: int = 0


class Meter:
    """Meters the peers of one system: their processes and all that these started, so create it when all are up."""

    def __init__(self, pids: Sequence[int], daemons: Sequence[int]) -> None:
        """
        Args:
            daemons: the process ids of our p2pds, if there are any.
        """
        self._daemons = [psutil.Process(pid) for pid in daemons]
        roots = [psutil.Process(pid) for pid in pids]
        self._peers = [[root, *root.children(recursive=True)] for root in roots]

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[Usage]:
        usage, before = Usage(), self._resident_bytes()
        cpu, wire, p2pd = self._cpu_seconds(), loopback_bytes(), self._p2pd_bytes()
        task = asyncio.create_task(self._watch(usage, before))
        try:
            yield usage
        finally:
            task.cancel()
        usage.wire_bytes = loopback_bytes() - wire
        usage.p2pd_bytes = self._p2pd_bytes() - p2pd
        usage.cpu_seconds = self._cpu_seconds() - cpu
        self._look(usage, before)

    async def _watch(self, usage: Usage, before: Sequence[int]) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._look(usage, before)

    def _look(self, usage: Usage, before: Sequence[int]) -> None:
        risen = (now - then for now, then in zip(self._resident_bytes(), before, strict=True))
        usage.added_bytes = max(usage.added_bytes, *risen)

    def _cpu_seconds(self) -> float:
        times = [process.cpu_times() for processes in self._peers for process in processes]
        return float(sum(each.user + each.system for each in times))

    def _p2pd_bytes(self) -> int:
        return sum(daemon.io_counters().write_chars for daemon in self._daemons)

    def _resident_bytes(self) -> list[int]:
        """Cheap: resident memory of each peer, where what its processes share with libraries' files counts once."""
        return [_once([_resident(process) for process in processes]) for processes in self._peers]

    def held_bytes(self) -> int:
        """Exact, and slow: resident memory of the peer that holds most; what its processes share counts once."""
        full = [[process.memory_full_info() for process in processes] for processes in self._peers]
        return max(_once([(info.rss, info.rss - info.uss) for info in infos]) for infos in full)


def _resident(process: psutil.Process) -> tuple[int, int]:
    info = process.memory_info()
    return info.rss, getattr(info, "shared", 0)


def _once(memory: Sequence[tuple[int, int]]) -> int:
    """Sum (resident, shared) over processes, with the largest shared part only, for the kernel counts it in each."""
    return sum(resident - shared for resident, shared in memory) + max(shared for _, shared in memory)


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
