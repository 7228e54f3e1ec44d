"""Real libp2p transports that several tests use, one after the other: a p2pd takes half a processor second to start."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop

from node.direct.plane import DirectPlane
from node.network.libp2p import LibP2PTransport
from node.runtime import identity

_SETTLED_SECONDS = 20.0

Body = Callable[[list[LibP2PTransport]], Awaitable[None]]


def new_loop() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def running_daemons() -> list[int]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == "p2pd"]


@asynccontextmanager
async def direct_plane(transport: LibP2PTransport, methods: Container[str]) -> AsyncIterator[DirectPlane]:
    """Give a transport a direct data plane that knows nobody yet."""
    made = transport._direct = transport.make_direct_plane(methods)
    made.start(["127.0.0.1"])
    try:
        yield made
    finally:
        await made.close()
        transport._direct = None


class Pool:
    """Transports on an event loop of their own. Each test may leave no task behind; a transport that it harms goes."""

    def __init__(self, connected: bool = False) -> None:
        self.harmed: set[LibP2PTransport] = set()
        self.connected = connected
        self._runner = new_loop()
        self._transports: list[LibP2PTransport] = []
        self._directory = tempfile.TemporaryDirectory(prefix="st")

    def run(self, body: Body, count: int = 2) -> None:
        while len(self._transports) < count:
            self._runner.run(self._open())
        self._runner.run(self._run(body, count))

    async def _run(self, body: Body, count: int) -> None:
        before = asyncio.all_tasks()
        try:
            await body(self._transports[:count])
        except BaseException:
            self.harmed.update(self._transports)
            raise
        finally:
            for transport in self.harmed:
                await transport.__aexit__()
            self._transports = [each for each in self._transports if each not in self.harmed]
            self.harmed = set()
        for each in self._transports:
            each._serving._handlers.clear()
            each.refused.clear()
        await self._settle(before)

    async def _open(self) -> None:
        key = identity.create(Path(self._directory.name) / f"peer{len(os.listdir(self._directory.name))}")
        transport = LibP2PTransport(key)
        await transport.__aenter__()
        for other in self._transports if self.connected else ():
            for one, another in ((transport, other), (other, transport)):
                await one.connect(another.addresses[0], asyncio.get_running_loop().time() + 20)
        self._transports.append(transport)

    async def _settle(self, before: set[asyncio.Task[object]]) -> None:
        """Streams that are served end after their callers."""
        until = asyncio.get_running_loop().time() + _SETTLED_SECONDS
        while left := asyncio.all_tasks() - before:
            assert asyncio.get_running_loop().time() < until, f"tasks were left behind: {left}"
            await asyncio.sleep(0.01)

    def close(self) -> None:
        with self._directory:
            mine = {transport.daemon_pid for transport in self._transports}
            for transport in self._transports:
                self._runner.run(transport.__aexit__())
            left = self._runner.get_loop()
            assert not asyncio.all_tasks(left), "a task was left behind"
            self._runner.close()
        assert mine.isdisjoint(running_daemons()), "a p2pd was left behind"
