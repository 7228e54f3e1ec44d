"""An event loop on virtual time: when no callback is ready, it jumps to the next timer.

`asyncio.sleep`, `timeout` and `TaskGroup` work unchanged. A run is determined by the program and its seeds: there are
no sockets and no threads, and tasks and futures hash by a counter. asyncio keeps tasks in sets; their order would
otherwise depend on addresses, and cancellations would differ between two runs.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


SPINS = 100_000
"""Iterations of the loop at one time; a program that takes more of them is polling, and is stopped."""


class SimDeadlock(Exception):
    """The program cannot end: it waits without a timer, polls without waiting, or exceeds its time limit."""


class SimProcess:
    """One simulated process: the tasks that are cancelled together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.tasks: dict[int, asyncio.Task[Any]] = {}

    def kill(self) -> None:
        """Cancel every task; their `finally` blocks run, but nothing that they send leaves the process."""
        self.alive = False
        for task in list(self.tasks.values()):
            task.cancel()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What runs inside belongs to this process, and so do the tasks that it creates."""
        token = PROCESS.set(self)
        try:
            yield
        finally:
            PROCESS.reset(token)


PROCESS: ContextVar[SimProcess | None] = ContextVar("process", default=None)
"""The process of the running code; a task inherits it from the task that creates it."""


class _SimFuture(asyncio.Future[Any]):
    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class _SimTask(asyncio.Task[Any]):
    def __init__(self, number: int, coroutine: Coroutine[Any, Any, Any], **options: Any) -> None:
        self.number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self.number


class SimLoop(asyncio.BaseEventLoop):
    """A loop whose `time()` is virtual and starts at 0."""

    def __init__(self, limit_seconds: float = 1e7) -> None:
        super().__init__()
        self._now = 0.0
        self._limit_seconds = limit_seconds
        self._spins = 0
        self._numbers = itertools.count()
        self._selector = self
        self.set_task_factory(_task)

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> Iterable[Any]:
        """Stand in for the selector: nothing arrives from outside, so to wait is to advance the time."""
        if timeout is None:
            raise SimDeadlock(f"nothing is ready and no timer is set at {self._now:.3f} s")
        timers = self._scheduled  # type: ignore[attr-defined]
        if timers and self._now < timers[0].when() <= self._now + self._clock_resolution:  # type: ignore[attr-defined]
            self._now = timers[0].when()  # it is about to be called: none is called before its time
        self._spins += 1
        if self._spins > SPINS:
            self._spins = 0  # clean-up code may still run
            raise SimDeadlock(f"something spins: time stands still at {self._now:.3f} s")
        if timeout > 0:
            self._spins = 0
            self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
            if self._now > self._limit_seconds:
                raise SimDeadlock(f"virtual time passed its limit of {self._limit_seconds:g} s")
        return ()

    def create_future(self) -> asyncio.Future[Any]:
        return _SimFuture(next(self._numbers), loop=self)

    def _process_events(self, event_list: Iterable[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def run_in_executor(self, executor: object, func: object, *args: object) -> Any:
        raise RuntimeError("no threads in the simulated world: heavy work goes through Compute")


def _task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    assert isinstance(loop, SimLoop)
    number = next(loop._numbers)
    task = _SimTask(number, coroutine, loop=loop, **options)
    process = PROCESS.get()
    if process is not None:
        if not process.alive:
            task.cancel()
        process.tasks[number] = task
        task.add_done_callback(lambda done: process.tasks.pop(number, None))
    return task


def run(main: Coroutine[Any, Any, T], limit_seconds: float = 1e7) -> T:
    loop = SimLoop(limit_seconds)
    try:
        return loop.run_until_complete(main)
    finally:
        left = sorted(asyncio.all_tasks(loop), key=lambda task: task.number)  # type: ignore[attr-defined]
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
