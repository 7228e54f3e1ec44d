"""One of our peers: `benchmarks.averaging_peer`, for vectors that all systems share.

`average` is a whole round: the offers, the call, the data phase and the vote, until this peer holds the mean. Nothing
waits for the benchmark in between, because the times within which the members expect each other run from the call.
"""

from __future__ import annotations

import json
import math
import sys
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

    async def make(self, round: int) -> dict[str, Any]:
        def read() -> None:
            vectors.load(self.setup, self._mine)
            self._norm = norm([self._mine])
            self._into.fill_(math.nan)

        await self._compute.run(read, 4 * self.setup.elements)
        return {}

    async def form(self, round: int) -> dict[str, Any]:
        return {}

    async def average(self, round: int, mark: float | None = None) -> dict[str, Any]:
        answer = await super().average(round, mark)
        if answer["outcome"] != Outcome.COMMITTED:
            raise NotCommittedError(f"round {round}: {answer['outcome']}; blamed: {answer['blamed']}")
        return answer

    async def check(self) -> dict[str, Any]:
        return await self._compute.run(lambda: vectors.checked(self.setup, self._into), 4 * self.setup.elements)


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the parent process is gone
        uvloop.run(main(Setup(**json.loads(sys.argv[1])), OursPeer))
