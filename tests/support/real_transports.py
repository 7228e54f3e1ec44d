"""Real libp2p transports for one test: p2pd processes that are gone when the test ends."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from node.network.libp2p import LibP2PTransport
from node.runtime import identity
from tests.conformance.other_process import echo
from tests.support.transport_pool import Pool, new_loop, running_daemons


def soon(seconds: float = 20.0) -> float:
    return asyncio.get_running_loop().time() + seconds


class TransportMaker(AsyncExitStack):
    """Opens transports, each with an identity of its own, and closes them at its exit.

    `directory` is for the identities and for the sockets: its path must be short. With a pool, its two are given out.
    """

    def __init__(self, directory: Path, pool: Pool | None = None) -> None:
        super().__init__()
        self.directory, self.pool = directory, pool
        self.pooled: list[LibP2PTransport] = []
        self._count = 0

    async def __call__(self, **changes: Any) -> LibP2PTransport:
        self._count += 1
        if self.pool:
            assert not changes
            return self.pooled[self._count - 1]
        key = identity.create(self.directory / f"peer{self._count}")
        given = {"runtime_directory": self.directory} | changes
        return await self.enter_async_context(LibP2PTransport(given.pop("identity", key), **given))

    async def pair(self, **changes: Any) -> tuple[LibP2PTransport, LibP2PTransport]:
        """Two transports of which the first is connected to the second; that one serves `echo`."""
        first, second = await self(**changes), await self(**changes)
        second.serve("echo", echo)
        await first.connect(second.addresses[0], soon())
        return first, second


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that opens its transports by the fixture `make`. It may leave no task, daemon or socket behind."""

    @functools.wraps(test)
    def run(*given: Any, **fixtures: Any) -> None:
        make: TransportMaker = fixtures["make"]

        async def pooled(transports: list[LibP2PTransport]) -> None:
            make.pooled = transports
            async with make:
                await test(*given, **fixtures)

        if make.pool:
            return make.pool.run(pooled)
        before = running_daemons()
        with new_loop() as runner:
            runner.run(_run(make, test(*given, **fixtures)))
        assert running_daemons() == before
        assert list(make.directory.glob("starling-*")) == []

    return run


async def _run(make: TransportMaker, test: Coroutine[Any, Any, None]) -> None:
    async with make:
        await test
    assert asyncio.all_tasks() == {asyncio.current_task()}
