"""An event loop on virtual time: when no callback is ready, it jumps to the next timer.

`asyncio.sleep`, `timeout` and `TaskGroup` work unchanged. A run is determined by the program and its seeds: there are
no sockets and no threads, and tasks and futures hash by a counter. asyncio keeps tasks in sets; their order would
otherwise depend on addresses, and cancellations would differ between two runs.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from heapq import heapify, heappop, heappush
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
    __slots__ = ("number",)
    number: int

    def __hash__(self) -> int:
        return self.number


class _SimTask(asyncio.Task[Any]):
    def __init__(self, number: int, coroutine: Coroutine[Any, Any, Any], **options: Any) -> None:
        self.number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self.number


class _Call:
    """What asyncio calls a handle: a callback that is ready, without the parts that only its debug mode needs."""

    __slots__ = ("args", "callback", "context")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args, self.context = args, context

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None


class _Timer(float):
    """A callback at a time. It is that number, so that the heap of timers compares numbers, not objects of Python."""

    __slots__ = ("args", "callback", "context", "is_waiting", "loop")
    callback: Callable[..., object] | None
    args: tuple[Any, ...]
    context: Context
    loop: SimLoop
    is_waiting: bool

    def cancel(self) -> None:
        if self.callback is not None and self.is_waiting:
            self.loop._cancelled += 1
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return float(self)


_SWEEP_TIMERS = 100
"""Among more timers than these, the cancelled ones are swept out as soon as they are more than half."""


class SimLoop(asyncio.BaseEventLoop):
    """A loop whose `time()` is virtual and starts at 0.

    It replaces what asyncio's own loop does for each callback and timer, which takes a tenth of a simulation's time.
    """

    def __init__(self, limit_seconds: float = 1e7) -> None:
        super().__init__()
        self._now = 0.0
        self._limit_seconds = limit_seconds
        self._spins = 0
        self._numbers = itertools.count()
        self._ready: deque[_Call | _Timer] = deque()
        self._timers: list[_Timer] = []
        self._cancelled = 0  # of the timers
        self.set_task_factory(_task)

    def time(self) -> float:
        return self._now

    # What these return is all that asyncio uses of a handle.

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        call = _Call(callback, args, copy_context() if context is None else context)
        self._ready.append(call)
        return call

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there is only one thread

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        timer = _Timer(when)
        timer.callback, timer.args, timer.loop, timer.is_waiting = callback, args, self, True
        timer.context = copy_context() if context is None else context
        heappush(self._timers, timer)
        return timer

    def _run_once(self) -> None:
        """Advance the time if nothing is ready, since nothing arrives from outside; then call what is ready now."""
        self._sweep()
        ready, timers = self._ready, self._timers
        is_idle = not ready and not self._stopping  # type: ignore[attr-defined]
        if is_idle and not timers:
            raise SimDeadlock(f"nothing is ready and no timer is set at {self._now:.3f} s")
        resolution: float = self._clock_resolution  # type: ignore[attr-defined]
        if is_idle and timers[0] > self._now:
            self._advance()
        else:
            if timers and self._now < timers[0] <= self._now + resolution:
                self._now = float(timers[0])  # it is about to be called: none is called before its time
            self._spin()
        end = self._now + resolution
        while timers and timers[0] < end:
            timer = heappop(timers)
            timer.is_waiting = False
            ready.append(timer)
        for _ in range(len(ready)):
            call = ready.popleft()
            if call.callback is not None:
                try:
                    call.context.run(call.callback, *call.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 - as asyncio does
                    self.call_exception_handler({"message": "Exception in a callback", "exception": error})

    def _sweep(self) -> None:
        """Drop cancelled timers: all once they are the most, and those at the head of the heap."""
        timers = self._timers
        if len(timers) > _SWEEP_TIMERS and 2 * self._cancelled > len(timers):
            timers[:] = [timer for timer in timers if timer.callback is not None]
            heapify(timers)
            self._cancelled = 0
        while timers and timers[0].callback is None:
            heappop(timers)
            self._cancelled -= 1

    def _advance(self) -> None:
        self._spins = 0
        self._now = float(self._timers[0])
        if self._now > self._limit_seconds:
            raise SimDeadlock(f"virtual time passed its limit of {self._limit_seconds:g} s")

    def _spin(self) -> None:
        self._spins += 1
        if self._spins > SPINS:
            self._spins = 0  # clean-up code may still run
            raise SimDeadlock(f"something spins: time stands still at {self._now:.3f} s")

    def create_future(self) -> asyncio.Future[Any]:
        future = _SimFuture(loop=self)
        future.number = next(self._numbers)
        return future

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
