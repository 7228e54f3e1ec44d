"""What a peer does: it works, rests or is away. Its heartbeats say so."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from enum import IntEnum
from typing import Any, TypeVar

from protocols.aio import Notifier

T = TypeVar("T")


class Activity(IntEnum):
    """The values are those of `node.membership.hello.Heartbeat.idle`.

    A resting peer keeps its worker and, with replicated state, its seat in the roster. One that is away has left the
    roster, and its worker has ended. With independent state, a resting peer exchanges nothing, so to others it is away.
    """

    WORK = 0
    REST = 1
    AWAY = 2


class ActivitySwitch:
    """What a peer has been asked to do (`wanted`), and what it tells others of itself."""

    def __init__(self) -> None:
        self.wanted, self.released = Activity.WORK, False  # whether its worker ended in the last absence
        self.announce: Callable[[Activity], None] = lambda activity: None  # tells the other peers at once
        self._told = Activity.WORK
        self._changed = Notifier()

    @property
    def pauses(self) -> bool:
        return self.wanted is not Activity.WORK

    def set(self, wanted: Activity) -> None:
        """Ask for another activity. A peer that is asked to be away rests until it can be."""
        self.wanted = wanted
        if wanted is Activity.WORK or self._told is not Activity.AWAY:
            self.tell(min(wanted, Activity.REST))

    def tell(self, activity: Activity) -> None:
        if activity is not self._told:
            self._told = activity
            self.announce(activity)

    def wake(self) -> None:
        self._changed.notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        await self._changed.until(condition, math.inf)

    async def unless(self, condition: Callable[[], bool], work: Coroutine[Any, Any, T]) -> T | None:
        """Do some work, or return None: it is cancelled when the condition holds."""
        working = asyncio.ensure_future(work)
        asked = asyncio.create_task(self.until(condition))
        try:
            await asyncio.wait([working, asked], return_when=asyncio.FIRST_COMPLETED)
            return await working if working.done() else None
        finally:
            for each in (working, asked):
                each.cancel()
            await asyncio.wait([working, asked])
