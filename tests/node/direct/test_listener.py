"""The port on the loopback: what a stranger, a replay, a thief of tokens or a firewall achieves."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from node.direct import connection, handshake, listener
from node.direct.connection import ConnectionSilent
from node.direct.listener import EXPECTED, STRANGERS
from node.direct.records import AES, RECORD_BYTES, Handshake, RecordError
from tests.support.direct_connections import SimpleServer, descriptors, silent_strangers, swallow_packets

pytestmark = pytest.mark.real

MIB = 1 << 20


@pytest.fixture
async def server() -> AsyncIterator[SimpleServer]:
    made = SimpleServer()
    yield made
    made.close()


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


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


async def test_replayed_opening_is_not_answered(server: SimpleServer) -> None:
    opening = server.token().id + bytes(16)
    assert len(await talk(server.where, opening)) == 16
    assert await talk(server.where, opening) == b""
    assert server.refused == {("127.0.0.1", "showed no valid token"): 1} and len(server.connections) == 1


async def test_replayed_records_fail_even_if_a_token_were_good_twice(server: SimpleServer) -> None:
    token, recorded = server.token(), []
    issued = server.issuer._issued[token.id]
    for _ in range(2):
        server.issuer._issued[token.id] = issued
        reader, writer = await asyncio.open_connection(*server.where)
        writer.write(token.id + bytes(16))
        keys = Handshake(AES, token.secret, "client", "server", bytes(16), await reader.readexactly(16))
        if not recorded:
            memory = memoryview(bytearray(64))
            recorded.append(bytes(memory[: keys.codecs(is_client=True)[0].seal(b"genuine", memory)]))
        writer.write(recorded[0])
        into = bytearray(7)
        try:
            await server.connections[-1].read_into(memoryview(into))
        except RecordError:
            assert len(server.connections) == 2
            return writer.transport.abort()
        assert into == b"genuine" and len(server.connections) == 1
        writer.transport.abort()
    raise AssertionError("the replay was taken")


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
    monkeypatch.setattr(listener, "OPENING_SECONDS", 0.2)
    token = server.token()
    assert await talk(server.where, token.id + bytes(15)) == b""
    assert server.refused == {("127.0.0.1", "showed no token in time"): 1} and server.listener.waiting == 0
    assert server.issuer.redeem(token.id)


@pytest.mark.parametrize("host, limits", [("127.0.0.1", EXPECTED), ("127.0.0.9", STRANGERS)])
async def test_silent_strangers_neither_pile_up_nor_shut_peers_out(
    server: SimpleServer, host: str, limits: listener.WaitingLimits
) -> None:
    server.token()  # from now on, peers are expected at 127.0.0.1
    before, most = descriptors(), 0
    with silent_strangers(server.where, host, 2000):
        for _ in range(20):
            (await server.dialled()).abort()
            most = max(most, server.listener.waiting)
            await asyncio.sleep(0.02)
    assert 0 < most <= limits.per_host + 1  # and the peer that was dialling
    assert sum(server.refused.values()) > 500 and {who for who, _ in server.refused} == {host}
    for each in server.connections:
        each.abort()
    await until(lambda: server.listener.waiting == 0 and descriptors() <= before)


async def test_listener_outlives_a_lack_of_descriptors(server: SimpleServer) -> None:
    client, limits = socket.socket(), resource.getrlimit(resource.RLIMIT_NOFILE)
    client.setblocking(False)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() - 1, limits[1]))
    try:
        client.connect_ex(server.where)
        await asyncio.sleep(0.1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    await until(lambda: server.listener.waiting == 1)
    (await server.dialled()).abort()
    client.close()


async def test_dial_does_not_take_itself_for_the_peer(server: SimpleServer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, token = asyncio.get_running_loop(), server.token()

    async def to_itself(sock: socket.socket, where: object) -> None:
        sock.bind(("127.0.0.1", 0))
        sock.connect_ex(sock.getsockname())

    monkeypatch.setattr(loop, "sock_connect", to_itself)
    with pytest.raises(ConnectionRefusedError):
        await handshake.dial(server.where, token, AES, "client", "server", 5.0)


async def test_swallowed_packets_end_a_connection_and_slow_readers_do_not(
    server: SimpleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENCE_SECONDS", 1.0)
    mine, theirs = await server.pair()
    writing = asyncio.create_task(mine.write(bytes(64 * MIB)))
    await asyncio.sleep(3.0)  # nothing is read, and the window is closed
    assert not writing.done()
    await theirs.read_into(memoryview(bytearray(64 * MIB)))
    await writing
    for end in (mine, theirs):
        swallow_packets(end._socket)
    reading = asyncio.create_task(theirs.read_into(memoryview(bytearray(1))))
    async with asyncio.timeout(20):
        with pytest.raises(ConnectionSilent):
            while True:
                await mine.write(bytes(RECORD_BYTES))
        with pytest.raises(ConnectionSilent):
            await reading
    assert isinstance(mine.failure, ConnectionSilent) and isinstance(theirs.failure, ConnectionSilent)
