"""One peer of `benchmarks.routes` in a process of its own. It reads commands as `benchmarks.averaging_peer` does.

    connect {peers}     connects to the public peer, the first. A peer at home waits until it has a place at this relay
    meet {to}           connects to another peer at home through the relay
    send {to, method}   sends chunks over a stream that the transport opens as it likes, until the receiver has all
    plain {host, port}  sends or receives as much over one TCP connection from this port to the same port of that host,
                        which dials, too: what the routers make of it, the transport meets as well

`seconds` begin when the stream or the connection is open.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from contextlib import suppress
from typing import Any

import uvloop

from benchmarks.averaging_peer import MOVE, Peer, main
from benchmarks.averaging_setup import Setup
from node.direct.punch import bound, connected
from protocols import wire
from protocols.aio import loop_time
from protocols.base import CHUNK_BYTES, PeerError, PeerId, Stream

OVER_LIBP2P = "starling/benchmark/libp2p/1"
"""Its streams never go directly, as those of all methods with `--direct-port off`."""
PUBLIC = 0
_RELAY_SECONDS, _GLANCE_SECONDS = 60.0, 0.2


class RoutesPeer(Peer):
    """This process."""

    async def connect(self, peers: list[tuple[PeerId, str]]) -> dict[str, Any]:
        self._peers, self._relay = [peer for peer, _ in peers], peers[PUBLIC][1]
        self.transport.serve(OVER_LIBP2P, self._on_move)
        if self.setup.rank != PUBLIC:
            await self.transport.connect(self._relay, loop_time() + self.setup.deadline_seconds)
            async with asyncio.timeout(_RELAY_SECONDS):
                while not any("p2p-circuit" in each for each in self.transport.addresses):  # noqa: ASYNC110
                    await asyncio.sleep(_GLANCE_SECONDS)
        return {}

    async def meet(self, to: int) -> dict[str, Any]:
        deadline = loop_time() + self.setup.deadline_seconds
        await self.transport.connect(f"{self._relay}/p2p-circuit/p2p/{self._peers[to]}", deadline)
        return {}

    async def send(self, to: int, method: str, chunks: int) -> dict[str, Any]:
        peer, data, began = self._peers[to], bytes(CHUNK_BYTES), time.monotonic()
        try:
            async with self.transport.open(peer, method, loop_time() + self.setup.deadline_seconds) as stream:
                opened = time.monotonic()
                await stream.send(wire.Chunk(chunks, 0))
                for index in range(chunks):
                    await stream.send(wire.Chunk(index, len(data)), data)
                await stream.receive(64)  # it has arrived
                ended = time.monotonic()
        except PeerError as error:
            return {"refused": str(error), "open": time.monotonic() - began}
        way = self.transport.routes[peer].kind if method == MOVE else "libp2p"
        return {"way": way, "open": opened - began, "seconds": ended - opened}

    async def _on_move(self, peer: PeerId, stream: Stream) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for _ in range(wire.expect(await stream.receive(64), wire.Chunk).index):
            await stream.receive(64)
            await stream.receive_into(buffer)
        await stream.send(wire.Chunk(0, 0))

    async def plain(self, host: str, port: int, chunks: int, sends: bool) -> dict[str, Any]:
        async def transfer(sock: socket.socket) -> float:
            sock.settimeout(self.setup.deadline_seconds)
            return await asyncio.to_thread(send_plain if sends else receive_plain, sock, chunks)

        async with asyncio.timeout(self.setup.deadline_seconds):
            return {"seconds": await connected(bound, port, (host, port), transfer)}


def send_plain(sock: socket.socket, chunks: int) -> float:
    data, began = bytes(CHUNK_BYTES), time.monotonic()
    with sock:
        for _ in range(chunks):
            sock.sendall(data)
        sock.recv(1)  # it has arrived
    return time.monotonic() - began


def receive_plain(sock: socket.socket, chunks: int) -> float:
    buffer, left, began = bytearray(CHUNK_BYTES), chunks * CHUNK_BYTES, time.monotonic()
    with sock:
        while left > 0:
            count = sock.recv_into(buffer)
            if not count:
                raise EOFError("the sender closed the connection")
            left -= count
        sock.sendall(b".")
    return time.monotonic() - began


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the parent process is gone
        uvloop.run(main(Setup(**json.loads(sys.argv[1])), RoutesPeer))
