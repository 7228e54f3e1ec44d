"""Small things that asyncio leaves to its users."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from protocols.base import Deadline, Member, Members, PeerId, PeerSilent

T = TypeVar("T")


class Notifier:
    """Wakes everyone who waits for a condition; state stays with its owner."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event.clear()

    async def until(self, condition: Callable[[], bool], deadline: Deadline) -> None:
        """Wait until `condition()` holds; it is asked again at each ring.

        Raises:
            TimeoutError: it did not before the deadline.
        """
        async with asyncio.timeout_at(deadline):
            while not condition():
                await self._event.wait()


async def run_with_helper(main: Coroutine[Any, Any, T], helper: Coroutine[Any, Any, None]) -> T:
    """Run `helper` while `main` runs; the helper is cancelled when `main` returns.

    Raises:
        whatever either raises first; the other is cancelled and awaited.
    """
    async with task_group() as group:
        side = group.create_task(helper)
        result = await group.create_task(main)
        side.cancel()
    return result


class _Group(asyncio.TaskGroup):
    """A task group that knows its tasks."""

    def __init__(self) -> None:
        super().__init__()
        self._running: dict[asyncio.Task[Any], None] = {}

    def create_task(self, coro: Any, **more: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **more)
        self._running[task] = None
        task.add_done_callback(lambda task: self._running.pop(task, None))
        return task

    async def end(self) -> None:
        """Wait for all tasks, however long."""
        while self._running:
            await asyncio.wait(list(self._running))


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first error reaches the caller as itself, not in a group of errors.

    Python 3.11 forgets that a group was cancelled if one of its tasks fails in the same moment; and if one fails while
    the group waits for the last of them, it leaves behind a cancellation that nobody asked for. This one does neither.
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


async def until_gone(members: Members, watched: Sequence[Member], deadline: Deadline) -> list[PeerId]:
    """Wait until one of them is not believed alive any more, in this life: which those are. Nobody: the deadline."""
    loop = asyncio.get_running_loop()
    while loop.time() < deadline:
        version, live = members.version, members.live()
        if gone := [member.peer for member in watched if member not in live]:
            return gone
        await members.changed(version, deadline)
    return []


@asynccontextmanager
async def peer_timeout(seconds: float, peer: PeerId, doing: str) -> AsyncIterator[None]:
    """A shorter deadline than the stream's own; the stream is not to be used after it.

    Raises:
        PeerSilent: it has passed.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise PeerSilent(peer, f"nothing moved for {seconds:g} s while {doing}") from None


@asynccontextmanager
async def set_at(event: asyncio.Event, deadline: Deadline) -> AsyncIterator[None]:
    """Inside this context, set the event at the deadline."""
    timer = asyncio.get_running_loop().call_at(deadline, event.set)
    try:
        yield
    finally:
        timer.cancel()
