"""One end of a simulated stream, with flow control and both ways to end: close and reset."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from protocols.base import Buffer

if TYPE_CHECKING:
    from tests.sim.network import Node, SimNetwork

WINDOW_BYTES = 1 << 20
"""A sender waits while this many bytes of a stream are unread."""

EOF = b"<eof>"
RESET = b"<reset>"


class SimPipe:
    """One end of a stream: writes travel to `other`; reads return what has arrived, in the order of sending."""

    def __init__(self, network: SimNetwork, node: Node, number: int) -> None:
        self.network, self.node, self.number = network, node, number
        self.other: SimPipe
        self.closed = False
        self.moved_bytes = 0
        self._flight: deque[bytes] = deque()
        self._arrived: deque[memoryview] = deque()
        self._unread_bytes = 0
        self._ended = False
        self._broken = False
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None

    async def write(self, *pieces: Buffer) -> None:
        for data in pieces:
            if len(data):
                await self._write(data)

    async def _write(self, data: Buffer) -> None:
        self._check()
        while self.other._unread_bytes >= WINDOW_BYTES:
            self._writable = asyncio.get_running_loop().create_future()
            await self._writable
            self._check()
        self.other._unread_bytes += len(data)
        self.moved_bytes += len(data)
        self.network.departing(self, bytes(data))

    async def read_into(self, buffer: memoryview) -> None:
        filled = 0
        while filled < len(buffer):
            while not self._arrived:
                self._check_readable()
                self._readable = asyncio.get_running_loop().create_future()
                await self._readable
            filled += self._take(buffer[filled:])

    def _take(self, into: memoryview) -> int:
        if self._broken:
            raise ConnectionResetError("reset")
        piece = self._arrived[0]
        size = min(len(piece), len(into))
        into[:size] = piece[:size]
        if size == len(piece):
            self._arrived.popleft()
        else:
            self._arrived[0] = piece[size:]
        self._unread_bytes -= size
        self.moved_bytes += size
        _wake(self.other._writable)
        return size

    def _check(self) -> None:
        if self.closed or not self.node.process.alive:
            raise ConnectionResetError("closed here")
        if self._broken or (self.other.closed and self._ended):
            raise ConnectionResetError("closed by the peer")

    def _check_readable(self) -> None:
        if self._broken or self.closed:
            raise ConnectionResetError("reset")
        if self._ended:
            raise EOFError("closed by the peer")

    def close(self) -> None:
        self._end(EOF)

    def reset(self) -> None:
        self._end(RESET)

    def sever(self) -> None:
        """A reset by the network, not by the process: it counts as no message, and local reads fail, too."""
        self._end(RESET, by_process=False)
        self._broken = True
        _wake(self._readable)
        _wake(self._writable)

    def _end(self, marker: bytes, by_process: bool = True) -> None:
        if self.closed:
            return
        self.network.departing(self, marker, by_process)
        self.closed = True  # only now: a fault at this message must find the stream open
        self.node.ends.pop(self.number, None)

    def launch(self, data: bytes) -> None:
        self._flight.append(data)

    def deliver(self) -> None:
        """The oldest data on its way from the other end arrives."""
        data = self.other._flight.popleft()
        if data is EOF or data is RESET:
            self._ended = True
            self._broken = self._broken or data is RESET
        elif not self.closed:
            self._arrived.append(memoryview(data))
            self.node.received_bytes += len(data)
        _wake(self._readable)
        _wake(self._writable)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
