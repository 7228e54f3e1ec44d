"""One worker after the other: each is started in the place of one that died, unless there is no point in another."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from node.tasks.spec import WorkerSpec
from node.training.process import START_SECONDS, WorkerError, WorkerProcess

log = logging.getLogger(__name__)

DEATHS = 5
"""In a row, without anything done in between; then there is no point in starting another."""
DEATHS_AN_HOUR = 40
"""Whatever was done in between: little is trained so, and the others wait each time."""
BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 4.0)
MENDING_SECONDS = DEATHS * START_SECONDS + sum(BACKOFF_SECONDS)
"""Until there is another, or there will be none, at most."""
_HOUR_SECONDS = 3600.0
_REMEDY = "see to what it says or, where it says nothing, to memory; started again, this peer goes on where it was"


class Succession:
    """The workers of one peer, which share one memory."""

    def __init__(self, spec: WorkerSpec, memory: int) -> None:
        """
        Args:
            memory: file descriptor of the vectors (`node.training.shared`).
        """
        self._spec, self._memory = spec, memory
        self._in_a_row = 0
        self._ends: deque[float] = deque(maxlen=DEATHS_AN_HOUR)

    async def after(self, life: WorkerProcess, how: str) -> WorkerProcess:
        """Start another, with growing pauses.

        Args:
            life: has ended.
            how: it did, in words.

        Raises:
            WorkerError: they die again and again; one line.
        """
        self._in_a_row = 1 if life.useful else self._in_a_row + 1
        self._ends.append(asyncio.get_running_loop().time())
        if len(self._ends) == DEATHS_AN_HOUR and self._ends[-1] - self._ends[0] <= _HOUR_SECONDS:
            raise WorkerError(f"the worker died {DEATHS_AN_HOUR} times within an hour, at last: {how}; {_REMEDY}")
        log.warning("worker %d ended (%s): another is started", life.child.pid, how)
        while self._in_a_row < DEATHS:
            await asyncio.sleep(BACKOFF_SECONDS[self._in_a_row - 1])
            try:
                return await WorkerProcess.start(self._spec, self._memory)
            except (WorkerError, OSError) as error:
                self._in_a_row, how = self._in_a_row + 1, str(error)
        raise WorkerError(f"the worker died {self._in_a_row} times in a row: {how}; {_REMEDY}")
