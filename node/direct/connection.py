"""One encrypted TCP connection, which carries one stream (a `DirectPipe`) after another.

Plaintext is written from the caller's memory and read into it: a record is sealed straight from the data to send, and
opened straight into the buffer to fill. Between the two stand one record on its way out, one on its way in, and the
kernel's buffers.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

from node.direct.pacing import LOOK_SECONDS, Pacer
from node.direct.records import LENGTH_BYTES, OVERHEAD_BYTES, RECORD_BYTES, RecordError, RecordOpener, RecordSealer
from node.streams.traffic import UNLIMITED, StreamTraffic
from protocols.base import Buffer

_DISCARD_BYTES = 16 << 20
_AHEAD_BYTES = 64 << 10
_STRETCH_BYTES, _LEAST_BYTES = 128 << 10, 4 << 10
"""Bytes after which a task lets the event loop run others. Each record counts as some kilobytes at least: otherwise a
peer that sends records of one byte would hold the loop for a tenth of a second."""
SILENCE_SECONDS = 10.0
"""A connection fails when the other side's machine has acknowledged nothing for about this long, though it should."""


class ConnectionSilent(ConnectionError):
    """The other side's machine no longer answers: it is gone, or something on the way swallows the packets."""


def set_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle, interval = max(1, round(SILENCE_SECONDS / 2)), max(1, round(SILENCE_SECONDS / 4))
    for name, value in (("TCP_KEEPIDLE", idle), ("TCP_KEEPINTVL", interval), ("TCP_KEEPCNT", 2)):
        if hasattr(socket, name):  # macOS lacks some
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_silent(sock: socket.socket) -> bool:
    """Whether data or probes were sent several times, and nothing came back for `SILENCE_SECONDS`.

    TCP_USER_TIMEOUT does not fit: it also ends the connection to a peer that answers, and only reads slowly. The layout
    is Linux's `struct tcp_info`; elsewhere, TCP's own limit of some minutes remains.
    """
    if not hasattr(socket, "TCP_INFO"):
        return False
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    except OSError:
        return False  # no TCP socket
    retransmissions, probes = info[2], info[3]
    (milliseconds,) = struct.unpack_from("=I", info, 56)  # since the latest acknowledgement
    return max(retransmissions, probes) >= 2 and milliseconds >= 1000 * SILENCE_SECONDS


