"""`protocols.streams.framing.Pipe` over a direct connection: one stream, with an explicit end on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from node.direct.connection import DirectConnection
from node.network.traffic import StreamTraffic
from protocols.base import Buffer

_DISCARD_BYTES = 16 << 20


class DirectPipe:
    """One stream. When both sides have ended it in order, the connection is free for the next one."""

    def __init__(self, connection: DirectConnection, on_free: Callable[[DirectConnection], None]) -> None:
        self._connection, self._on_free = connection, on_free
        self._over = False

    @property
    def moved_bytes(self) -> int:
        """On this stream and those before it."""
        return self._connection.moved_bytes

    def belong_to(self, traffic: StreamTraffic) -> None:
        self._connection.traffic = traffic

    async def write(self, data: Buffer) -> None:
        """Pass `data` to the kernel. On failure or cancellation, abort, so that none is sent later."""
        try:
            await self._present().write(data)
        except BaseException:
            self.abort()
            raise

    async def read_into(self, buffer: memoryview) -> None:
        """Fill the whole buffer. EOFError if the peer ended the stream, or it broke off."""
        await self._present().read_into(buffer)

    async def close(self, seconds: float) -> None:
        """Send the end, then wait at most `seconds` for the other side's: all sent data has then arrived.

        Data that the peer still sends is discarded. After 16 MiB of it, the stream is reset.
        """
        if self._over:
            return
        connection = self._connection
        try:
            async with asyncio.timeout(seconds):
                await connection.end()
                await connection.discard(_DISCARD_BYTES)
        except EOFError:
            if connection.peer_ended and not self._over:
                self._over = True
                connection.begin()
                return self._on_free(connection)
        except OSError:  # TimeoutError is one
            pass
        self.abort()

    async def reset(self) -> None:
        self.abort()

    def abort(self) -> None:
        """Reset the stream. Harmless after `close`."""
        if not self._over:
            self._over = True
            self._connection.abort()

    def _present(self) -> DirectConnection:
        if self._over:
            raise ConnectionResetError("closed")
        return self._connection
