"""Holds back low-priority work while the data phase of a round needs the link and the disk."""

from __future__ import annotations

import asyncio

from protocols.aio import Notifier
from protocols.base import Deadline


class Gate:
    """Is closed until it is opened, or until a deadline. One owner closes it; any number of tasks may wait."""

    def __init__(self) -> None:
        self._until = float("-inf")
        self._notifier = Notifier()

    @property
    def closed(self) -> bool:
        return asyncio.get_running_loop().time() < self._until

    def close(self, until: Deadline) -> None:
        """Close the gate until `until` at the latest. Replaces an earlier deadline."""
        self._until = until

    def open(self) -> None:
        """Open the gate and wake the waiting tasks."""
        self._until = float("-inf")
        self._notifier.notify()

    async def passed(self, seconds: float) -> bool:
        """Wait at most `seconds` until the gate is open. Returns whether it is open."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self.closed and loop.time() < deadline:
            await self._notifier.reached(lambda: not self.closed, min(deadline, self._until))
        return not self.closed
