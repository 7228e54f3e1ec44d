"""One of our peers: `benchmarks.averaging_peer`, with the forming of the group and the data phase as two commands.

`form` enters the round, offers this peer's work and waits until the round is called. `average` is the data phase and
the vote, until this peer holds the mean.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from contextlib import suppress
from typing import Any

import uvloop

from benchmarks.averaging_peer import Peer, main
from benchmarks.averaging_setup import Setup
from benchmarks.peers import vectors
from protocols.base import Outcome
from protocols.vectors.views import norm


class NotCommittedError(Exception):
    """The round has no mean."""


class OursPeer(Peer):
    """This process."""

    _round: asyncio.Task[dict[str, Any]] | None = None

    async def make(self, round: int) -> dict[str, Any]:
        def read() -> None:
            vectors.load(self.setup, self._mine)
            self._norm = norm([self._mine])
            self._into.fill_(math.nan)

        await self._compute.run(read, 4 * self.setup.elements)
        return {}

    async def form(self, round: int) -> dict[str, Any]:
        began = time.monotonic()
        self._called, self._go = asyncio.Event(), asyncio.Event()
        self._round = asyncio.create_task(super().average(round))
        called = asyncio.create_task(self._called.wait())
        await asyncio.wait({self._round, called}, return_when=asyncio.FIRST_COMPLETED)
        if self._round.done():
            called.cancel()
            await self._round  # it failed
        return {"began": began, "ended": time.monotonic()}

    async def on_cut(self) -> None:
        self._called.set()
        await self._go.wait()

    async def average(self, round: int, mark: float | None = None) -> dict[str, Any]:
        assert self._round is not None
        self._go.set()
        answer = await self._round
        if answer["outcome"] != Outcome.COMMITTED:
            raise NotCommittedError(f"round {round}: {answer['outcome']}; blamed: {answer['blamed']}")
        return answer

    async def check(self) -> dict[str, Any]:
        return await self._compute.run(lambda: vectors.checked(self.setup, self._into), 4 * self.setup.elements)


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the parent process is gone
        uvloop.run(main(Setup(**json.loads(sys.argv[1])), OursPeer))
