"""Small messages to peers, and the account of a round: bytes that crossed streams, peers that broke rules."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from protocols.base import BadPayload, Blame, Deadline, Header, Host, PeerError, PeerId, Stream

RETRY_SECONDS = 0.1
RETRY_LIMIT_SECONDS = 5.0


class Ledger:
    """What is accounted for between two reports. The first reason that names a peer stays."""

    def __init__(self) -> None:
        self._names: dict[PeerId, str] = {}
        self._bytes_sent = 0
        self._bytes_received = 0
        self._open: dict[Stream, tuple[int, int]] = {}  # what is counted already of each

    def name(self, peer: PeerId, why: str) -> None:
        self._names.setdefault(peer, why)

    @asynccontextmanager
    async def counting(self, stream: Stream) -> AsyncIterator[Stream]:
        """Count a stream's bytes while it is used, and name its peer if it broke a rule."""
        self._open[stream] = (0, 0)
        try:
            yield stream
        except BadPayload as error:
            self.name(stream.peer, f"refused: {error}")
            raise
        finally:
            self._count(stream)
            del self._open[stream]

    def _count(self, stream: Stream) -> None:
        sent, received = self._open[stream]
        self._bytes_sent += stream.bytes_sent - sent
        self._bytes_received += stream.bytes_received - received
        self._open[stream] = (stream.bytes_sent, stream.bytes_received)

    def take(self) -> tuple[tuple[Blame, ...], int, int]:
        """Who was named, bytes sent, bytes received; since the last call."""
        for stream in self._open:
            self._count(stream)
        taken = tuple(Blame(peer, why) for peer, why in self._names.items()), self._bytes_sent, self._bytes_received
        self._names, self._bytes_sent, self._bytes_received = {}, 0, 0
        return taken


class Post:
    """Sends control messages in the background, each on a stream of its own, until `close`."""

    def __init__(self, host: Host, method: str, ledger: Ledger, group: asyncio.TaskGroup, deadline: Deadline) -> None:
        self._host, self._method, self._ledger, self._group, self._deadline = host, method, ledger, group, deadline
        self._tasks: dict[asyncio.Task[None], None] = {}

    def send(self, peer: PeerId, message: Header) -> None:
        """Send once, again after a failure until the deadline: messages are idempotent."""
        task = self._group.create_task(self._send(peer, message))
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    async def _send(self, peer: PeerId, message: Header) -> None:
        loop = asyncio.get_running_loop()
        pause_seconds = RETRY_SECONDS
        while loop.time() < self._deadline:
            try:
                async with (
                    self._host.transport.open(peer, self._method, self._deadline) as stream,
                    self._ledger.counting(stream),
                ):
                    return await stream.send(message)
            except PeerError:
                await asyncio.sleep(min(pause_seconds, max(0.0, self._deadline - loop.time())))
                pause_seconds = min(2 * pause_seconds, RETRY_LIMIT_SECONDS)
