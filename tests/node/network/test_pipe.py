"""Both pipes over a pair of sockets: exact bytes, an explicit end, and nothing lent is sent late."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from node.direct.connection import DirectPipe
from node.network.pipe import PIECE_BYTES, SocketPipe
from node.streams.serving import EndingPipe
from tests.support.direct_connections import connected

Pipes = tuple[EndingPipe, EndingPipe]
BUFFER_BYTES = 200_000
"""Of the kernel: it takes a record of a direct connection, and not a piece of a socket pipe."""


@pytest.fixture(params=["socket", "direct"])
async def pipes(request: pytest.FixtureRequest) -> AsyncIterator[Pipes]:
    made: list[EndingPipe]
    if request.param == "socket":
        made = [SocketPipe(*await asyncio.open_unix_connection(sock=end)) for end in socket.socketpair()]
    else:
        made = [DirectPipe(each, lambda free: free.abort()) for each in connected(buffer_bytes=BUFFER_BYTES)]
    yield made[0], made[1]
    for pipe in made:
        pipe.abort()
    await asyncio.sleep(0)


async def read(pipe: EndingPipe, size: int) -> bytes:
    buffer = bytearray(size)
    await pipe.read_into(memoryview(buffer))
    return bytes(buffer)


async def test_views_of_other_item_sizes_are_bytes(pipes: Pipes) -> None:
    a, b = pipes
    await a.write(memoryview(bytearray(b"01234567")).cast("I"))
    into = bytearray(8)
    await b.read_into(memoryview(into).cast("I"))
    assert into == b"01234567"


async def test_small_message_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """p2pd would send each write on as a packet of its own."""
    own, other = socket.socketpair()
    pipe = SocketPipe(*await asyncio.open_unix_connection(sock=own))
    written: list[int] = []
    write = pipe._writer.write

    def counted(data: bytes) -> None:
        written.append(len(data))
        write(data)

    monkeypatch.setattr(pipe._writer, "write", counted)
    await pipe.write(b"head", b"and its payload")
    assert written == [23] and other.recv(100) == b"\0\0\0\x13head" + b"and its payload"
    pipe.abort()
    other.close()


async def test_end_follows_sent_bytes_on_both_sides(pipes: Pipes) -> None:
    a, b = pipes
    await a.write(b"last words")
    closing = asyncio.create_task(a.close(20))
    assert await read(b, 10) == b"last words"
    for _ in range(2):
        with pytest.raises(EOFError, match="the peer is done"):
            await read(b, 1)
    assert not closing.done()
    await b.close(20)
    await closing


async def test_bytes_after_the_end_are_dropped(pipes: Pipes) -> None:
    a, b = pipes
    closing = asyncio.create_task(a.close(20))
    await b.write(bytes(PIECE_BYTES))
    await b.close(20)
    await closing


async def test_endless_sender_is_cut_off(pipes: Pipes) -> None:
    a, b = pipes
    closing = asyncio.create_task(a.close(20))
    with pytest.raises(OSError):
        for _ in range(100):
            await b.write(bytes(PIECE_BYTES))
    await closing


async def test_close_waits_for_silent_side_only_briefly(pipes: Pipes) -> None:
    a, b = pipes
    await a.close(0.05)
    with pytest.raises(EOFError, match="the peer is done"):
        await read(b, 1)


async def test_cancelled_write_sends_nothing_more(pipes: Pipes) -> None:
    a, b = pipes
    lent = bytearray(b"\x01" * PIECE_BYTES)
    writing = asyncio.create_task(a.write(lent))
    await asyncio.sleep(0.05)
    writing.cancel()
    await asyncio.wait((writing,))
    lent[:] = b"\x02" * PIECE_BYTES
    seen = bytearray()
    with pytest.raises((EOFError, OSError)):
        while True:
            seen += await read(b, 1)
    assert 0 < len(seen) < PIECE_BYTES and set(seen) == {1}
