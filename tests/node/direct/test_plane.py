"""Two real peers with a direct data plane: which way streams go, what they do when it fails, and who is dialled."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.direct import connection
from node.direct.connection import DirectConnection
from node.direct.inbound import KNOWN_PEER_LIMITS, STRANGER_LIMITS
from node.direct.messages import HEADER_LIMIT, METHOD, ConnectionToken, DialBack, DialBackResult
from node.direct.plane import DirectPlane
from node.direct.records import AES
from node.direct.routes import RouteKind
from node.network.libp2p import LibP2PTransport
from protocols import wire
from protocols.base import PeerGone, PeerId, PeerSilent, Stream, Transport
from tests.support.direct_connections import descriptors, silent_strangers, swallow_packets
from tests.support.real_transports import TransportMaker, on_uvloop, soon
from tests.support.transport_pool import Pool, direct_plane
from tests.support.waiting import until

pytestmark = pytest.mark.real

MIB = 1 << 20
METHODS = {"echo", "sink", "not served"}


class PlaneMaker(TransportMaker):
    """Gives the pool's transports a data plane for one test."""

    async def __call__(self, **changes: Any) -> LibP2PTransport:
        transport = await super().__call__()
        await self.enter_async_context(direct_plane(transport, changes["direct_methods"]))
        return transport


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with closing(Pool()) as opened:
        yield opened


@pytest.fixture
def make(directory: Path, pool: Pool) -> TransportMaker:
    return PlaneMaker(directory, pool)


async def echo(_: PeerId, stream: Stream) -> None:
    """Answer once."""
    chunk = wire.expect(await stream.receive(64), wire.Chunk)
    buffer = bytearray(chunk.size)
    await stream.receive_into(memoryview(buffer))
    await stream.send(chunk, buffer)


async def pair(make: TransportMaker) -> tuple[LibP2PTransport, LibP2PTransport]:
    a, b = await make(direct_methods=METHODS), await make(direct_methods=METHODS)
    b.serve("echo", echo)
    await a.connect(b.addresses[0], soon())
    return a, b


def plane(transport: LibP2PTransport) -> DirectPlane:
    assert transport._direct is not None
    return transport._direct


def dialled(transport: LibP2PTransport) -> list[DirectConnection]:
    """The connections over which a peer opens streams, whoever dialled them."""
    return list(plane(transport)._connections)


def stop_listening(transport: LibP2PTransport) -> None:
    plane(transport)._inbound.listener.close()


async def ping(opener: Transport, peer: PeerId, method: str = "echo", size: int = 4) -> None:
    async with opener.open(peer, method, soon()) as stream:
        await stream.send(wire.Chunk(1, size), bytes(size))
        assert await stream.receive(64) == wire.Chunk(1, size)
        await stream.receive_into(memoryview(bytearray(size)))


async def way(opener: LibP2PTransport, other: LibP2PTransport) -> tuple[RouteKind, str]:
    """How one more stream goes, and why."""
    await ping(opener, other.me)
    route = opener.routes[other.me]
    return route.kind, route.why


