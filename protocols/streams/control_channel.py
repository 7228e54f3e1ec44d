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
        self._outboxes: dict[PeerId, _Outbox] = {}
        self._group: asyncio.TaskGroup | None = None
        self._deadline = 0.0
        self._stopping = False

    def send(self, peer: PeerId, message: Header) -> None:
        """Queue a message, which may arrive twice. It is dropped only if more than `KEEP_MESSAGES` wait."""
        outbox = self._outboxes.setdefault(peer, _Outbox())
        outbox.waiting.append(message)
        outbox.more.set()
        self._start(peer, outbox)

    @asynccontextmanager
    async def run(self, group: asyncio.TaskGroup, deadline: Deadline, keep: Collection[PeerId]) -> AsyncIterator[None]:
        """Send messages inside this context, with tasks in `group`; drop those for peers not in `keep`."""
        self._group, self._deadline, self._stopping = group, deadline, False
        self._outboxes = {peer: outbox for peer, outbox in self._outboxes.items() if peer in keep}
        for peer, outbox in self._outboxes.items():
            if outbox.waiting:
                self._start(peer, outbox)
        try:
            yield
        finally:
            self._group, self._stopping = None, True
            for outbox in self._outboxes.values():
                outbox.more.set()
                if outbox.task and not outbox.idle:
                    outbox.task.cancel()

    def _start(self, peer: PeerId, outbox: _Outbox) -> None:
        if self._group and outbox.task is None:
            outbox.task = self._group.create_task(self._carry(peer, outbox))

    async def _carry(self, peer: PeerId, outbox: _Outbox) -> None:
        loop, pause_seconds = asyncio.get_running_loop(), RECONNECT_SECONDS
        try:
            while not self._stopping and loop.time() < self._deadline:
                began = loop.time()
                try:
                    return await self._stream(peer, outbox)
                except PeerGone:
                    self.on_gone(peer)
                except BadPayload:
                    pause_seconds = RECONNECT_LIMIT_SECONDS  # `counting` has named the peer
                except PeerError:
                    if loop.time() - began > RECONNECT_SECONDS and outbox.sent:
                        pause_seconds = 0.0  # the stream had worked: find out at once whether the peer is still there
                outbox.again()
                await asyncio.sleep(min(pause_seconds, max(0.0, self._deadline - loop.time())))
                pause_seconds = min(max(RECONNECT_SECONDS, 2 * pause_seconds), RECONNECT_LIMIT_SECONDS)
        finally:
            outbox.again()
            outbox.task, outbox.idle = None, False

    async def _stream(self, peer: PeerId, outbox: _Outbox) -> None:
        began = asyncio.get_running_loop().time()
        async with self._endpoint.open(peer, self._method, self._deadline) as stream:
            self.round_trip_seconds[peer] = asyncio.get_running_loop().time() - began
            await run_with_helper(self._feed(outbox, stream), _watch(stream))

    async def _feed(self, outbox: _Outbox, stream: Stream) -> None:
        while not self._stopping:
            if outbox.waiting:
                outbox.sent.append(message := outbox.waiting.popleft())
                await stream.send(message)
                continue
            outbox.more.clear()
            outbox.idle = True
            try:
                await outbox.more.wait()
            finally:  # not idle after a broken stream: the task then retries, and is cancelled at the end of the round
                outbox.idle = False
        outbox.sent.clear()


async def _watch(stream: Stream) -> None:
    """Wait for the end of a control stream: the receiver sends nothing back on it."""
    await stream.receive(0)
    raise PeerSilent(stream.peer, "answered on a control stream")
