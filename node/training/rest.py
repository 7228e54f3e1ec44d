"""How a trainer rests between two steps: without a clock, until it is told to work or the round is cut."""

from __future__ import annotations

import asyncio

from protocols.aio import Notifier, run_with_helper

LOOK_SECONDS = 3600.0
"""The gate is looked at again after this time at the latest."""


class RestGate:
    """Holds a trainer between two steps while it rests.

    Attributes:
        resting: whether no step may begin.
    """

    def __init__(self) -> None:
        self.resting = False
        self._changed = Notifier()

    def rest(self, resting: bool) -> None:
        """Close or open the gate."""
        self.resting = resting
        self._changed.notify()

    async def opened(self, cut: asyncio.Event) -> None:
        """Wait until the gate is open, or the round is cut; its deadline sets the cut."""

        async def watch() -> None:
            await cut.wait()
            self._changed.notify()

        async def wait() -> None:
            while self.resting and not cut.is_set():
                deadline = asyncio.get_running_loop().time() + LOOK_SECONDS
                await self._changed.reached(lambda: not self.resting or cut.is_set(), deadline)

        await run_with_helper(wait(), watch())
