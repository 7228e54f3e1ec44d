"""The directory on hivemind's DHT: hints travel, liars are refused, floods are bounded, and p2pd may die."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import pytest
import uvloop
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PContext, P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hypothesis import given
from hypothesis import strategies as st

from node.network.dht import DhtDirectory
from node.network.directory_records import (
    MAX_HINTS_PER_KEY,
    DirectoryRecord,
    RecordStore,
    check,
    loads,
    name_of,
    unpack,
)
from node.network.kademlia import StarlingDHT, place
from node.network.libp2p import LibP2PConfig, LibP2PTransport
from node.runtime import identity
from node.runtime.clock import WallClock
from node.runtime.identity import Identity
from protocols.base import BadPayload
from tests.conformance.worlds import freeze, running_daemons

RUN = bytes(range(32))
TTL = 60.0


def soon(seconds: float = 10.0) -> float:
    return asyncio.get_running_loop().time() + seconds


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
        """Say to another's node what hivemind's own code would not."""
        link = await self.transport.link()
        peer = (await other.transport.link()).client.peer_id
        async with asyncio.timeout(10):
            return await link.client.call_protobuf_handler(peer, f"StarlingDHT.{method}", request, response)


Make = Callable[..., Awaitable[Peer]]


def run(body: Callable[[Make], Awaitable[None]]) -> None:
    """Run `body` with a maker of peers, all of which are closed after it; nothing may be left then."""

    async def main(directory: Path) -> None:
        count = 0
        async with AsyncExitStack() as stack:

            async def make(run: bytes = RUN, offset_seconds: float = 0.0) -> Peer:
                nonlocal count
                count += 1
                key = identity.create(directory / f"peer{count}")
                transport = LibP2PTransport(LibP2PConfig(key, runtime_directory=directory))
                await stack.enter_async_context(transport)
                dht = DhtDirectory(transport, key, WallClock(), run, lambda: offset_seconds)
                return Peer(key, transport, await stack.enter_async_context(dht))

            await body(make)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with tempfile.TemporaryDirectory(prefix="st") as made, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(Path(made)))
    assert running_daemons() == []


async def chain(make: Make, count: int) -> list[Peer]:
    """Peers of which each has met only the one before it."""
    peers = [await make() for _ in range(count)]
    for before, after in pairwise(peers):
        await after.connect(before)
    return peers


def sealed(
    key: Identity, scope: str = "all", value: bytes = b"v", ttl: float = TTL, run: bytes = RUN
) -> DirectoryRecord:
    draft = DirectoryRecord(key.peer_id, scope, WallClock().wall() + ttl, value)
    return dataclasses.replace(draft, signature=key.sign(draft.message(run)))


def store_request(*hints: DirectoryRecord, run: bytes = RUN, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "keys": [place(name_of(run, hint.scope)).to_bytes() for hint in hints],
        "subkeys": [MSGPackSerializer.dumps(hint.peer) for hint in hints],
        "values": [MSGPackSerializer.dumps(hint.pack()) for hint in hints],
        "expiration_time": [hint.expires for hint in hints],
        "in_cache": [False] * len(hints),
        "peer": dht_pb2.NodeInfo(),
    }
    return dht_pb2.StoreRequest(**fields | changes)


@pytest.mark.real
class TestDirectory:
    def test_announced_record_is_found_by_all(self) -> None:
        async def body(make: Make) -> None:
            peers = await chain(make, 4)
            for index, peer in enumerate(peers):
                await peer.directory.announce("all", b"%d" % index, TTL, soon())
            expected = {peer.transport.me: b"%d" % index for index, peer in enumerate(peers)}
            for peer in peers:
                assert await peer.find() == expected
            assert len(await peers[0].find(limit=2)) == 2
            assert await peers[0].find("other") == {}
            assert not any(peer.directory.refused for peer in peers)

        run(body)

    def test_record_announced_alone_reaches_later_peers(self) -> None:
        async def body(make: Make) -> None:
            a = await make()
            await a.directory.announce("all", b"first", TTL, soon())
            assert await a.find() == {a.transport.me: b"first"}
            b, c = await make(), await make()
            await b.connect(a)
            await c.connect(b)
            assert await c.find() == {a.transport.me: b"first"}
            await a.directory.announce("all", b"second", TTL, soon())
            assert await c.find() == {a.transport.me: b"second"}

        run(body)

    def test_records_expire(self) -> None:
        async def body(make: Make) -> None:
            a, b = await chain(make, 2)
            await a.directory.announce("all", b"short", 1.0, soon())
            assert await b.find() == {a.transport.me: b"short"}
            await asyncio.sleep(1.1)
            assert await b.find() == {} == await a.find()

        run(body)

    @pytest.mark.parametrize("ahead_seconds", [-3600.0, 600.0])
    def test_skewed_clock_is_corrected(self, ahead_seconds: float) -> None:
        class Off(WallClock):
            def wall(self) -> float:
                return super().wall() + ahead_seconds

        async def body(make: Make) -> None:
            a, b = await make(), await make(offset_seconds=-ahead_seconds)
            b.directory._clock = Off()
            await b.connect(a)
            await a.directory.announce("all", b"a", TTL, soon())
            await b.directory.announce("all", b"b", TTL, soon())
            assert await a.find() == await b.find() == {a.transport.me: b"a", b.transport.me: b"b"}

        run(body)

    def test_records_of_other_runs_are_rejected(self) -> None:
        async def body(make: Make) -> None:
            a, b = await make(), await make(run=bytes(32))
            await b.connect(a)
            await a.directory.announce("all", b"a", TTL, soon())
            assert await b.find() == {}
            why = "a record of another run, or under a key that is not its own"
            assert list(b.directory.refused) == [(a.transport.me, why)]

        run(body)

    def test_invalid_announcement_raises_value_error(self) -> None:
        async def body(make: Make) -> None:
            a = await make()
            for scope, value, ttl in (("s", bytes(4096), TTL), ("s" * 129, b"", TTL), ("s", b"", 601), ("s", b"", 0)):
                with pytest.raises(ValueError):
                    await a.directory.announce(scope, value, ttl, soon())

        run(body)

    def test_unresponsive_directory_is_no_error(self) -> None:
        async def body(make: Make) -> None:
            a, b = await chain(make, 2)
            await b.directory.announce("all", b"b", TTL, soon())
            await freeze(b.transport.daemon_pid)
            started = asyncio.get_running_loop().time()
            await a.directory.announce("all", b"a", TTL, soon(0.5))
            assert (await a.find(seconds=0.5))[a.transport.me] == b"a"
            assert not await a.directory.meet(b.transport.me, soon(0.5))
            assert asyncio.get_running_loop().time() - started < 3
            await a.directory.__aexit__()
            assert await a.find("none", seconds=0.2) == {}

        run(body)

    def test_killed_p2pd_is_survived(self) -> None:
        async def body(make: Make) -> None:
            a, b = await chain(make, 2)
            await a.directory.announce("all", b"a", TTL, soon())
            await b.directory.announce("all", b"b", TTL, soon())
            both = await a.find()
            b.directory._records._kept.clear()
            await asyncio.sleep(2.5)  # p2pd is asked who is connected now and then
            for victim in (a, b, a):
                os.kill(victim.transport.daemon_pid or 0, signal.SIGKILL)
                await victim.directory.announce("during", b"x", TTL, soon())
                assert (await victim.find("during"))[victim.transport.me] == b"x"
            c = await make()
            await c.connect(b)
            async with asyncio.timeout(20):
                while await c.find() != both or set(await c.find("during")) != set(both):  # noqa: ASYNC110
                    await asyncio.sleep(0.2)

        run(body)

    def test_close_during_requests_leaves_nothing(self) -> None:
        async def body(make: Make) -> None:
            peers = await chain(make, 3)
            await freeze(peers[1].transport.daemon_pid)
            calls = [asyncio.ensure_future(peer.find("x", seconds=0.3)) for peer in peers]
            calls += [asyncio.ensure_future(peer.find("y", seconds=0.3)) for peer in peers]
            await asyncio.sleep(0.1)
            for peer in peers:
                await peer.directory.__aexit__()
            assert await asyncio.gather(*calls) == [{}] * 6

        run(body)


@pytest.mark.real
class TestLiars:
    def test_invalid_records_are_rejected_and_counted(self) -> None:
        async def body(make: Make) -> None:
            a, b = await chain(make, 2)
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

        run(body)

    def test_invalid_requests_are_rejected_and_counted(self) -> None:
        async def body(make: Make) -> None:
            a, b = await chain(make, 2)
            key = place(b"k").to_bytes()
            good, stranger = sealed(a.key), dht_pb2.NodeInfo(node_id=bytes(20))
            bad = {
                "stores several at once, or none": ("rpc_store", store_request(good, good)),
                "malformed record": ("rpc_store", store_request(good, subkeys=[MSGPackSerializer.dumps(None)])),
                "asks for several keys at once, or none": ("rpc_find", dht_pb2.FindRequest(keys=[key] * 1000)),
                "claims a node id that is not its own": ("rpc_ping", dht_pb2.PingRequest(peer=stranger)),
            }
            for why, (method, request) in bad.items():
                with pytest.raises(P2PHandlerError, match=why):
                    await a.call(b, method, request, dht_pb2.PingResponse)
                assert b.directory.refused[a.transport.me, why] == 1

        run(body)

    def test_lying_node_does_not_spoil_honest_records(self, monkeypatch: pytest.MonkeyPatch) -> None:
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
                    result.nearest_peer_ids.append(b"nobody")
            return response

        async def body(make: Make) -> None:
            a, liar, c = await chain(make, 3)
            await c.connect(a)
            await a.directory.announce("all", b"a", TTL, soon())
            lies[liar.transport.me] = dataclasses.replace(sealed(a.key, ttl=500), value=b"forged")
            assert await c.find() == {a.transport.me: b"a"}
            assert c.directory.refused == {(liar.transport.me, "a record that is not signed by its peer"): 1}

        monkeypatch.setattr(StarlingDHT, "rpc_find", rpc_find)
        run(body)

    def test_stored_flood_is_bounded(self) -> None:
        async def body(make: Make) -> None:
            a, b = await chain(make, 2)
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

        run(body)

    def test_request_flood_is_rejected(self) -> None:
        async def body(make: Make) -> None:
            a, b = await chain(make, 2)
            request = dht_pb2.FindRequest(keys=[place(b"k").to_bytes()])
            calls = (a.call(b, "rpc_find", request, dht_pb2.FindResponse) for _ in range(300))
            results = await asyncio.gather(*calls, return_exceptions=True)
            turned_away = sum(isinstance(result, P2PHandlerError) for result in results)
            assert b.directory.refused[a.transport.me, "too many requests"] == turned_away > 0

        run(body)


BOMB = """
import asyncio, tempfile
from pathlib import Path
import msgpack
from hivemind.p2p import P2PContext, P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.dht.routing import DHTID
from node.runtime import identity
from node.runtime.clock import WallClock
from node.network.dht import DhtDirectory
from node.network.libp2p import LibP2PConfig, LibP2PTransport