class TestWays:
    @on_uvloop
    async def test_bulk_data_bypasses_p2pd_over_one_connection(self, make: TransportMaker) -> None:
        a, b = await pair(make)
        b.serve("small", echo)

        def written() -> int:
            return sum(psutil.Process(each.daemon_pid).io_counters().write_chars for each in (a, b))

        assert await way(a, b) == (RouteKind.DIRECT, "")
        a.routes[b.me].record(RouteKind.LIBP2P, "of another stream")
        before = written()
        for _ in range(5):
            await until(lambda: len(plane(a)._idle) == 1)
            await ping(a, b.me, size=4 * MIB)
        assert written() - before < MIB
        await ping(a, b.me, "small", size=4 * MIB)
        assert written() - before > 4 * MIB
        assert len(dialled(a)) == len(plane(b)._inbound._served) == 1 and a.routes[b.me].kind is RouteKind.DIRECT

    @on_uvloop
    async def test_many_first_streams_all_go_directly(self, make: TransportMaker) -> None:
        a, b = await pair(make)
        await asyncio.gather(*(ping(a, b.me) for _ in range(14)))  # more than one grant has tokens
        assert {way for _, way in plane(a)._connections.values()} == {RouteKind.DIRECT}
        assert a.routes[b.me].kind is RouteKind.DIRECT and a.routes[b.me].dialling.failures == 0

    @on_uvloop
    async def test_refused_dials_take_libp2p_at_once_and_pause(self, make: TransportMaker) -> None:
        a, b = await pair(make)
        for each in (a, b):
            stop_listening(each)
        for _ in range(3):
            how, why = await way(a, b)
            assert how is RouteKind.LIBP2P
            assert "cannot be dialled: Connection refused" in why and "cannot dial this" in why
        route = a.routes[b.me]
        assert (route.dialling.failures, route.dialled_back.failures) == (1, 1)
        plane(b)._inbound.listener.start(["127.0.0.1"])
        for attempts in (route.asking, route.dialling, route.dialled_back):
            attempts.not_before = 0.0  # the pause is over
        assert await way(a, b) == (RouteKind.DIRECT, "")

    @on_uvloop
    async def test_peer_that_cannot_be_dialled_dials_back(self, make: TransportMaker) -> None:
        a, b = await pair(make)
        stop_listening(b)
        assert await way(a, b) == (RouteKind.DIALLED_BACK, "")
        (connection,) = dialled(a)
        await until(lambda: len(plane(a)._idle) == 1)
        assert await way(a, b) == (RouteKind.DIALLED_BACK, "") and dialled(a) == [connection]
        await asyncio.gather(*(ping(a, b.me) for _ in range(8)))
        assert {how for _, how in plane(a)._connections.values()} == {RouteKind.DIALLED_BACK}
        assert await way(a, b) == (RouteKind.DIALLED_BACK, "") and a.routes[b.me].dialled_back.failures == 0

    @on_uvloop
    async def test_refused_method_costs_one_connection_and_is_definite(self, make: TransportMaker) -> None:
        a, b = await pair(make)
        await asyncio.gather(*(ping(a, b.me, size=MIB) for _ in range(3)))
        await until(lambda: len(plane(a)._idle) == 3)
        with pytest.raises(PeerGone):
            await ping(a, b.me, "not served")
        assert len(plane(a)._idle) == 2 and await way(a, b) == (RouteKind.DIRECT, "")

    @on_uvloop
    async def test_hasty_stream_blames_nobody(self, make: TransportMaker, monkeypatch: pytest.MonkeyPatch) -> None:
        a, b = await pair(make)
        monkeypatch.setattr("node.direct.inbound._WINDOW_SECONDS", 0.3)
        monkeypatch.setattr("node.direct.inbound._ACCEPTED_PER_WINDOW", 0)  # it answers no one
        with suppress(PeerSilent):
            async with a.open(b.me, "echo", soon(1.0)):
                pass
        route = a.routes[b.me]
        assert route.kind is RouteKind.LIBP2P and route.dialling.failures == route.dialled_back.failures == 0


