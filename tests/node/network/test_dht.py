"""The directory on hivemind's DHT: records travel, liars are rejected, floods are bounded, and p2pd may die."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PContext, P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from node.network import dht, kademlia
from node.network.dht import DhtDirectory
from node.network.directory_records import DirectoryRecord, name_of
from node.network.kademlia import StarlingDHT, dht_key
from node.network.libp2p import LibP2PTransport
from node.runtime.clock import WallClock
from node.runtime.identity import Identity
from tests.conformance.worlds import freeze
from tests.support.directory_examples import RUN, TTL, sealed
from tests.support.long import long
from tests.support.real_transports import TransportMaker, on_uvloop, soon
from tests.support.transport_pool import Pool


@dataclass
class Peer:
    key: Identity
    transport: LibP2PTransport
    directory: DhtDirectory

    async def connect(self, other: Peer) -> None:
        await self.transport.connect(other.transport.addresses[0], soon())
        assert await self.directory.meet(other.transport.me, soon())

    async def find(self, scope: str = "all", limit: int = 100, seconds: float = 10.0) -> dict[str, bytes]:
        return dict(await self.directory.find(scope, limit, soon(seconds)))

    async def call(self, other: Peer, method: str, request: Any, response: Any) -> Any:
        """Send another peer's node what hivemind's own code would not send."""
        link = await self.transport.link()
        peer = (await other.transport.link()).client.peer_id
        async with asyncio.timeout(10):
            return await link.client.call_protobuf_handler(peer, f"StarlingDHT.{method}", request, response)


class PeerMaker(TransportMaker):
    async def peer(self, run: bytes = RUN, offset_seconds: float = 0.0) -> Peer:
        transport = await self()
        key = transport._identity
        dht = DhtDirectory(transport, key, WallClock(), run, lambda: offset_seconds)
        await self.enter_async_context(dht)
        async with asyncio.timeout_at(soon()):
            await dht._up.wait()  # until then it answers nobody
        return Peer(key, transport, dht)

    async def chain(self, count: int) -> list[Peer]:
        """Peers of which each has met only the one before it."""
        peers = [await self.peer() for _ in range(count)]
        for before, after in pairwise(peers):
            await after.connect(before)
        return peers


@pytest.fixture
def make(directory: Path) -> PeerMaker:
    return PeerMaker(directory)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with contextlib.closing(Pool()) as opened:
        yield opened


def store_request(*hints: DirectoryRecord, run: bytes = RUN, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "keys": [dht_key(name_of(run, hint.scope)).to_bytes() for hint in hints],
        "subkeys": [MSGPackSerializer.dumps(hint.peer) for hint in hints],
        "values": [MSGPackSerializer.dumps(hint.pack()) for hint in hints],
        "expiration_time": [hint.expires for hint in hints],
        "in_cache": [False] * len(hints),
        "peer": dht_pb2.NodeInfo(),
    }
    return dht_pb2.StoreRequest(**fields | changes)


def nested(code: int, levels: int) -> bytes:
    """So many extensions of msgpack, one in another."""
    packed: bytes = msgpack.packb([])
    for _ in range(levels):
        inner = msgpack.ExtType(code, packed)
        packed = msgpack.packb([float("inf"), 0.0, [[inner, b"", 1e10]]] if code == 0x50 else [inner])
    return msgpack.packb(msgpack.ExtType(code, packed))


@pytest.mark.real
class TestDirectory:
    @on_uvloop
    async def test_announced_record_is_found_by_all(self, make: PeerMaker) -> None:
        peers = await make.chain(4)
        for index, peer in enumerate(peers):
            await peer.directory.announce("all", b"%d" % index, TTL, soon())
        expected = {peer.transport.me: b"%d" % index for index, peer in enumerate(peers)}
        for peer in peers:
            assert await peer.find() == expected
        assert len(await peers[0].find(limit=2)) == 2
        assert await peers[0].find("other") == {}
        assert not any(peer.directory.refused for peer in peers)

    @on_uvloop
    async def test_record_announced_alone_reaches_later_peers(self, make: PeerMaker) -> None:
        a = await make.peer()
        await a.directory.announce("all", b"first", TTL, soon())
        assert await a.find() == {a.transport.me: b"first"}
        b, c = await make.peer(), await make.peer()
        await b.connect(a)
        await c.connect(b)
        assert await c.find() == {a.transport.me: b"first"}
        await a.directory.announce("all", b"second", TTL, soon())
        assert await c.find() == {a.transport.me: b"second"}

    @on_uvloop
    async def test_unresponsive_directory_is_no_error(self, make: PeerMaker) -> None:
        a, b = await make.chain(2)
        await b.directory.announce("all", b"b", TTL, soon())
        await freeze(b.transport.daemon_pid)
        started = asyncio.get_running_loop().time()
        await a.directory.announce("all", b"a", TTL, soon(0.5))
        assert (await a.find(seconds=0.5))[a.transport.me] == b"a"
        assert not await a.directory.meet(b.transport.me, soon(0.5))
        assert asyncio.get_running_loop().time() - started < 3
        await a.directory.__aexit__()
        assert await a.find("none", seconds=0.2) == {}

    @on_uvloop
    async def test_killed_p2pd_is_survived(self, make: PeerMaker) -> None:
        a, b = await make.chain(2)
        await a.directory.announce("all", b"a", TTL, soon())
        await b.directory.announce("all", b"b", TTL, soon())
        both = await a.find()
        b.directory._records._kept.clear()
        await asyncio.sleep(2.5)  # p2pd is asked who is connected now and then
        for victim in (a, b, a):
            os.kill(victim.transport.daemon_pid or 0, signal.SIGKILL)
            await victim.directory.announce("during", b"x", TTL, soon())
            assert (await victim.find("during"))[victim.transport.me] == b"x"
        c = await make.peer()
        await c.connect(b)
        async with asyncio.timeout(20):
            while await c.find() != both or set(await c.find("during")) != set(both):  # noqa: ASYNC110
                await asyncio.sleep(0.2)

    @on_uvloop
    async def test_close_during_requests_leaves_nothing(self, make: PeerMaker) -> None:
        peers = await make.chain(3)
        await freeze(peers[1].transport.daemon_pid)
        calls = [asyncio.ensure_future(peer.find("x", seconds=0.3)) for peer in peers]
        calls += [asyncio.ensure_future(peer.find("y", seconds=0.3)) for peer in peers]
        await asyncio.sleep(0.1)
        for peer in peers:
            await peer.directory.__aexit__()
        assert await asyncio.gather(*calls) == [{}] * 6

    @on_uvloop
    async def test_node_starts_after_p2pd_was_too_slow(self, make: PeerMaker, monkeypatch: pytest.MonkeyPatch) -> None:
        """A call that p2pd answers too late is no obstacle to the next ones."""
        monkeypatch.setattr(dht, "_RETRY_SECONDS", 0.1)
        monkeypatch.setattr(kademlia, "_DAEMON_SECONDS", 0.3)
        transport = await make()
        await transport.link()
        await freeze(transport.daemon_pid)
        directory = DhtDirectory(transport, transport._identity, WallClock(), RUN, lambda: 0.0)
        async with directory, asyncio.timeout_at(soon()):
            await asyncio.sleep(1.0)  # the calls of a start and of its end are too late
            assert not directory._up.is_set()
            assert transport.daemon_pid
            os.kill(transport.daemon_pid, signal.SIGCONT)
            await directory._up.wait()

    @on_uvloop
    async def test_lying_node_does_not_spoil_honest_records(
        self, make: PeerMaker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        honest = StarlingDHT.rpc_find
        lies: dict[str, DirectoryRecord] = {}

        async def rpc_find(self: Any, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
            response = await honest(self, request, context)
            if hint := lies.get(self.p2p.peer_id.to_base58()):
                found = DictionaryDHTValue()
                found.store(hint.peer, MSGPackSerializer.dumps(hint.pack()), hint.expires)
                for result in response.results:
                    result.type, result.expiration_time = dht_pb2.FOUND_DICTIONARY, hint.expires
                    result.value = MSGPackSerializer.dumps(found)
                    result.nearest_node_ids.append(bytes(20))
                    result.nearest_peer_ids.append(b"x")
            return response

        monkeypatch.setattr(StarlingDHT, "rpc_find", rpc_find)
        a, liar, c = await make.chain(3)
        await c.connect(a)
        await a.directory.announce("all", b"a", TTL, soon())
        lies[liar.transport.me] = dataclasses.replace(sealed(a.key, ttl=500), value=b"forged")
        assert await c.find() == {a.transport.me: b"a"}
        assert c.directory.refused == {(liar.transport.me, "a record that is not signed by its peer"): 1}


@pytest.mark.real
class TestUndisturbed:
    """Nothing happens to the peers themselves: all tests of two have the same."""

    @pytest.fixture
    def make(self, directory: Path, pool: Pool) -> PeerMaker:
        return PeerMaker(directory, pool)

    @on_uvloop
    async def test_invalid_records_are_rejected_and_counted(self, make: PeerMaker) -> None:
        a, b = await make.chain(2)
        good, me = sealed(a.key), a.transport.me
        forged = dataclasses.replace(good, value=b"forged")
        lies = {
            "a record that is not signed by its peer": store_request(forged),
            "a record that is valid for too long": store_request(sealed(a.key, ttl=700)),
            "a record that has expired": store_request(sealed(a.key, ttl=-1)),
            "a record of another run, or under a key that is not its own": store_request(good, run=bytes(32)),
            "not a directory record": store_request(good, values=[MSGPackSerializer.dumps(b"junk")]),
            "a record that is too large": store_request(good, values=[MSGPackSerializer.dumps(bytes(4097))]),
        }
        for why, request in lies.items():
            response = await a.call(b, "rpc_store", request, dht_pb2.StoreResponse)
            assert list(response.store_ok) == [False]
            assert b.directory.refused[me, why] == 1, (why, b.directory.refused)
        assert len(b.directory._records) == 0
        response = await a.call(b, "rpc_store", store_request(good), dht_pb2.StoreResponse)
        assert list(response.store_ok) == [True] and await b.find() == {me: b"v"}

    @on_uvloop
    async def test_invalid_requests_are_rejected_and_counted(self, make: PeerMaker) -> None:
        a, b = await make.chain(2)
        key = dht_key(b"k").to_bytes()
        good, stranger = sealed(a.key), dht_pb2.NodeInfo(node_id=bytes(20))
        bombs = [nested(code, 200) for code in (0x40, 0x50)]  # hivemind's own reader would end this process
        bad = [
            ("stores several at once, or none", "rpc_store", store_request(good, good)),
            *(
                ("malformed record", "rpc_store", store_request(good, subkeys=[packed]))
                for packed in (MSGPackSerializer.dumps(None), *bombs)
            ),
            ("asks for several keys at once, or none", "rpc_find", dht_pb2.FindRequest(keys=[key] * 1000)),
            ("claims a node id that is not its own", "rpc_ping", dht_pb2.PingRequest(peer=stranger)),
        ]
        for why, method, request in bad:
            with pytest.raises(P2PHandlerError, match=why):
                await a.call(b, method, request, dht_pb2.PingResponse)
        assert b.directory.refused == Counter((a.transport.me, why) for why, *_ in bad)
        for packed in bombs:
            response = await a.call(b, "rpc_store", store_request(good, values=[packed]), dht_pb2.StoreResponse)
            assert list(response.store_ok) == [False]

    @on_uvloop
    async def test_stored_flood_is_bounded(self, make: PeerMaker) -> None:
        a, b = await make.chain(2)
        taken = errors = 0
        for index in range(150):
            request = store_request(sealed(a.key, scope=f"s{index}", value=bytes(3000)))
            try:
                response = await a.call(b, "rpc_store", request, dht_pb2.StoreResponse)
                taken += response.store_ok[0]
            except P2PHandlerError:
                errors += 1
        assert taken == len(b.directory._records) == 16
        assert errors == 0 or b.directory.refused[a.transport.me, "too many requests"] == errors

    @on_uvloop
    async def test_request_flood_is_rejected(self, make: PeerMaker) -> None:
        a, b = await make.chain(2)
        request = dht_pb2.FindRequest(keys=[dht_key(b"k").to_bytes()])
        calls = (a.call(b, "rpc_find", request, dht_pb2.FindResponse) for _ in range(300))
        results = await asyncio.gather(*calls, return_exceptions=True)
        turned_away = sum(isinstance(result, P2PHandlerError) for result in results)
        assert b.directory.refused[a.transport.me, "too many requests"] == turned_away > 0

    @pytest.mark.parametrize("ahead_seconds", [-3600.0, *long(600.0)])
    @on_uvloop
    async def test_skewed_clock_is_corrected(self, make: PeerMaker, ahead_seconds: float) -> None:
        class Off(WallClock):
            def wall(self) -> float:
                return super().wall() + ahead_seconds

        a, b = await make.peer(), await make.peer(offset_seconds=-ahead_seconds)
        b.directory._clock = Off()
        await b.connect(a)
        await a.directory.announce("all", b"a", TTL, soon())
        await b.directory.announce("all", b"b", TTL, soon())
        assert await a.find() == await b.find() == {a.transport.me: b"a", b.transport.me: b"b"}

    @on_uvloop
    async def test_records_of_other_runs_are_rejected(self, make: PeerMaker) -> None:
        a, b = await make.peer(), await make.peer(run=bytes(32))
        await b.connect(a)
        await a.directory.announce("all", b"a", TTL, soon())
        assert await b.find() == {}
        why = "a record of another run, or under a key that is not its own"
        assert list(b.directory.refused) == [(a.transport.me, why)]

    @on_uvloop
    async def test_invalid_announcement_raises_value_error(self, make: PeerMaker) -> None:
        a = await make.peer()
        for scope, value, ttl in (("s", bytes(4096), TTL), ("s" * 129, b"", TTL), ("s", b"", 601), ("s", b"", 0)):
            with pytest.raises(ValueError):
                await a.directory.announce(scope, value, ttl, soon())
