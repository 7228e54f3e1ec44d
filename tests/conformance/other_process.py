"""A peer in a process of its own: `python -m tests.conformance.other_process IDENTITY_FILE`.

Prints its first multiaddr on a line, serves "echo", and ends when its standard input does. With a multiaddr as second
argument, it connects there, sends itself an echo through that peer, and prints "echoed".
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

from node.network.libp2p import LibP2PTransport
from node.runtime import identity
from protocols import wire
from protocols.base import PeerId, Stream


async def echo(peer: PeerId, stream: Stream) -> None:
    while True:
        chunk = wire.expect(await stream.receive(64), wire.Chunk)
        buffer = bytearray(chunk.size)
        await stream.receive_into(memoryview(buffer))
        await stream.send(chunk, buffer)


async def main(path: Path, other: str | None = None) -> None:
    loop = asyncio.get_running_loop()
    async with LibP2PTransport(identity.load_or_create(path)) as transport:
        transport.serve("echo", echo)
        print(transport.addresses[0], flush=True)
        if other is not None:
            peer = await transport.connect(other, loop.time() + 10)
            async with transport.open(peer, "echo", loop.time() + 10) as stream:
                await stream.send(wire.Chunk(1, 5), b"hello")
                print("echoed", await stream.receive(64), flush=True)
        await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), *sys.argv[2:]))
