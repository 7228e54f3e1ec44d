"""The port on the loopback: what a stranger, a replay or a thief of tokens achieves, and what a slow reader."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator

import pytest

from node.direct import connection, handshake, inbound
from node.direct.records import AES, Handshake, RecordError
from tests.support.direct_connections import SimpleServer, descriptors

pytestmark = pytest.mark.real

MIB = 1 << 20


@pytest.fixture
async def server() -> AsyncIterator[SimpleServer]:
    made = SimpleServer()
    yield made
    made.close()


async def talk(where: tuple[str, int], data: bytes, at_once: int = 100) -> bytes:
    """Send bytes, a few at a time, and return 16 bytes of the answer; fewer if the connection is closed."""
    reader, writer = await asyncio.open_connection(*where)
    try:
        for start in range(0, len(data), at_once):
            writer.write(data[start : start + at_once])
            await asyncio.sleep(0.001)
        return await reader.readexactly(16)
    except asyncio.IncompleteReadError as error:
        return error.partial
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


async def test_replay_is_not_answered_and_could_not_be_read(server: SimpleServer) -> None:
    token, into, memory = server.token(), memoryview(bytearray(7)), memoryview(bytearray(64))
    issued, record = server.issuer._issued[token.id], b""
    for _ in range(2):
        reader, writer = await asyncio.open_connection(*server.where)
        writer.write(token.id + bytes(16))
        keys = Handshake(AES, token.secret, "client", "server", bytes(16), await reader.readexactly(16))
        record = record or bytes(memory[: keys.codecs(is_client=True)[0].seal(b"genuine", memory)])
        writer.write(record)
        reading = asyncio.create_task(server.connections[-1].read_into(into))
        await asyncio.wait([reading])
        writer.transport.abort()
        assert isinstance(reading.exception(), RecordError) is (len(server.connections) == 2)
        assert await talk(server.where, token.id + bytes(16)) == b""
        server.issuer._issued[token.id] = issued  # as if it were good twice
    assert server.refused == {("127.0.0.1", "showed no valid token"): 2}


async def test_token_of_another_peer_is_useless(server: SimpleServer) -> None:
    mine, theirs = await server.pair("thief", server.token("owner"))
    await mine.write(b"mine")
    with pytest.raises(RecordError):
        await theirs.read_into(memoryview(bytearray(4)))
    with pytest.raises((ConnectionError, EOFError)):
        await mine.read_into(memoryview(bytearray(1)))


async def test_opening_may_come_byte_by_byte_but_not_late(
    server: SimpleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(await talk(server.where, server.token().id + bytes(16), at_once=1)) == 16
    monkeypatch.setattr(inbound, "OPENING_SECONDS", 0.2)
    token = server.token()
    assert await talk(server.where, token.id + bytes(15)) == b""
    assert server.refused == {("127.0.0.1", "showed no token in time"): 1} and server.listener.waiting == 0
    assert server.issuer.redeem(token.id)


async def test_listener_outlives_a_lack_of_descriptors(server: SimpleServer) -> None:
    client, limits = socket.socket(), resource.getrlimit(resource.RLIMIT_NOFILE)
    client.setblocking(False)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() - 1, limits[1]))
    try:
        client.connect_ex(server.where)
        await asyncio.sleep(0.1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    (await server.dialled()).abort()
    assert server.listener.waiting == 1
    client.close()


async def test_dial_does_not_take_itself_for_the_peer(server: SimpleServer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, token = asyncio.get_running_loop(), server.token()

    async def to_itself(sock: socket.socket, where: object) -> None:
        sock.bind(("127.0.0.1", 0))
        sock.connect_ex(sock.getsockname())

    monkeypatch.setattr(loop, "sock_connect", to_itself)
    with pytest.raises(ConnectionRefusedError):
        await handshake.dial(server.where, token, AES, "client", "server", 5.0)


async def test_slow_reader_is_not_silent(server: SimpleServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENCE_SECONDS", 1.0)
    mine, theirs = await server.pair()
    writing = asyncio.create_task(mine.write(bytes(64 * MIB)))
    await asyncio.sleep(3.0)  # nothing is read, and the window is closed
    assert not writing.done()
    await theirs.read_into(memoryview(bytearray(64 * MIB)))
    await writing
    mine.abort()
