"""Replace workers that died, unless they die too often."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from typing import Protocol

from node.runtime.cgroup import ControlGroup, memory_group, memory_kills, memory_limit_bytes
from node.tasks.spec import WorkerSpec
from node.training.liveness import BUSY_FACTOR, TIMEOUT_SECONDS
from node.training.process import WorkerError, WorkerProcess

log = logging.getLogger(__name__)

DEATHS = 5
"""The supervisor gives up after this many deaths in a row in the same command, none of which it finished in between."""
DEATHS_AN_HOUR = 40
"""It also gives up at this rate: such a worker trains little, and other peers wait for it each time."""
MEMORY_DEATHS = 3
"""It also gives up after this many out-of-memory kills within `MEMORY_SECONDS`."""
MEMORY_SECONDS = 600.0
BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 4.0)
MEMORY_BACKOFF_SECONDS = (1.0, 5.0)
"""Pause after the first and after the second out-of-memory kill: the program that took the memory may end soon."""
_HOUR_SECONDS = 3600.0
_AGAIN = "a restart of this peer continues where it stopped"
_REMEDY = f"check its last output or, if there is none, this machine's memory; {_AGAIN}"
_MEND = f"fix that first (the log has more of it); {_AGAIN}"


def mending_seconds(spec: WorkerSpec) -> float:
    """Longest time until there is another worker or the supervisor has given up."""
    start_seconds = BUSY_FACTOR * spec.start_seconds(TIMEOUT_SECONDS)
    return DEATHS * start_seconds + sum(BACKOFF_SECONDS) + sum(MEMORY_BACKOFF_SECONDS)


class Supervisor(Protocol):
    """Where a trainer's workers come from. All methods raise `WorkerError` if there will be none."""

    async def start(self) -> WorkerProcess: ...

    async def restart(self, worker: WorkerProcess, how: str) -> WorkerProcess:
        """Another one in place of a worker that ended; `how`, in words."""

    async def resume(self, worker: WorkerProcess, how: str) -> WorkerProcess:
        """Another one in place of a worker that was released, which was no death."""

    def explained(self, how: str, is_killed: bool) -> str: ...


class WorkerSupervisor:
    """Replaces the workers of one peer, which use the same shared memory. `group` counts out-of-memory kills."""

    def __init__(self, spec: WorkerSpec, memory: int, group: ControlGroup | None = None) -> None:
        self._spec, self._memory = spec, memory
        self._group = memory_group() if group is None else group
        self._kills = memory_kills(self._group)
        self._deaths: Counter[str] = Counter()  # in a row, by the command that each worker died in
        self._in_a_row = 0  # of the command that the last one died in
        self._ends: deque[float] = deque(maxlen=DEATHS_AN_HOUR)
        self._starved: deque[float] = deque(maxlen=MEMORY_DEATHS)

    async def start(self) -> WorkerProcess:
        return await WorkerProcess.start(self._spec, self._memory)

    async def restart(self, worker: WorkerProcess, how: str) -> WorkerProcess:
        """Start another worker, with growing pauses. Raises `WorkerError`."""
        self._count(worker)
        self._ends.append(asyncio.get_running_loop().time())
        if worker.failure:
            what = how = worker.failure
        else:
            how = self.explained(how, worker.child.is_killed)
            what = f"worker {worker.child.pid} ended{f' in {worker.command}' if worker.command else ''} ({how})"
        while not (why := self._why_no_other(how, _MEND if worker.failure else _REMEDY)):
            log.warning("%s: another is started", what)
            await asyncio.sleep(self._pause_seconds())
            try:
                return await self.start()
            except (WorkerError, OSError) as error:
                self._in_a_row += 1
                how = self.explained(str(error), isinstance(error, WorkerError) and error.is_killed)
                what = f"no worker came up ({how})"
        log.warning("%s: giving up", what)
        raise WorkerError(why)

    def _count(self, worker: WorkerProcess) -> None:
        for command in (*worker.finished, *([""] if worker.finished else [])):
            del self._deaths[command]
        self._deaths[worker.command] += 1
        self._in_a_row = self._deaths[worker.command]

    async def resume(self, worker: WorkerProcess, how: str) -> WorkerProcess:
        try:
            return await self.start()
        except (WorkerError, OSError) as error:
            return await self.restart(worker, str(error))

    def explained(self, how: str, is_killed: bool) -> str:
        """`how` a worker ended, and whether memory ran out. Only a higher kill counter of the group shows that."""
        before, self._kills = self._kills, memory_kills(self._group)
        if not is_killed:
            return how
        if before is None or self._kills is None:
            return f"{how}; memory may have run out"
        if self._kills <= before:
            return how
        self._starved.append(asyncio.get_running_loop().time())
        return f"{how}; probably out of memory (the kernel's OOM killer ran)"

    def _why_no_other(self, how: str, remedy: str) -> str:
        """In one line; empty to start another worker."""
        if len(self._starved) == MEMORY_DEATHS and self._starved[-1] - self._starved[0] <= MEMORY_SECONDS:
            limit = memory_limit_bytes(self._group)
            allowed = f" (limit {limit / 1e6:,.0f} MB)" if limit else ""
            return (
                f"probably out of memory{allowed}: the kernel's OOM killer ended the worker {MEMORY_DEATHS} times "
                f"within {MEMORY_SECONDS / 60:.0f} minutes; give this peer more memory, or end other programs; "
                f"{_AGAIN}"
            )
        if len(self._ends) == DEATHS_AN_HOUR and self._ends[-1] - self._ends[0] <= _HOUR_SECONDS:
            return f"the worker died {DEATHS_AN_HOUR} times within an hour, at last: {how}; {remedy}"
        if self._in_a_row >= DEATHS:
            return f"the worker died {self._in_a_row} times in a row: {how}; {remedy}"
        return ""

    def _pause_seconds(self) -> float:
        now = asyncio.get_running_loop().time()
        starved = sum(now - each <= MEMORY_SECONDS for each in self._starved)
        scarce = MEMORY_BACKOFF_SECONDS[min(starved, MEMORY_DEATHS - 1) - 1] if starved else 0.0
        return max(BACKOFF_SECONDS[self._in_a_row - 1], scarce)
