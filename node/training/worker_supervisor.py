"""One worker after the other: each is started in the place of one that died, unless there is no point in another."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from node.tasks.spec import WorkerSpec
from node.training.cgroup import ControlGroup, memory_group, memory_kills, memory_limit_bytes
from node.training.process import START_SECONDS, WorkerError, WorkerProcess

log = logging.getLogger(__name__)

DEATHS = 5
"""In a row, without anything done in between; then there is no point in starting another."""
DEATHS_AN_HOUR = 40
"""Whatever was done in between: little is trained so, and the others wait each time."""
MEMORY_DEATHS = 3
"""By the kernel, for want of memory, within ten minutes: the memory is needed by others, or was never enough."""
MEMORY_SECONDS = 600.0
BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 4.0)
MEMORY_BACKOFF_SECONDS = (1.0, 5.0)
"""After the first death for want of memory, and after the second: whoever took it may be done soon."""
MENDING_SECONDS = DEATHS * START_SECONDS + sum(BACKOFF_SECONDS) + sum(MEMORY_BACKOFF_SECONDS)
"""Until there is another, or there will be none, at most."""
_HOUR_SECONDS = 3600.0
_AGAIN = "started again, this peer goes on where it was"
_REMEDY = f"see to what it says or, where it says nothing, to memory; {_AGAIN}"


class WorkerSupervisor:
    """The workers of one peer, which share one memory."""

    def __init__(self, spec: WorkerSpec, memory: int, group: ControlGroup | None = None) -> None:
        """
        Args:
            memory: file descriptor of the vectors (`node.training.shared`).
            group: says whether the kernel has killed for want of memory; this process's own if none is given.
        """
        self._spec, self._memory = spec, memory
        self._group = memory_group() if group is None else group
        self._kills = memory_kills(self._group)
        self._in_a_row = 0
        self._ends: deque[float] = deque(maxlen=DEATHS_AN_HOUR)
        self._starved: deque[float] = deque(maxlen=MEMORY_DEATHS)

    async def restart(self, life: WorkerProcess, how: str) -> WorkerProcess:
        """Start another, with growing pauses.

        Args:
            life: has ended.
            how: it did, in words.

        Raises:
            WorkerError: they die again and again; one line.
        """
        self._in_a_row = 1 if life.useful else self._in_a_row + 1
        self._ends.append(asyncio.get_running_loop().time())
        how = self.explained(how, life.child.is_killed)
        what = f"worker {life.child.pid} ended ({how})"
        while not (why := self._why_no_other(how)):
            log.warning("%s: another is started", what)
            await asyncio.sleep(self._pause_seconds())
            try:
                return await WorkerProcess.start(self._spec, self._memory)
            except (WorkerError, OSError) as error:
                self._in_a_row += 1
                how = self.explained(str(error), isinstance(error, WorkerError) and error.is_killed)
                what = f"no worker came up ({how})"
        log.warning("%s: no other is started", what)
        raise WorkerError(why)

    def explained(self, how: str, is_killed: bool) -> str:
        """How a worker ended, with what is known of memory: only a counter that has risen shows that it ran out."""
        before, self._kills = self._kills, memory_kills(self._group)
        if not is_killed:
            return how
        if before is None or self._kills is None:
            return f"{how}; memory may have run out"
        if self._kills <= before:
            return how
        self._starved.append(asyncio.get_running_loop().time())
        return f"{how}; memory has probably run out: the kernel has killed here for want of it"

    def _why_no_other(self, how: str) -> str:
        """Why there is no point in another, in one line; empty if there is one."""
        if len(self._starved) == MEMORY_DEATHS and self._starved[-1] - self._starved[0] <= MEMORY_SECONDS:
            limit = memory_limit_bytes(self._group)
            allowed = f" of {limit / 1e6:,.0f} MB" if limit else ""
            return (
                f"memory has probably run out{allowed}: the kernel killed the worker for want of it {MEMORY_DEATHS} "
                f"times within {MEMORY_SECONDS / 60:.0f} minutes; give this peer more, or end other programs; {_AGAIN}"
            )
        if len(self._ends) == DEATHS_AN_HOUR and self._ends[-1] - self._ends[0] <= _HOUR_SECONDS:
            return f"the worker died {DEATHS_AN_HOUR} times within an hour, at last: {how}; {_REMEDY}"
        if self._in_a_row >= DEATHS:
            return f"the worker died {self._in_a_row} times in a row: {how}; {_REMEDY}"
        return ""

    def _pause_seconds(self) -> float:
        now = asyncio.get_running_loop().time()
        starved = sum(now - each <= MEMORY_SECONDS for each in self._starved)
        scarce = MEMORY_BACKOFF_SECONDS[min(starved, MEMORY_DEATHS - 1) - 1] if starved else 0.0
        return max(BACKOFF_SECONDS[self._in_a_row - 1], scarce)
