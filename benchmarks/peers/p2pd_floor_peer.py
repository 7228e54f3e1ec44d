"""The floor of p2pd: each peer sends the bytes of a round to the next one over one plain libp2p stream (`move`)."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

import uvloop

from benchmarks.averaging_peer import Peer, main
from benchmarks.averaging_setup import Setup
from node.network.libp2p import LibP2PTransport
from node.runtime import identity
from node.runtime.compute import ThreadCompute


class P2pdFloorPeer(Peer):
    """This process."""

    _sent = 0

    def __init__(
        self, setup: Setup, transport: LibP2PTransport, compute: ThreadCompute, key: identity.Identity
    ) -> None:
        super().__init__(replace(setup, elements=0), transport, compute, key)  # without vectors
        self.setup = setup

    async def make(self, round: int) -> dict[str, Any]:
        return {}

    async def form(self, round: int) -> dict[str, Any]:
        return {}

    async def average(self, round: int, mark: float | None = None) -> dict[str, Any]:
        answer = await self.move()  # returns once the receiver has said that it has all
        self._sent = answer["sent"]
        return answer

    async def check(self) -> dict[str, Any]:
        return {"whole": self._sent >= self.setup.moved_bytes}


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the parent process is gone
        uvloop.run(main(Setup(**json.loads(sys.argv[1])), P2pdFloorPeer))