def bomb(code, levels):
    packed = msgpack.packb([])
    for _ in range(levels):
        nested = msgpack.ExtType(code, packed)
        packed = msgpack.packb([float("inf"), 0.0, [[nested, b"", 1e10]]] if code == 0x50 else [nested])
    return msgpack.packb(msgpack.ExtType(code, packed))

async def main(directory):
    peers = []
    for name in "ab":
        key = identity.create(directory / name)
        transport = LibP2PTransport(LibP2PConfig(key, runtime_directory=directory))
        await transport.__aenter__()
        peers.append(await DhtDirectory(transport, key, WallClock(), bytes(32)).__aenter__())
    a, b = peers
    loop = asyncio.get_running_loop()
    await a._transport.connect(b._transport.addresses[0], loop.time() + 10)
    assert await a.meet(b._transport.me, loop.time() + 10)
    client = (await a._transport.link()).client
    target = (await b._transport.link()).client.peer_id
    for code in (0x40, 0x50):
        for where in ("subkeys", "values"):
            evil, good = bomb(code, 200), msgpack.packb("a")
            tags, values = ([evil], [good]) if where == "subkeys" else ([b""], [evil])
            request = dht_pb2.StoreRequest(keys=[bytes(20)], subkeys=tags, values=values,
                expiration_time=[1e10], in_cache=[False], peer=dht_pb2.NodeInfo())
            try:
                async with asyncio.timeout(10):
                    await client.call_protobuf_handler(target, "StarlingDHT.rpc_store", request, dht_pb2.StoreResponse)
            except Exception as error:
                print("refused", error)
    assert await a.meet(b._transport.me, loop.time() + 10)
    for peer in peers:
        await peer.__aexit__()
        await peer._transport.__aexit__()
    print("survived", sum(b.refused.values()))