class TestFailures:
    @asynccontextmanager
    async def streaming(self, a: LibP2PTransport, b: LibP2PTransport) -> AsyncIterator[tuple[Stream, Stream]]:
        """Both ends of a direct stream."""
        served: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        over = asyncio.Event()

        async def sink(_: PeerId, stream: Stream) -> None:
            served.set_result(stream)
            await over.wait()

        b.serve("sink", sink)
        try:
            async with a.open(b.me, "sink", soon(60.0)) as stream:
                yield stream, await served
        finally:
            over.set()

    @on_uvloop
    async def test_reset_stream_is_silent_and_the_next_is_direct(self, make: TransportMaker) -> None:
        a, b = await pair(make)
        with pytest.raises(PeerSilent):
            async with self.streaming(a, b) as (stream, other):
                for each in list(plane(b)._inbound._served):
                    each.abort()
                with pytest.raises(PeerSilent):
                    await other.receive(64)
                await stream.receive(64)
        assert await way(a, b) == (RouteKind.DIRECT, "")

    @on_uvloop
    async def test_firewall_in_mid_stream_ends_it_and_libp2p_takes_over(
        self, make: TransportMaker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection, "SILENCE_SECONDS", 1.0)
        a, b = await pair(make)
        with pytest.raises(PeerSilent, match="does not answer any more"):
            async with self.streaming(a, b) as (stream, other), asyncio.timeout(20):
                for each in (a, b):
                    for listening in plane(each)._inbound.listener._sockets:
                        swallow_packets(listening)
                for end in (*dialled(a), *plane(b)._inbound._served):
                    swallow_packets(end._socket)
                with pytest.raises(PeerSilent, match="does not answer any more"):
                    await other.receive(64)
                await stream.send(wire.Chunk(1, MIB), bytes(MIB))
                await stream.receive(64)
        how, why = await way(a, b)
        assert how is RouteKind.LIBP2P and "its direct connection went silent" in why
        await until(lambda: not dialled(a) and not plane(b)._inbound._served)

    @on_uvloop
    async def test_forget_ends_connections_and_tokens_of_both_directions(self, make: TransportMaker) -> None:
        a, b = await pair(make)
        a.serve("echo", echo)
        for opener, other in ((a, b), (b, a)):
            assert await way(opener, other) == (RouteKind.DIRECT, "")
        await a.forget(b.me, soon())
        assert not dialled(a) and not plane(a)._inbound._served and b.me not in a.routes
        assert len(plane(a)._inbound.issuer) == 0
        await until(lambda: not dialled(b) and not plane(b)._inbound._served)

    @pytest.mark.parametrize("back", [False, True], ids=["dialling", "being dialled back"])
    @on_uvloop
    async def test_open_cancelled_at_any_time_leaves_nothing(self, make: TransportMaker, back: bool) -> None:
        a, b = await pair(make)
        if back:
            stop_listening(b)
        await way(a, b)
        before = descriptors()
        for step in range(40):
            for each in dialled(a):
                each.abort()
            opening = asyncio.create_task(ping(a, b.me))
            await asyncio.sleep(step * 0.0002)
            opening.cancel()
            with suppress(asyncio.CancelledError):
                await opening
        assert (await way(a, b))[0] is (RouteKind.DIALLED_BACK if back else RouteKind.DIRECT)
        await until(lambda: len(plane(a)._idle) == len(dialled(a)) == len(plane(b)._inbound._served) <= 4)
        assert not plane(a)._inbound.awaited
        await until(lambda: descriptors() <= before + 6)


class TestEnds:
    @pytest.fixture
    def make(self, directory: Path) -> TransportMaker:
        """Of transports that are each test's own."""
        return TransportMaker(directory)

    @on_uvloop
    async def test_restarted_peer_is_reached_directly_in_the_same_open(self, make: TransportMaker) -> None:
        a, b = await pair(make)
        assert await way(a, b) == (RouteKind.DIRECT, "")
        await b.__aexit__()
        reborn = await make(direct_methods=METHODS, identity=b._identity)
        reborn.serve("echo", echo)
        await a.connect(reborn.addresses[0], soon())
        assert a.routes[b.me].tokens_left(0.0) > 0
        assert await way(a, reborn) == (RouteKind.DIRECT, "")

    @on_uvloop
    async def test_closed_transport_opens_and_keeps_nothing(self, make: TransportMaker) -> None:
        a, b = await pair(make)
        await way(a, b)
        opening = [asyncio.create_task(ping(a, b.me, size=MIB)) for _ in range(4)]
        await asyncio.sleep(0.002)
        mine = plane(a)
        await a.__aexit__()
        async with asyncio.timeout(20):
            results = await asyncio.gather(*opening, return_exceptions=True)
        assert all(isinstance(each, PeerGone | PeerSilent | None) for each in results)
        assert not mine._connections and not mine._idle
        assert mine.routes[b.me].tokens_left(0.0) and await mine.open(b.me, "echo", soon()) is None


@asynccontextmanager
async def other_program(answer: bytes = b"") -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server of another program beside a peer: its port, and what each connection told it."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        heard.append(await reader.read(1000))
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        yield server.sockets[0].getsockname()[1], heard