class DirectConnection:
    """One task may read while another one writes."""

    def __init__(self, sock: socket.socket, codecs: tuple[RecordSealer, RecordOpener]) -> None:
        self.peer_ended = False  # of the present stream
        self.closed = False
        self.failure: OSError | None = None  # the error that ended it; None if it is open, or was aborted
        self.on_closed: Callable[[], None] = lambda: None
        self.traffic = UNLIMITED
        self.moved_bytes = 0
        self._socket, self._descriptor = sock, sock.fileno()
        self._sealer, self._opener = codecs
        self._loop = asyncio.get_running_loop()
        self._waits: dict[bool, asyncio.Future[None]] = {}  # for reading (False) and for writing (True)
        self._out = self._in = memoryview(b"")
        self._have = 0  # bytes that `_in` holds
        self._used = 0  # how many of them, at its front, are of a record that is opened
        self._plain = (0, 0)  # range of `_in` with opened data that was not read yet
        self._stretch = {False: 0, True: 0}
        self._watch = self._loop.call_later(SILENCE_SECONDS / 4, self._look)
        self._pacer = Pacer(sock)
        self._pacing: asyncio.TimerHandle | None = None
        self._writing = False

    @property
    def local(self) -> tuple[str, int]:
        """IP address and port of this end; raises OSError if the connection is lost."""
        host, port, *_ = self._socket.getsockname()
        return host, port

    @property
    def remote(self) -> tuple[str, int]:
        """Those of the other end."""
        host, port, *_ = self._socket.getpeername()
        return host, port

    async def write(self, *pieces: Buffer) -> None:
        for piece in self.traffic.outgoing(pieces, RECORD_BYTES):
            await self.traffic.may_send(len(piece))
            await self._write_record(piece)

    async def end(self) -> None:
        await self._write_record(memoryview(b""))

    async def read_into(self, buffer: memoryview) -> None:
        """Fill the whole buffer. EOFError if the other side has ended the stream, `RecordError` for a forged record."""
        view, filled = buffer.cast("B"), 0
        while filled < len(view):
            filled += await self._read_some(view[filled:])

    async def discard(self, at_most: int) -> None:
        while at_most > 0:
            low, high = self._plain
            self._plain = (high, high)
            at_most -= high - low
            if low == high:
                await self._next_record(memoryview(b""))

    async def until_readable(self, deadline: float) -> bool:
        """Also true at the end of the connection."""
        if self._have > self._used:
            return True
        try:
            async with asyncio.timeout_at(deadline):
                await self._ready(writing=False)
        except OSError:  # TimeoutError is one
            return False
        return True

    def is_quiet(self) -> bool:
        return not self.closed and self._have == self._used and self._peek() is None

    def has_ended(self) -> bool:
        """Whether either side has closed the connection, with nothing left to read."""
        return self.closed or (self._have == self._used and self._peek() == b"")

    def _peek(self) -> bytes | None:
        """The next byte that has arrived; None if there is none yet, empty if there will be none."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b""

    @property
    def needs_rekey(self) -> bool:
        return self._sealer.nonces.needs_rekey or self._opener.nonces.needs_rekey

    def begin(self) -> None:
        self.peer_ended = False

    def release_memory(self) -> None:
        if self._have == self._used:
            self._out = self._in = memoryview(b"")
            self._have = self._used = 0

    def abort(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._watch.cancel()
        if self._pacing:
            self._pacing.cancel()
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()
        for wait in self._waits.values():
            if not wait.done():
                wait.set_exception(self.failure or ConnectionAbortedError("closed"))
        self.on_closed()

    def _failed(self, error: OSError) -> OSError:
        """Close the connection: nothing can be read after a record that was not genuine. Returns the error to raise."""
        if isinstance(error, TimeoutError):  # the kernel's; a deadline's would look the same to the caller
            error = ConnectionSilent("the other side's machine does not answer any more")
        if not self.closed:
            self.failure = error
            self.abort()
        return error

    def _look(self) -> None:
        self._watch = self._loop.call_later(SILENCE_SECONDS / 4, self._look)
        if is_silent(self._socket):
            self._failed(TimeoutError())

    def _pace(self) -> None:
        now = self._loop.time()
        more = self._pacer.look(now) or self._writing
        self.traffic.delivered(now, id(self), self._pacer.delivered, self._pacer.is_waiting)
        self._pacing = self._loop.call_later(LOOK_SECONDS, self._pace) if more else None

    async def _write_record(self, data: memoryview) -> None:
        if not self._pacing and not self.closed:
            self._pacer.begin(self._loop.time())
            self._pacing = self._loop.call_later(LOOK_SECONDS, self._pace)
        self._writing = True
        try:
            await self._send_record(data)
        finally:
            self._writing = False

    async def _send_record(self, data: memoryview) -> None:
        if not self._out:
            self._out = memoryview(bytearray(RECORD_BYTES + OVERHEAD_BYTES))
        self._require_open()
        sent, size = 0, self._sealer.seal(data, self._out)
        while sent < size:
            try:
                count = self._socket.send(self._out[sent:size])
            except (BlockingIOError, InterruptedError):
                await self._ready(writing=True)
                continue
            except OSError as error:
                raise self._failed(error) from None
            sent += count
            self.moved_bytes += count
            self.traffic.sent(count)
        await self._give_way(size, writing=True)

    async def _read_some(self, into: memoryview) -> int:
        low, high = self._plain
        if low == high:
            return await self._next_record(into)
        size = min(high - low, len(into))
        into[:size] = self._in[low : low + size]
        self._plain = (low + size, high)
        return size

    async def _next_record(self, into: memoryview) -> int:
        """Receive a record and open it: straight into `into` if it has room, else in place. Returns bytes filled."""
        if self.peer_ended:
            raise EOFError("the peer is done")
        self._require_open()
        if not self._in:
            self._in = memoryview(bytearray(RECORD_BYTES + OVERHEAD_BYTES + LENGTH_BYTES))
        left = self._have - self._used
        self._in[:left] = self._in[self._used : self._have]
        self._have, self._used = left, 0
        await self._receive(LENGTH_BYTES)
        try:
            size = self._opener.length(self._in[:LENGTH_BYTES])
            await self._receive(size + OVERHEAD_BYTES)
            await self._give_way(size + OVERHEAD_BYTES, writing=False)
            straight = 0 < size <= len(into)
            place = self._in[LENGTH_BYTES : LENGTH_BYTES + size]
            self._used = size + OVERHEAD_BYTES
            self._opener.open(self._in[: self._used], into[:size] if straight else place)
        except RecordError as error:
            raise self._failed(error) from None
        if straight:
            return size
        self._plain = (LENGTH_BYTES, LENGTH_BYTES + size)
        self.peer_ended = not size
        return 0

    async def _receive(self, need: int) -> None:
        """Little is read ahead of large records, which would have to be moved; small ones come in one call."""
        while self._have < need:
            self._require_open()
            try:
                most = min(max(need + LENGTH_BYTES, _AHEAD_BYTES), self._have + self.traffic.download_piece)
                count = self._socket.recv_into(self._in[self._have : most])
            except (BlockingIOError, InterruptedError):
                await self._ready(writing=False)
                continue
            except OSError as error:
                raise self._failed(error) from None
            if not count:
                raise EOFError("broken off")
            self._have += count
            self.moved_bytes += count
            self.traffic.received(count)
            await self.traffic.may_receive(count, max(0, need - self._have))

    def _require_open(self) -> None:
        if self.closed:
            raise self.failure or ConnectionAbortedError("closed")

    async def _give_way(self, count: int, *, writing: bool) -> None:
        self._stretch[writing] += max(count, _LEAST_BYTES)
        if self._stretch[writing] >= _STRETCH_BYTES:
            self._stretch[writing] = 0
            await asyncio.sleep(0)

    async def _ready(self, *, writing: bool) -> None:
        self._require_open()
        wait = self._waits[writing] = self._loop.create_future()
        add, remove = (
            (self._loop.add_writer, self._loop.remove_writer)
            if writing
            else (self._loop.add_reader, self._loop.remove_reader)
        )
        add(self._descriptor, _wake, wait)
        try:
            await wait
        finally:
            # If this one is closed, another connection may have the descriptor. A later wait has replaced the callback.
            if not self.closed and self._waits[writing] is wait:
                remove(self._descriptor)
            self._stretch[writing] = 0


def _wake(wait: asyncio.Future[None]) -> None:
    if not wait.done():
        wait.set_result(None)


class DirectPipe:
    """One stream. When both sides have ended it in order, the connection is free for the next one."""

    def __init__(self, connection: DirectConnection, on_free: Callable[[DirectConnection], None]) -> None:
        self._connection, self._on_free = connection, on_free
        self._over = False

    @property
    def moved_bytes(self) -> int:
        return self._connection.moved_bytes

    def belong_to(self, traffic: StreamTraffic) -> None:
        self._connection.traffic = traffic

    async def write(self, *pieces: Buffer) -> None:
        try:
            await self._present().write(*pieces)
        except BaseException:
            self.abort()
            raise

    async def read_into(self, buffer: memoryview) -> None:
        await self._present().read_into(buffer)

    async def close(self, seconds: float) -> None:
        """As `SocketPipe.close`: data that the peer still sends is discarded, up to 16 MiB."""
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
        if not self._over:
            self._over = True
            self._connection.abort()

    def _present(self) -> DirectConnection:
        if self._over:
            raise ConnectionResetError("closed")
        return self._connection