with tempfile.TemporaryDirectory(prefix="st") as made:
    asyncio.run(main(Path(made)))
"""


@pytest.mark.real
def test_nested_extension_bomb_is_survived() -> None:
    child = subprocess.run((sys.executable, "-W", "ignore", "-c", BOMB), capture_output=True, text=True, timeout=50)
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.splitlines()[-1] == "survived 4", child.stdout


class TestUnpacking:
    def test_dht_values_round_trip(self) -> None:
        found = DictionaryDHTValue()
        found.store("peer", b"value", 1e10)
        assert loads(MSGPackSerializer.dumps(found)) == [("peer", b"value", 1e10)]
        for plain in ("peer", b"value"):
            assert loads(MSGPackSerializer.dumps(plain)) == plain

    @pytest.mark.parametrize(
        "thing",
        [None, 1, 1.0, [], [b""], {}, (1, 2), msgpack.ExtType(0x50, b""), msgpack.ExtType(0x41, b"x"), bytes(5000)],
    )
    def test_other_objects_are_rejected(self, thing: object) -> None:
        with pytest.raises(ValueError):
            loads(MSGPackSerializer.dumps(thing))

    @pytest.mark.parametrize(
        "items", [[["p", b"v"]], [["p", "v", 1.0]], [[b"p", b"v", 1.0]], [["p", b"v", float("inf")]], [3], 3]
    )
    def test_dictionary_of_other_items_is_rejected(self, items: object) -> None:
        packed = msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([1e9, 0.0, items])))
        with pytest.raises(ValueError):
            loads(packed)

    @given(st.binary(max_size=300))
    def test_any_bytes_raise_at_most_value_error(self, packed: bytes) -> None:
        for data in (packed, msgpack.packb(msgpack.ExtType(0x50, packed))):
            with suppress(ValueError):
                assert isinstance(loads(data), str | bytes | list)
        with suppress(BadPayload):
            unpack(packed)

    def test_deep_nesting_is_rejected(self) -> None:
        for deep in (b"\x91" * 100_000, b"\x91" * 400, b"\xdd\xff\xff\xff\xff" * 100):
            with pytest.raises(ValueError):
                loads(deep)
            with pytest.raises(BadPayload):
                unpack(deep[:4096])


class TestHints:
    def test_signature_covers_every_field(self, tmp_path: Path) -> None:
        key, other = identity.create(tmp_path / "key"), identity.create(tmp_path / "other")
        hint, now = sealed(key), WallClock().wall()
        check(unpack(hint.pack()), RUN, now, key)
        changes: list[dict[str, Any]] = [
            {"peer": other.peer_id},
            {"scope": "other"},
            {"value": b"w"},
            {"expires": hint.expires + 1},
            {"expires": float("nan")},
            {"signature": bytes(64)},
        ]
        for change in changes:
            with pytest.raises(BadPayload):
                check(dataclasses.replace(hint, **change), RUN, now, key)
        with pytest.raises(BadPayload):
            check(hint, bytes(32), now, key)

    def test_record_names_do_not_collide(self) -> None:
        assert len({name_of(b"ab", "c"), name_of(b"a", "bc"), name_of(b"", "abc")}) == 3


class TestShelf:
    def test_store_size_is_bounded(self) -> None:
        records = RecordStore(lambda: 0.0)
        for key in range(300):
            for peer in range(20):
                records.put(key, f"{key}/{peer}", b"", 100.0)
        assert len(records) == 4096 and len(records._kept) <= 256

    def test_keys_per_peer_are_bounded(self) -> None:
        records = RecordStore(lambda: 0.0)
        assert sum(records.put(key, "greedy", b"", 100.0) for key in range(100)) == 16
        assert records.put(50, "other", b"", 100.0)

    def test_full_key_keeps_and_renews_existing_records(self) -> None:
        now = [0.0]
        records = RecordStore(lambda: now[0])
        honest, strangers = [f"{n}" for n in range(10)], [f"stranger {n}" for n in range(MAX_HINTS_PER_KEY)]
        assert all(records.put("key", peer, b"", 180.0) for peer in honest)
        assert sum(records.put("key", peer, b"", 655.0) for peer in strangers) == MAX_HINTS_PER_KEY - len(honest)
        now[0] = 120.0
        assert all(records.put("key", peer, b"", 300.0) for peer in honest)
        assert not records.put("key", "late", b"", 780.0)
        now[0] = 301.0
        assert records.put("key", "late", b"", 480.0) and len(records) <= MAX_HINTS_PER_KEY
        assert "late" in records.live("key")

    def test_expired_records_are_replaced_and_older_ones_rejected(self) -> None:
        now = [0.0]
        records = RecordStore(lambda: now[0])
        assert records.put("key", "peer", b"new", 20.0)
        assert not records.put("key", "peer", b"old", 10.0)
        assert not records.put("key", "dead", b"", 0.0)
        assert records.live("key")["peer"].value == b"new"
        for key in range(16):
            records.put(key, "greedy", b"", 30.0)
        now[0] = 31.0
        assert records.live("key") == {} and records.put("key", "greedy", b"", 60.0) and len(records) == 1
