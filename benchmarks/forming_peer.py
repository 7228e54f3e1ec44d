"""One peer of `benchmarks.forming` in a process of its own. It takes the commands of `benchmarks.averaging_peer`, and:

form {round, at, late}  one round. The peer enters, offers half of its work, and at CLOCK_MONOTONIC `at` + `late`
                        seconds all of it. Prints when it offered, was called, and saw the first byte of a vector
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import uvloop

from benchmarks.averaging_peer import ROOT, RUN, Peer, main
from benchmarks.averaging_setup import Setup
from protocols.allreduce.all_reduce import DATA
from protocols.base import (
    AveragingSession,
    Buffer,
    Deadline,
    Handler,
    Head,
    Header,
    Host,
    IndependentAverager,
    LocalProgress,
    Member,
    PeerId,
    RoundKey,
    Settings,
    Stream,
    Transport,
)
from protocols.consensus.messages import Certificate
from protocols.moshpit.group_allreduce import DATA as MOSHPIT_DATA
from protocols.registry import load_averager

DATA_METHODS = {DATA, MOSHPIT_DATA}


class FirstByte:
    """When the first byte of a vector was sent or received, in seconds of CLOCK_MONOTONIC; inf before."""

    def __init__(self) -> None:
        self.at = math.inf

    def note(self) -> None:
        self.at = min(self.at, time.monotonic())


class NotedStream:
    """A `Stream` that notes the first payload: once the transport has taken it, or delivered it."""

    def __init__(self, stream: Stream, first: FirstByte) -> None:
        self._stream, self._first = stream, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, header: Header, payload: Buffer = b"") -> None:
        await self._stream.send(header, payload)
        if len(payload):
            self._first.note()

    async def receive_into(self, buffer: memoryview) -> None:
        await self._stream.receive_into(buffer)
        self._first.note()


class NotedTransport:
    """A `Transport` that notes the first payload on a data stream."""

    def __init__(self, transport: Transport) -> None:
        self.me, self._transport, self.first = transport.me, transport, FirstByte()

    def serve(self, method: str, handler: Handler) -> None:
        async def noted(peer: PeerId, stream: Stream) -> None:
            await handler(peer, self._noted(method, stream))

        self._transport.serve(method, noted)

    @asynccontextmanager
    async def open(self, peer: PeerId, method: str, deadline: Deadline) -> AsyncIterator[Stream]:
        async with self._transport.open(peer, method, deadline) as stream:
            yield self._noted(method, stream)

    def _noted(self, method: str, stream: Stream) -> Stream:
        return NotedStream(stream, self.first) if method in DATA_METHODS else stream


class FormingPeer(Peer):
    """This process."""

    def prepare(self, host: Host) -> None:
        self._noted = NotedTransport(self.transport)
        host = replace(host, transport=self._noted)
        super().prepare(host)
        settings = Settings(self.setup.codec, (self.setup.elements,), bandwidth=self.setup.bandwidth)
        self._moshpit: IndependentAverager = load_averager("moshpit")(host, settings)

    async def form(self, round: int, at: float, late: float, protocol: str) -> dict[str, Any]:
        deadline = asyncio.get_running_loop().time() + self.setup.deadline_seconds
        self._noted.first = FirstByte()
        async with self._enter(protocol, round, deadline) as session:
            session.offer(self._work(complete=False))
            await asyncio.sleep(max(0.0, at + late - time.monotonic()))
            offered = time.monotonic()
            session.offer(work := self._work(complete=True))
            await session.cut.wait()
            called = time.monotonic()
            mean = await session.average([self._mine], work, [self._into])
        if protocol == "butterfly":
            assert isinstance(mean.certificate, Certificate)
            self._chain.extend(mean.certificate)
            self._chain.settle(ROOT)
        counted = sum(each.chunks_counted == each.chunks for each in mean.contributions.values())
        first = self._noted.first.at
        return {"offered": offered, "called": called, "first": first, "counted": counted, "outcome": mean.outcome}

    def _work(self, complete: bool) -> LocalProgress:
        tokens = self.setup.tokens(self.setup.rank) // (1 if complete else 2)
        return LocalProgress(tokens, loss=0.0, seconds=1.0, norm=self._norm, complete=complete)

    def _enter(self, protocol: str, round: int, deadline: Deadline) -> AbstractAsyncContextManager[AveragingSession]:
        if protocol == "butterfly":
            return self._averager.enter(self._chain.head, deadline)
        key = RoundKey(RUN, "benchmark", bytes(32), round)
        return self._moshpit.enter(Head(key, (Member(self.transport.me),), ROOT, ROOT), deadline)


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the parent process is gone
        uvloop.run(main(Setup(**json.loads(sys.argv[1])), FormingPeer))
