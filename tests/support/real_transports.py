"""Real libp2p transports for one test: p2pd processes that are gone when the test ends."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from node.network.libp2p import LibP2PConfig, LibP2PTransport
from node.runtime import identity
from tests.conformance.other_process import echo
from tests.conformance.worlds import running_daemons


def soon(seconds: float = 20.0) -> float:
    return asyncio.get_running_loop().time() + seconds


class TransportMaker(AsyncExitStack):
    """Opens transports, each with an identity of its own, and closes them at its exit.

    `directory` is for the identities and for the sockets: its path must be short. With a pool, they are the pool's.
    """

    def __init__(self, directory: Path, pool: Pool | None = None) -> None:
        super().__init__()
        self.directory, self.pool = directory, pool
        self._count = 0

    async def __call__(self, **changes: Any) -> LibP2PTransport:
        self._count += 1
        if self.pool:
            assert not changes
            return self.pool.transports[self._count - 1]
        key = identity.create(self.directory / f"peer{self._count}")
        config = dataclasses.replace(LibP2PConfig(key, runtime_directory=self.directory), **changes)
        return await self.enter_async_context(LibP2PTransport(config))

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
        if make.pool:
            return make.pool.run(make, test(*given, **fixtures))
        before = running_daemons()
        with _new_loop() as runner:
            runner.run(_run(make, test(*given, **fixtures)))
        assert running_daemons() == before
        assert list(make.directory.glob("starling-*")) == []

    return run


def _new_loop() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


async def _run(make: TransportMaker, test: Coroutine[Any, Any, None]) -> None:
    async with make:
        await test
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Pool:
    """Transports that several tests use, one after the other, because none of them disturbs one."""

    def __init__(self, directory: Path, count: int) -> None:
        self._runner, self._make = _new_loop(), TransportMaker(directory)
        self.transports = self._runner.run(self._open(count))

    async def _open(self, count: int) -> list[LibP2PTransport]:
        return [await self._make() for _ in range(count)]

    def run(self, make: TransportMaker, test: Coroutine[Any, Any, None]) -> None:
        self._runner.run(self._run(make, test))

    async def _run(self, make: TransportMaker, test: Coroutine[Any, Any, None]) -> None:
        before = asyncio.all_tasks()
        async with make:
            await test
        async with asyncio.timeout(20):
            while asyncio.all_tasks() != before:  # noqa: ASYNC110 - streams that are served end after their callers
                await asyncio.sleep(0.01)
        for each in self.transports:
            each._serving._handlers.clear()
            each.refused.clear()

    def close(self) -> None:
        self._runner.run(self._make.aclose())
        self._runner.close()
