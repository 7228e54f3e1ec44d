"""Control messages to peers, and the accounting of a round: bytes on streams, and peers that broke rules."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from protocols.aio import run_with_helper
from protocols.base import (
    BadPayload,
    Deadline,
    Header,
    Host,
    PeerError,
    PeerFault,
    PeerGone,
    PeerId,
    PeerSilent,
    StoppedHere,
    Stream,
)

RECONNECT_SECONDS = 0.1
RECONNECT_LIMIT_SECONDS = 5.0
MAX_NAMED = 256  # limit of peers named between two reports: a stranger can use any number of peer ids
KEEP_MESSAGES = 64
"""Limit of messages kept for one peer: those to send, and those sent that may be lost. The oldest are dropped first."""


class RoundAccounting:
    """Counts bytes and names peers, each with its first reason, between two reports. Our own limits blame no peer."""

    def __init__(self) -> None:
        self._names: dict[PeerId, str] = {}
        self._stopped_here: set[PeerId] = set()
        self._bytes_sent = 0
        self._bytes_received = 0
        self._open: dict[Stream, tuple[int, int]] = {}  # bytes sent and received that are already counted

    def name(self, peer: PeerId, why: str) -> None:
        if len(self._names) < MAX_NAMED:
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
        except StoppedHere:
            if len(self._stopped_here) < MAX_NAMED:
                self._stopped_here.add(stream.peer)
            raise
        finally:
            self._count(stream)
            del self._open[stream]

    def _count(self, stream: Stream) -> None:
        sent, received = self._open[stream]
        self._bytes_sent += stream.bytes_sent - sent
        self._bytes_received += stream.bytes_received - received
        self._open[stream] = (stream.bytes_sent, stream.bytes_received)

    def take(self) -> tuple[tuple[PeerFault, ...], int, int]:
        """Return the peers named, bytes sent and bytes received since the last call, and begin anew."""
        for stream in self._open:
            self._count(stream)
        faults = tuple(PeerFault(peer, why) for peer, why in self._names.items() if peer not in self._stopped_here)
        taken = faults, self._bytes_sent, self._bytes_received
        self._names, self._stopped_here, self._bytes_sent, self._bytes_received = {}, set(), 0, 0
        return taken


class _Outbox:
    def __init__(self) -> None:
        self.waiting: deque[Header] = deque(maxlen=KEEP_MESSAGES)
        self.sent: deque[Header] = deque(maxlen=KEEP_MESSAGES)
        self.more = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.idle = False

    def again(self) -> None:
        self.waiting = deque((*self.sent, *self.waiting), maxlen=KEEP_MESSAGES)
        self.sent.clear()


class ControlChannel:
    """Sends control messages in order, on one stream to each peer, which stays open: opening one takes a round trip.

    Messages of a broken stream are sent again: they are idempotent. The channel notices at once when a peer dies.
    """

    def __init__(self, host: Host, method: str, accounting: RoundAccounting) -> None:
        self.on_gone: Callable[[PeerId], None] = lambda peer: None
        self.round_trip_seconds: dict[PeerId, float] = {}
        self._host, self._method, self._accounting = host, method, accounting
        self._lines: dict[PeerId, _Outbox] = {}
        self._group: asyncio.TaskGroup | None = None
        self._deadline = 0.0
        self._stopping = False

    def send(self, peer: PeerId, message: Header) -> None:
        """Queue a message, which may arrive twice. It is dropped only if more than `KEEP_MESSAGES` wait."""
        line = self._lines.setdefault(peer, _Outbox())
        line.waiting.append(message)
        line.more.set()
        self._start(peer, line)

    @asynccontextmanager
    async def run(self, group: asyncio.TaskGroup, deadline: Deadline, keep: Collection[PeerId]) -> AsyncIterator[None]:
        """Send messages inside this context, with tasks in `group`; drop those for peers not in `keep`."""
        self._group, self._deadline, self._stopping = group, deadline, False
        self._lines = {peer: line for peer, line in self._lines.items() if peer in keep}
        for peer, line in self._lines.items():
            if line.waiting:
                self._start(peer, line)
        try:
            yield
        finally:
            self._group, self._stopping = None, True
            for line in self._lines.values():
                line.more.set()
                if line.task and not line.idle:
                    line.task.cancel()

    def _start(self, peer: PeerId, line: _Outbox) -> None:
        if self._group and line.task is None:
            line.task = self._group.create_task(self._carry(peer, line))

    async def _carry(self, peer: PeerId, line: _Outbox) -> None:
        loop, pause_seconds = asyncio.get_running_loop(), RECONNECT_SECONDS
        try:
            while not self._stopping and loop.time() < self._deadline:
                began = loop.time()
                try:
                    return await self._stream(peer, line)
                except PeerGone:
                    self.on_gone(peer)
                except BadPayload:
                    pause_seconds = RECONNECT_LIMIT_SECONDS  # `counting` has named the peer
                except PeerError:
                    if loop.time() - began > RECONNECT_SECONDS and line.sent:
                        pause_seconds = (
                            0.0  # the stream had worked, so find out at once whether the peer is still there
                        )
                line.again()
                await asyncio.sleep(min(pause_seconds, max(0.0, self._deadline - loop.time())))
                pause_seconds = min(max(RECONNECT_SECONDS, 2 * pause_seconds), RECONNECT_LIMIT_SECONDS)
        finally:
            line.again()
            line.task, line.idle = None, False

    async def _stream(self, peer: PeerId, line: _Outbox) -> None:
        began = asyncio.get_running_loop().time()
        async with (
            self._host.transport.open(peer, self._method, self._deadline) as stream,
            self._accounting.counting(stream),
        ):
            self.round_trip_seconds[peer] = asyncio.get_running_loop().time() - began
            await run_with_helper(self._feed(line, stream), _watch(stream))

    async def _feed(self, line: _Outbox, stream: Stream) -> None:
        while not self._stopping:
            if line.waiting:
                line.sent.append(message := line.waiting.popleft())
                await stream.send(message)
                continue
            line.more.clear()
            line.idle = True
            try:
                await line.more.wait()
            finally:  # not idle after a broken stream: the task then retries, and is cancelled at the end of the round
                line.idle = False
        line.sent.clear()


async def _watch(stream: Stream) -> None:
    """Wait for the end of a control stream: the receiver sends nothing back on it."""
    await stream.receive(0)
    raise PeerSilent(stream.peer, "answered on a control stream")
