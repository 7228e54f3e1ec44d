"""Control messages to peers, on streams that stay open."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from protocols.aio import run_with_helper
from protocols.base import BadPayload, Deadline, Header, PeerError, PeerGone, PeerId, PeerSilent, Stream
from protocols.streams.endpoint import ProtocolEndpoint

RECONNECT_SECONDS = 0.1
RECONNECT_LIMIT_SECONDS = 5.0
KEEP_MESSAGES = 64
"""Limit of messages kept for one peer: those to send, and those sent that may be lost. The oldest are dropped first."""


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

    def __init__(self, endpoint: ProtocolEndpoint, method: str) -> None:
        self.on_gone: Callable[[PeerId], None] = lambda peer: None
        self.round_trip_seconds: dict[PeerId, float] = {}
        self._endpoint, self._method = endpoint, method
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
        async with self._endpoint.open(peer, self._method, self._deadline) as stream:
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
