"""Implementations of `Transport` that the conformance suite runs over, each with its own event loop and faults.

To add one, write a `World` whose `run` makes an event loop and gives `body` an object like `Peers`, and add it to
`WORLDS`. The transports must know each other's addresses.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

from node.direct.connection import DirectConnection
from node.direct.plane import DirectPlane
from node.network.libp2p import LibP2PTransport
from node.runtime import identity
from protocols.base import Deadline, PeerId, Transport
from tests.conformance.simulated import SimWorld
from tests.support.transport_pool import Pool, direct_plane
from tests.support.waiting import until

GENEROUS_SECONDS = 20.0


def soon(seconds: float = GENEROUS_SECONDS) -> Deadline:
    return asyncio.get_running_loop().time() + seconds


class Peers(Protocol):
    """Peers in one process that know each other, and faults that can be brought upon them."""

    @property
    def transports(self) -> Sequence[Transport]: ...

    stranger: PeerId
    """A well-formed id of an unreachable peer."""
    streams_survive_daemon: bool
    """Streams go on when the daemon dies."""

    async def kill_peer(self, index: int) -> None:
        """End it for good and without notice."""

    async def kill_daemon(self, index: int) -> None:
        """End its daemon; it keeps its id and its handlers. Returns when it can be reached again.

        Its streams are reset, unless they survive it.
        """

    async def break_streams(self, index: int) -> None:
        """Reset its streams. Returns when it can be reached again."""

    async def freeze_peer(self, index: int) -> None:
        """Stop it from answering, without notice to the others."""

    def resources(self) -> int:
        """The number of tasks, file descriptors and the like of this process."""


Body = Callable[[Peers], Awaitable[None]]


class World(Protocol):
    def run(self, body: Body, count: int = 2) -> None:
        """Run `body` with `count` peers."""


class LibP2PPeers:
    """Real p2pds on the loopback."""

    streams_survive_daemon = False

    def __init__(self, transports: Sequence[LibP2PTransport], stranger: PeerId, pool: Pool) -> None:
        self.transports = transports
        self.stranger = stranger
        self._harmed = pool.harmed

    def _signal(self, index: int, number: int) -> None:
        pid = self.transports[index].daemon_pid
        assert pid is not None
        self._harmed.add(self.transports[index])
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    async def kill_peer(self, index: int) -> None:
        self.transports[index]._supervision.cancel()
        self._signal(index, signal.SIGKILL)

    async def kill_daemon(self, index: int) -> None:
        before = self.transports[index].restarts
        self._signal(index, signal.SIGKILL)
        await until(lambda: self.transports[index].restarts > before)

    async def break_streams(self, index: int) -> None:
        await self.kill_daemon(index)

    async def freeze_peer(self, index: int) -> None:
        self._harmed.add(self.transports[index])
        await freeze(self.transports[index].daemon_pid)

    def thaw(self) -> None:
        for index, transport in enumerate(self.transports):
            if transport in self._harmed and transport.daemon_pid is not None:
                self._signal(index, signal.SIGCONT)

    def resources(self) -> int:
        return len(asyncio.all_tasks()) + len(os.listdir("/proc/self/fd"))


class LibP2PWorld:
    """Peers of a pool, which tests use one after the other."""

    peers: type[LibP2PPeers] = LibP2PPeers

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def run(self, body: Body, count: int = 2) -> None:
        async def whole(transports: list[LibP2PTransport]) -> None:
            with tempfile.TemporaryDirectory() as directory:
                stranger = identity.create(Path(directory) / "stranger").peer_id
            peers = self.peers(transports, stranger, self._pool)
            try:
                async with self.planes(transports):
                    await body(peers)
            finally:
                peers.thaw()

        self._pool.run(whole, count)

    def planes(self, transports: list[LibP2PTransport]) -> AbstractAsyncContextManager[object]:
        return nullcontext()


class EveryMethod:
    """A set of methods that holds all of them."""

    def __contains__(self, method: object) -> bool:
        return True


class DirectPeers(LibP2PPeers):
    """The same, with all streams over direct connections."""

    streams_survive_daemon = True

    def _plane(self, index: int) -> DirectPlane:
        plane = self.transports[index]._direct
        assert plane is not None
        return plane

    def _connections(self, index: int) -> list[DirectConnection]:
        mine = self._plane(index)
        return [*mine._inbound._served, *mine._connections]

    async def kill_peer(self, index: int) -> None:
        await super().kill_peer(index)
        await self._plane(index).close()  # as the kernel does for a process that ends

    async def break_streams(self, index: int) -> None:
        for connection in self._connections(index):
            connection.abort()

    async def freeze_peer(self, index: int) -> None:
        await super().freeze_peer(index)
        loop = asyncio.get_running_loop()
        for listening in self._plane(index)._inbound.listener._sockets:
            loop.remove_reader(listening)  # the kernel still accepts
        for connection in self._connections(index):
            connection._receive = connection._write_record = _for_ever  # type: ignore[method-assign]


async def _for_ever(*_: Any, **__: Any) -> None:
    await asyncio.Event().wait()


class DirectWorld(LibP2PWorld):
    """The same peers with direct data planes, which carry every method."""

    peers = DirectPeers

    @asynccontextmanager
    async def planes(self, transports: list[LibP2PTransport]) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for transport in transports:
                await stack.enter_async_context(direct_plane(transport, EveryMethod()))
            yield


async def freeze(pid: int | None) -> None:
    """Stop a process and wait until it has stopped: on a busy machine its threads go on for a while."""
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: _is_stopped(pid))


def _is_stopped(pid: int) -> bool:
    stats = [thread.joinpath("stat").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.rpartition(") ")[2].startswith("T") for stat in stats)


WORLDS: dict[str, Callable[[Pool], World]] = {"sim": lambda _: SimWorld(), "libp2p": LibP2PWorld, "direct": DirectWorld}


def in_each_world(count: int = 2) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Make a test of a coroutine function with an argument `peers`: it runs in each world, with this many peers."""

    def decorate(body: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def test(*arguments: Any, world: World, **options: Any) -> None:
            world.run(lambda peers: body(*arguments, peers=peers, **options), count)

        functools.update_wrapper(test, body)
        del test.__wrapped__  # type: ignore[attr-defined] # pytest must see the fixture `world` in the signature
        signature = inspect.signature(body)
        parameters = [
            each.replace(name="world", kind=each.KEYWORD_ONLY) if each.name == "peers" else each
            for each in signature.parameters.values()
        ]
        parameters.sort(key=lambda each: each.kind)
        test.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return test

    return decorate
