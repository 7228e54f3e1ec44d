"""Small additions to asyncio: a notifier, task groups, sub-deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from protocols.base import Deadline, Member, Members, PeerId, PeerSilent, Stream

T = TypeVar("T")

_MOST_RENEWED = 8


def loop_time() -> float:
    """The running loop's time in seconds, in which every `Deadline` is measured."""
    return asyncio.get_running_loop().time()


class Notifier:
    """Wakes the tasks that wait for a condition. The state that the condition reads stays with its owner."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event.clear()

    async def until(self, condition: Callable[[], bool], deadline: Deadline) -> None:
        """Wait until `condition()` holds, or raise `TimeoutError`. It is checked at once and after each `notify`."""
        if condition():
            return
        async with asyncio.timeout_at(deadline):
            await self._event.wait()
            while not condition():
                await self._event.wait()

    async def reached(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait as `until` does; False at the deadline."""
        try:
            await self.until(condition, deadline)
        except TimeoutError:
            return False
        return True


async def before(deadline: Deadline, work: Coroutine[Any, Any, T]) -> T:
    """Do `work`; `TimeoutError` if it still waits at the deadline.

    A timer is set only if it has to wait at all: most reads and writes of small messages need not.
    """
    try:
        waits_for = work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    async with asyncio.timeout_at(deadline):
        rest: T = await _Continued(work, waits_for)
        return rest


class _Continued:
    """The rest of a coroutine that has begun, and waits for `first`: its own steps, after that one."""

    def __init__(self, work: Coroutine[Any, Any, T], first: Any) -> None:
        self._work, self._first = work, [first]
        self.throw, self.close = work.throw, work.close

    def __await__(self) -> Generator[Any, Any, Any]:
        return self  # type: ignore[return-value]  # a generator's methods are all here

    def __next__(self) -> Any:
        return self._first.pop() if self._first else self._work.send(None)


async def run_with_helper(main: Coroutine[Any, Any, T], helper: Coroutine[Any, Any, None]) -> T:
    """Run `helper` while `main` runs. The first exception of either is raised, and the other is cancelled."""
    async with task_group() as group:
        side = group.create_task(helper)
        result = await group.create_task(main)
        side.cancel()
    return result


class _Group(asyncio.TaskGroup):
    def __init__(self) -> None:
        super().__init__()
        self._running: dict[asyncio.Task[Any], None] = {}

    def create_task(self, coro: Any, **more: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **more)
        self._running[task] = None
        task.add_done_callback(lambda task: self._running.pop(task, None))
        return task

    async def end(self) -> None:
        while self._running:
            await asyncio.wait(list(self._running))


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises its first error itself instead of an exception group.

    It also avoids two defects of Python 3.11: a group forgets that it was cancelled if one of its tasks fails at the
    same moment, and a task that fails while the group waits for its last tasks leaves a stray cancellation behind.
    """
    task = asyncio.current_task()
    assert task is not None
    cancelled = task.cancelling()
    try:
        async with _Group() as group:
            yield group
            await group.end()
    except BaseExceptionGroup as errors:
        if task.cancelling() > cancelled:
            raise asyncio.CancelledError from None
        raise errors.exceptions[0] from None


async def raise_when_gone(members: Members, member: Member, deadline: Deadline) -> None:
    """Raise `PeerSilent` as soon as this incarnation of a peer is no longer live, or at the deadline."""
    while loop_time() < deadline:
        version = members.version
        if member not in members.live():
            raise PeerSilent(member.peer, "lost in the middle of it")
        await members.changed(version, deadline)
    raise PeerSilent(member.peer, "it did not end in time")


@asynccontextmanager
async def peer_timeout(seconds: float, peer: PeerId, doing: str) -> AsyncIterator[None]:
    """Give a step less time than its stream has, which must not be used after it. The peer is `doing` something."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise PeerSilent(peer, f"nothing moved for {seconds:g} s while {doing}") from None


@asynccontextmanager
async def progress_timeout(seconds: float, stream: Stream, doing: str) -> AsyncIterator[None]:
    """The same, but renewed while bytes move, up to eight times as long: a slow peer is not taken for a silent one."""
    loop = asyncio.get_running_loop()
    until = loop.time() + _MOST_RENEWED * seconds
    timer: asyncio.TimerHandle
    try:
        async with asyncio.timeout(seconds) as limit:

            def look(before: int) -> None:
                nonlocal timer
                if stream.moved_bytes != before and not limit.expired():
                    limit.reschedule(min(until, loop.time() + seconds))
                timer = loop.call_later(seconds / 8, look, stream.moved_bytes)

            look(stream.moved_bytes)
            try:
                yield
            finally:
                timer.cancel()
    except TimeoutError:
        raise PeerSilent(stream.peer, f"nothing moved for {seconds:g} s, or too little, while {doing}") from None


@asynccontextmanager
async def set_at(event: asyncio.Event, deadline: Deadline) -> AsyncIterator[None]:
    timer = asyncio.get_running_loop().call_at(deadline, event.set)
    try:
        yield
    finally:
        timer.cancel()


class Gate:
    """Is closed until it is opened, or until a deadline. One owner closes it; any number of tasks may wait."""

    def __init__(self) -> None:
        self._until = self._since = float("-inf")
        self._notifier = Notifier()

    @property
    def closed(self) -> bool:
        return loop_time() < self._until

    @property
    def closed_seconds(self) -> float:
        """How long it has been closed; 0 if it is open."""
        return loop_time() - self._since if self.closed else 0.0

    def close(self, until: Deadline) -> None:
        """Close the gate until `until` at the latest. Replaces an earlier deadline."""
        if not self.closed:
            self._since = loop_time()
        self._until = until

    def open(self) -> None:
        self._until = float("-inf")
        self._notifier.notify()

    async def passed(self, seconds: float) -> bool:
        """Wait at most `seconds` until the gate is open. Returns whether it is open."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self.closed and loop.time() < deadline:
            await self._notifier.reached(lambda: not self.closed, min(deadline, self._until))
        return not self.closed
