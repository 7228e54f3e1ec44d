"""A node sends another what crashes hivemind: extensions of MessagePack, nested deeply. It prints what came of it."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import msgpack
from hivemind.proto import dht_pb2

from node.network.dht import DhtDirectory
from node.network.libp2p import LibP2PConfig, LibP2PTransport
from node.runtime import identity
from node.runtime.clock import WallClock


def bomb(code: int, levels: int) -> bytes:
    packed: bytes = msgpack.packb([])
    for _ in range(levels):
        nested = msgpack.ExtType(code, packed)
        packed = msgpack.packb([float("inf"), 0.0, [[nested, b"", 1e10]]] if code == 0x50 else [nested])
    whole: bytes = msgpack.packb(msgpack.ExtType(code, packed))
    return whole


async def main(directory: Path) -> None:
    transports, peers = list[LibP2PTransport](), list[DhtDirectory]()
    for name in "ab":
        key = identity.create(directory / name)
        transports.append(await LibP2PTransport(LibP2PConfig(key, runtime_directory=directory)).__aenter__())
        peers.append(await DhtDirectory(transports[-1], key, WallClock(), bytes(32)).__aenter__())
    (a, b), (here, there) = peers, transports
    loop = asyncio.get_running_loop()
    await here.connect(there.addresses[0], loop.time() + 10)
    assert await a.meet(there.me, loop.time() + 10)
    client = (await here.link()).client
    target = (await there.link()).client.peer_id
    for code in (0x40, 0x50):
        for where in ("subkeys", "values"):
            evil, good = bomb(code, 200), msgpack.packb("a")
            tags, values = ([evil], [good]) if where == "subkeys" else ([b""], [evil])
            request = dht_pb2.StoreRequest(
                keys=[bytes(20)],
                subkeys=tags,
                values=values,
                expiration_time=[1e10],
                in_cache=[False],
                peer=dht_pb2.NodeInfo(),
            )
            try:
                async with asyncio.timeout(10):
                    await client.call_protobuf_handler(target, "StarlingDHT.rpc_store", request, dht_pb2.StoreResponse)
            except Exception as error:  # noqa: BLE001 - whatever it is, the test counts it
                print("refused", error)
    assert await a.meet(there.me, loop.time() + 10)
    for each in (*peers, *transports):
        await each.__aexit__()
    print("survived", sum(b.refused.values()))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="st") as made:
        asyncio.run(main(Path(made)))