class TestAttacks:
    @pytest.mark.parametrize("host, limits", [("127.0.0.1", KNOWN_PEER_LIMITS), ("127.0.0.9", STRANGER_LIMITS)])
    @on_uvloop
    async def test_silent_strangers_neither_pile_up_nor_shut_peers_out(
        self, make: TransportMaker, host: str, limits: tuple[int, int]
    ) -> None:
        """One that is slow to show its token may be taken for a stranger: then it is dialled back."""
        a, b = await pair(make)
        assert await way(a, b) == (RouteKind.DIRECT, "")
        before, most, listener, ways = descriptors(), 0, plane(b)._inbound.listener, Counter[RouteKind]()
        with silent_strangers(("127.0.0.1", plane(b).port), host, 2000):
            for _ in range(30):
                for each in dialled(a):
                    each.abort()
                ways[(await way(a, b))[0]] += 1
                most = max(most, listener.waiting)
        assert ways[RouteKind.DIRECT] >= 27 and ways[RouteKind.DIRECT] + ways[RouteKind.DIALLED_BACK] == 30, ways
        assert 0 < most <= limits[1] + 1  # and the peer that was dialling
        assert b.refused[host, "showed no token, and others came"] > 500
        await until(lambda: listener.waiting == 0 and descriptors() <= before + 6)

    @pytest.mark.parametrize("answer", [b"", b"220 a banner of another program\r\n"], ids=["mute", "banner"])
    @on_uvloop
    async def test_claimed_port_of_another_program_hears_nothing_chosen(
        self, make: TransportMaker, answer: bytes
    ) -> None:
        a, b = await pair(make)
        async with other_program(answer) as (port, heard):
            plane(b)._inbound.listener.port = port
            stop_listening(a)  # it cannot be dialled back
            how, _ = await way(a, b)
            assert how is RouteKind.LIBP2P
            await until(lambda: len(heard) == 1)
            assert len(heard[0]) >= 32 and a.routes[b.me].dialling.failures == 1
            assert bool(answer) is any(who == b.me and "not genuine" in why for who, why in a.refused)

    @on_uvloop
    async def test_dials_back_go_nowhere_else_and_not_often(self, make: TransportMaker) -> None:
        a, b = await pair(make)

        async def dial_back(port: int) -> str:
            token = ConnectionToken(b"\r\nFLUSHALL\r\n".ljust(32))
            async with b.open(a.me, METHOD, soon()) as stream:
                await stream.send(DialBack(port, AES, token))
                return wire.expect(await stream.receive(HEADER_LIMIT), DialBackResult).why

        async with other_program() as (port, heard):
            for forbidden in (0, 22, 1023):
                assert await dial_back(forbidden) == "there is no address that may be dialled"
            for each in (port, port + 1):  # the second is not dialled: it is the answer from before
                assert "no answer" in await dial_back(each)
            assert len(heard) == 1 and b"FLUSHALL" not in heard[0]

    @on_uvloop
    async def test_peer_behind_a_relay_is_never_dialled(
        self, make: TransportMaker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("node.network.libp2p.host_of", lambda address: None)  # of a relayed connection
        a, b = await pair(make)
        how, why = await way(a, b)
        assert how is RouteKind.LIBP2P and "relay" in why
        assert not plane(a)._inbound.listener.waiting and not plane(b)._inbound._served and not dialled(a)
        assert len(plane(b)._inbound.issuer) == 0

    @on_uvloop
    async def test_greedy_peer_gets_sixteen_connections(self, make: TransportMaker) -> None:
        a, b = await pair(make)
        served, over = 0, asyncio.Event()

        async def sink(_: PeerId, stream: Stream) -> None:
            nonlocal served
            served += 1
            await over.wait()

        async def occupy() -> None:
            async with a.open(b.me, "sink", soon(60.0)):
                await over.wait()

        b.serve("sink", sink)
        async with asyncio.TaskGroup() as tasks:
            # One by one: of many at once, some wait for tokens, and may give up before they dial.
            for number in range(1, 25):
                tasks.create_task(occupy())
                await until(lambda number=number: served == number)  # type: ignore[misc]
            assert len(plane(b)._inbound._served) == 16, "so the other eight came over libp2p"
            over.set()
        assert any(who == a.me and why == "too many direct connections" for who, why in b.refused)
