"""`protocols.streams.framing.Pipe` over an asyncio reader and writer, with an explicit end marker.

On the wire: pieces, each a 4-byte big-endian length and that many bytes. A length of 0 marks the end. The marker is
needed because p2pd has no half close, and turns a close with unread data into a reset that destroys the data sent
before it. So a side that is done sends the marker and then waits until the other side is done (`close`), or resets the
stream (`reset`).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import cast

from node.streams.traffic import UNLIMITED, StreamTraffic
from protocols.base import Buffer
from protocols.streams.framing import joined

PIECE_BYTES = 1 << 20
_LENGTH_BYTES = 4
_DISCARD_BYTES = 16 << 20
_POURING_BYTES = 64 << 10
_RESET_SECONDS = 0.1


class SocketPipe:
    """Bytes to and from one peer. Buffers are bounded: unread bytes by the reader's limit, unsent ones by one piece."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._transport = cast(asyncio.Transport, writer.transport)
        self._left = 0
        self._received = 0
        self._ended = False
        self._traffic = UNLIMITED
        self.moved_bytes = 0
        # `drain` returns when the kernel has all bytes. Until then the caller must not change its buffer.
        self._transport.set_write_buffer_limits(high=0)

    def belong_to(self, traffic: StreamTraffic) -> None:
        self._traffic = traffic

    async def write(self, *pieces: Buffer) -> None:
        """Pass the pieces to the kernel, without a copy of large ones. On failure or cancellation, abort, so that none
        is sent later.
        """
        try:
            for piece in self._traffic.outgoing(pieces, PIECE_BYTES):
                await self._traffic.may_send(len(piece))
                await self._write_raw(len(piece).to_bytes(_LENGTH_BYTES, "big"), piece)
        except BaseException:
            self.abort()
            raise

    async def read_into(self, buffer: memoryview) -> None:
        """Fill the whole buffer. EOFError if the peer sent the end marker, or the stream ended without one."""
        view, filled = buffer.cast("B"), 0
        while filled < len(view):
            piece = await self._read_some(len(view) - filled)
            view[filled : filled + len(piece)] = piece
            filled += len(piece)

    async def close(self, seconds: float) -> None:
        """Send the end marker, then wait at most `seconds` for the other side's: all sent data has then arrived.

        Data that the peer still sends is discarded. After 16 MiB of it, the stream is reset.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._write_raw(bytes(_LENGTH_BYTES))
                left = _DISCARD_BYTES
                while left > 0:
                    left -= len(await self._read_some(min(left, PIECE_BYTES)))
        except EOFError:
            await self._gone()
        except OSError:  # TimeoutError is one
            await self.reset()
        else:
            await self.reset()

    async def reset(self) -> None:
        """Reset the stream in a way that the other side's p2pd notices, too. Harmless after `close`.

        If no data is unread at the reset, this side's p2pd closes the stream instead of resetting it. The other side's
        p2pd, if it is sending, then waits for ever and keeps its buffers. So this method first lets some data arrive.
        """
        if self._received >= _POURING_BYTES and not self._transport.get_write_buffer_size():
            self._transport.pause_reading()
            await asyncio.sleep(_RESET_SECONDS)
        await self._gone()

    def abort(self) -> None:
        """For the other side the stream ends without a marker. Harmless after `close` and `reset`."""
        if not self._transport.is_closing():
            self._transport.abort()

    async def _gone(self) -> None:
        self.abort()
        with suppress(OSError):  # asyncio keeps the connection's last error until it is retrieved
            await self._writer.wait_closed()

    async def _write_raw(self, *parts: Buffer) -> None:
        if self._transport.is_closing():
            raise ConnectionResetError("closed")
        # Not writelines: in some versions of Python it does not make drain wait. Each write is a packet of p2pd's.
        for part in joined(parts):
            self._writer.write(part)
            self._traffic.sent(len(part))
            self.moved_bytes += len(part)
        await self._writer.drain()

    async def _read_some(self, at_most: int) -> bytes:
        if not self._left:
            self._left = await self._next_piece()
        wanted = min(self._left, at_most)
        data = await self._reader.read(min(wanted, PIECE_BYTES, self._traffic.download_piece))
        if not data:
            raise EOFError("broken off")
        self._left -= len(data)
        self._received += len(data)
        self.moved_bytes += len(data)
        self._traffic.received(len(data))
        await self._traffic.may_receive(len(data), wanted - len(data))
        return data

    async def _next_piece(self) -> int:
        if not self._ended:
            try:
                size = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            except asyncio.IncompleteReadError:
                raise EOFError("broken off") from None
            self._traffic.received(_LENGTH_BYTES)
            if size:
                return size
            self._ended = True
        raise EOFError("the peer is done")
