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
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

import uvloop

from node.direct.connection import DirectConnection
from node.direct.plane import DirectConfig, DirectPlane
from node.network.libp2p import LibP2PConfig, LibP2PTransport
from node.runtime import identity
from protocols.base import Deadline, PeerId, Transport
from tests.conformance.simulated import SimWorld

GENEROUS_SECONDS = 20.0


def soon(seconds: float = GENEROUS_SECONDS) -> Deadline:
    return asyncio.get_running_loop().time() + seconds


class Peers(Protocol):
    """Peers in one process that know each other, and faults that can be brought upon them."""

    transports: Sequence[Transport]
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
        """Run `body` in a new event loop, with `count` peers."""


class LibP2PPeers:
    """Real p2pds on the loopback."""

    streams_survive_daemon = False

    def __init__(self, transports: Sequence[LibP2PTransport], stranger: PeerId) -> None:
        self.transports = transports
        self.stranger = stranger

    def _signal(self, index: int, number: int) -> None:
        pid = self.transports[index].daemon_pid
        assert pid is not None
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    async def kill_peer(self, index: int) -> None:
        self.transports[index]._supervision.cancel()
        self._signal(index, signal.SIGKILL)

    async def kill_daemon(self, index: int) -> None:
        before = self.transports[index].restarts
        self._signal(index, signal.SIGKILL)
        async with asyncio.timeout(20):
            while self.transports[index].restarts == before:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def break_streams(self, index: int) -> None:
        await self.kill_daemon(index)

    async def freeze_peer(self, index: int) -> None:
        await freeze(self.transports[index].daemon_pid)

    def thaw(self) -> None:
        for index, transport in enumerate(self.transports):
            if transport.daemon_pid is not None:
                self._signal(index, signal.SIGCONT)

    def resources(self) -> int:
        return len(asyncio.all_tasks()) + len(os.listdir("/proc/self/fd"))


class LibP2PWorld:
    peers: type[LibP2PPeers] = LibP2PPeers
    direct: DirectConfig | None = None

    def run(self, body: Body, count: int = 2) -> None:
        with tempfile.TemporaryDirectory() as directory, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run(body, count, Path(directory)))
        assert not running_daemons(), "a p2pd was left behind"

    async def _run(self, body: Body, count: int, directory: Path) -> None:
        loop = asyncio.get_running_loop()
        keys = [identity.create(directory / f"peer{index}") for index in range(count)]
        async with AsyncExitStack() as stack:
            transports = [LibP2PTransport(LibP2PConfig(key, direct=self.direct)) for key in keys]
            await asyncio.gather(*(stack.enter_async_context(transport) for transport in transports))
            for transport in transports:
                for other in transports:
                    if other is not transport:
                        await transport.connect(other.addresses[0], loop.time() + 20)
            peers = self.peers(transports, identity.create(directory / "stranger").peer_id)
            try:
                await body(peers)
            finally:
                peers.thaw()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task was left behind"


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
        plane = self._plane(index)
        return [*plane._inbound._served, *plane._outbound._connections]

    async def kill_peer(self, index: int) -> None:
        await super().kill_peer(index)
        await self._plane(index).close()  # as the kernel does for a process that ends

    async def break_streams(self, index: int) -> None:
        for connection in self._connections(index):
            connection.abort()

    async def freeze_peer(self, index: int) -> None:
        await super().freeze_peer(index)
        plane, loop = self._plane(index), asyncio.get_running_loop()
        for listening in plane._inbound.listener._sockets:
            loop.remove_reader(listening)  # the kernel still accepts
        for connection in self._connections(index):
            connection._receive = connection._write_record = _for_ever  # type: ignore[method-assign]


async def _for_ever(_: object) -> None:
    await asyncio.Event().wait()


class DirectWorld(LibP2PWorld):
    """Peers with a direct data plane, which carries every method."""

    peers = DirectPeers
    direct = DirectConfig(EveryMethod())


async def freeze(pid: int | None) -> None:
    """Stop a process and wait until it has stopped: on a busy machine its threads go on for a while."""
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(20):
        while not _is_stopped(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _is_stopped(pid: int) -> bool:
    stats = [thread.joinpath("stat").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.rpartition(") ")[2].startswith("T") for stat in stats)


def running_daemons() -> list[int]:
    """The ids of p2pd processes that are children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == "p2pd"]


WORLDS: dict[str, Callable[[], World]] = {"sim": SimWorld, "libp2p": LibP2PWorld, "direct": DirectWorld}


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
