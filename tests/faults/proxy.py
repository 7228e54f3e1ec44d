"""A TCP proxy between peers that delays data or flips bits, for kernels without netem.

    python -m tests.faults.proxy SEED      # on the router of `tests.faults.network`, which redirects all connections

Each line on stdin sets the faults (`Faults`, as JSON). The answer is a line with the numbers of bytes delayed and bits
flipped since the last answer. The proxy ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

PORT = 7077
PIECE_BYTES = 64 << 10
MOST_PIECES = 256
"""The most pieces in transit in each direction of a connection; it reads no more until some are delivered."""
CONNECT_SECONDS = 10.0
_ORIGINAL_DESTINATION = 80
"""SO_ORIGINAL_DST of linux/netfilter_ipv4.h: the original destination of a redirected connection."""


@dataclass(frozen=True, slots=True)
class Faults:
    """`addresses`: whose connections are affected; all if empty. Latency is each way; bytes keep their order.

    `flip_every_bytes`: mean number of bytes per flipped bit; 0: none flip.
    """

    addresses: tuple[str, ...] = ()
    latency_seconds: float = 0.0
    jitter_seconds: float = 0.0
    flip_every_bytes: float = 0.0

    @classmethod
    def from_json(cls, text: str) -> Faults:
        values = json.loads(text)
        return cls(**values | {"addresses": tuple(values["addresses"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def concern(self, ends: Sequence[str]) -> bool:
        return not self.addresses or not set(self.addresses).isdisjoint(ends)


@dataclass(slots=True)
class Wire:
    rng: random.Random
    faults: Faults = field(default_factory=Faults)
    delayed_bytes: int = 0
    flipped_bits: int = 0

    def take_counts(self) -> dict[str, int]:
        """The counts since the last call; resets them."""
        counts = {"delayed_bytes": self.delayed_bytes, "flipped_bits": self.flipped_bits}
        self.delayed_bytes = self.flipped_bits = 0
        return counts

    def after(self, ends: Sequence[str], size: int) -> float:
        faults = self.faults
        if not faults.latency_seconds or not faults.concern(ends):
            return 0.0
        self.delayed_bytes += size
        return faults.latency_seconds + self.rng.uniform(0, faults.jitter_seconds)

    def corrupted(self, ends: Sequence[str], data: bytes) -> bytes:
        every = self.faults.flip_every_bytes
        if not every or not self.faults.concern(ends):
            return data
        at, changed = self.rng.expovariate(1 / every), bytearray(data)
        while at < len(data):
            changed[int(at)] ^= 1 << self.rng.randrange(8)
            self.flipped_bits += 1
            at += 1 + self.rng.expovariate(1 / every)
        return bytes(changed)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = writer.get_extra_info("socket")
        ends = (writer.get_extra_info("peername")[0], original(link))
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                to = await asyncio.open_connection(*ends[1])
        except OSError:  # TimeoutError is one
            writer.transport.abort()
            return
        names = (ends[0], ends[1][0])
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(names, reader, to[1]))
                group.create_task(self._pump(names, to[0], writer))
        except* OSError:
            pass
        finally:
            for each in (writer, to[1]):
                each.transport.abort()

    async def _pump(self, ends: Sequence[str], source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        under_way = asyncio.Queue[tuple[float, bytes]](MOST_PIECES)

        async def send() -> None:
            while True:
                due, data = await under_way.get()
                if (seconds := due - loop.time()) > 0:
                    await asyncio.sleep(seconds)
                if not data:
                    target.write_eof()
                    return
                target.write(self.corrupted(ends, data))
                await target.drain()

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            due = 0.0
            while True:
                data = await source.read(PIECE_BYTES)
                due = max(due, loop.time() + self.after(ends, len(data)))
                await under_way.put((due, data))
                if not data:
                    return


def original(link: socket.socket) -> tuple[str, int]:
    _, port, address = struct.unpack("!HH4s8x", link.getsockopt(socket.SOL_IP, _ORIGINAL_DESTINATION, 16))
    return socket.inet_ntoa(address), port


async def serve(seed: str) -> None:
    wire = Wire(random.Random(f"proxy/{seed}"))
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    server = await asyncio.start_server(wire.carry, "0.0.0.0", PORT, limit=2 * PIECE_BYTES)
    print(json.dumps(wire.take_counts()), flush=True)
    while line := await reader.readline():
        wire.faults = Faults.from_json(line.decode())
        print(json.dumps(wire.take_counts()), flush=True)
    server.close()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(serve(sys.argv[1]))
