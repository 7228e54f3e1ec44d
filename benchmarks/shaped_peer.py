"""One peer of `benchmarks.shaped` in a process of its own: `benchmarks.averaging_peer`, which also says when its data
phase ended: when the last part of the mean had come in, before the vote.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import uvloop

from benchmarks.averaging_peer import Peer, main
from benchmarks.averaging_setup import Setup
from protocols.allreduce.all_reduce import DATA
from protocols.base import Deadline, Handler, Host, PeerId, Stream, Transport


class DataPhaseTransport:
    """A `Transport` that notes when the latest data stream that it opened had delivered its part."""

    def __init__(self, transport: Transport) -> None:
        self.me, self._transport, self.ended = transport.me, transport, 0.0

    def serve(self, method: str, handler: Handler) -> None:
        self._transport.serve(method, handler)

    @asynccontextmanager
    async def open(self, peer: PeerId, method: str, deadline: Deadline) -> AsyncIterator[Stream]:
        async with self._transport.open(peer, method, deadline) as stream:
            yield stream
        if method == DATA:
            self.ended = time.monotonic()


class ShapedPeer(Peer):
    """This process."""

    def prepare(self, host: Host) -> None:
        self._watched = DataPhaseTransport(host.transport)
        super().prepare(replace(host, transport=self._watched))

    async def average(self, round: int, mark: float | None = None) -> dict[str, Any]:
        return await super().average(round, mark) | {"data_ended": self._watched.ended}


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the parent process is gone
        uvloop.run(main(Setup(**json.loads(sys.argv[1])), ShapedPeer))
