"""What can wait lets what others wait for go first: the link, and the disk, while a round's data phase is under way."""

from __future__ import annotations

import asyncio

from protocols.aio import Notifier
from protocols.base import Deadline


class Gate:
    """Closed for a time, or until it is opened again. It belongs to who closes it; any number may wait."""

    def __init__(self) -> None:
        self._until = float("-inf")
        self._notifier = Notifier()

    @property
    def closed(self) -> bool:
        return asyncio.get_running_loop().time() < self._until

    def close(self, until: Deadline) -> None:
        """From now until then at most, whatever was said before."""
        self._until = until

    def open(self) -> None:
        """Let all pass who wait."""
        self._until = float("-inf")
        self._notifier.notify()

    async def passed(self, seconds: float) -> bool:
        """Wait until it is open, at most so long; returns whether it is."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self.closed and loop.time() < deadline:
            await self._notifier.reached(lambda: not self.closed, min(deadline, self._until))
        return not self.closed
