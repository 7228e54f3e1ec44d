"""The floors: the bytes of a round between the same processes over TCP, and nothing else done.

Every two peers share one connection, non-blocking on both ends. Each peer sends every other peer that one's part of its
vector, as in a reduce-scatter, and its own part to all, as in an all-gather: 2 (N - 1) / N vectors in all. Nothing is
added up, and no peer waits for one step before the next. What arrives goes into one reused record a connection, and is
not even kept: this is below what any averaging can reach.

With the path "aead", each record of 256 KiB is sealed with AES-128-GCM, with a key of its own for each direction. Keys
are exchanged in the clear: this is a floor, no protocol.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from collections import deque
from collections.abc import Iterator

import uvloop
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks.averaging_setup import Setup
from benchmarks.peers.blocking_peer import Answer, BlockingPeer, run

HOST = "127.0.0.1"
RECORD_BYTES = 1 << 18
TAG_BYTES = 16
KEY_BYTES = 16
RECORDS_AT_ONCE = 4
"""How many records a socket moves before the loop turns to the next one."""


class Plain:
    """Records go as they are."""

    def sealed(self, record: memoryview) -> memoryview:
        """The bytes to send for a record."""
        return record

    def room(self, record: memoryview) -> memoryview:
        """Where to receive the bytes of a record."""
        return record

    def opened(self, record: memoryview) -> None:
        """All bytes of the record are in its room."""


class Sealed:
    """Records go as AES-128-GCM ciphertext and tag, by way of one reused buffer in each direction."""

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._send, self._receive = AESGCM(send_key), AESGCM(receive_key)
        self._sent = self._received = 0
        self._out, self._in = (memoryview(bytearray(RECORD_BYTES + TAG_BYTES)) for _ in range(2))

    def sealed(self, record: memoryview) -> memoryview:
        out = self._out[: len(record) + TAG_BYTES]
        self._send.encrypt_into(self._sent.to_bytes(12, "big"), record, None, out)
        self._sent += 1
        return out

    def room(self, record: memoryview) -> memoryview:
        return self._in[: len(record) + TAG_BYTES]

    def opened(self, record: memoryview) -> None:
        self._receive.decrypt_into(self._received.to_bytes(12, "big"), self.room(record), None, record)
        self._received += 1


class Link:
    """The connection to one other peer.

    Attributes:
        last: the last record that arrived.
    """

    def __init__(self, connection: socket.socket, cipher: Plain | Sealed) -> None:
        self._socket, self._cipher, self._record = connection, cipher, memoryview(bytearray(RECORD_BYTES))
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def exchange(self, outgoing: Iterator[memoryview], sizes: Iterator[int]) -> None:
        """Send these records and receive records of these sizes, both directions at once.

        Raises:
            OSError, EOFError: the connection broke.
        """
        loop = asyncio.get_running_loop()
        self._sending, self._outgoing = memoryview(b""), deque(outgoing)
        self._incoming = deque(self._record[:size] for size in sizes)
        self._missing = self._cipher.room(self._incoming[0])
        self._all_sent, self._all_received = loop.create_future(), loop.create_future()
        loop.add_reader(self._socket, self._step, self._receive, self._all_received)
        loop.add_writer(self._socket, self._step, self._send, self._all_sent)
        try:
            await asyncio.gather(self._all_sent, self._all_received)
        finally:
            loop.remove_reader(self._socket)
            loop.remove_writer(self._socket)

    def _step(self, step: object, done: asyncio.Future[None]) -> None:
        try:
            step()  # type: ignore[operator]
        except BlockingIOError:
            return
        except (OSError, EOFError) as error:
            if not done.done():
                done.set_exception(error)

    def _send(self) -> None:
        for _ in range(RECORDS_AT_ONCE):
            if not self._sending:
                if not self._outgoing:
                    asyncio.get_running_loop().remove_writer(self._socket)
                    return self._all_sent.set_result(None)
                self._sending = self._cipher.sealed(self._outgoing.popleft())
            self._sending = self._sending[self._socket.send(self._sending) :]

    def _receive(self) -> None:
        for _ in range(RECORDS_AT_ONCE):
            count = self._socket.recv_into(self._missing)
            if not count:
                raise EOFError("the other peer closed the connection")
            self._missing = self._missing[count:]
            if not self._missing:
                self.last = self._incoming.popleft()
                self._cipher.opened(self.last)
                if not self._incoming:
                    asyncio.get_running_loop().remove_reader(self._socket)
                    return self._all_received.set_result(None)
                self._missing = self._cipher.room(self._incoming[0])

    def close(self) -> None:
        self._socket.close()


def records(content: memoryview) -> Iterator[memoryview]:
    for low in range(0, len(content), RECORD_BYTES):
        yield content[low : low + RECORD_BYTES]


class FloorPeer(BlockingPeer):
    """This process."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._mine = memoryview(bytearray(4 * setup.elements))
        self._links: dict[int, Link] = {}
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._listener = socket.create_server((HOST, 0))
        self.address = str(self._listener.getsockname()[1])

    def _bounds(self, rank: int) -> tuple[int, int]:
        """Where a rank's part of a vector begins and ends, in bytes."""
        low, high = (4 * (self.setup.elements * each // self.setup.peers) for each in (rank, rank + 1))
        return low, high

    def _part(self, rank: int) -> memoryview:
        low, high = self._bounds(rank)
        return self._mine[low:high]

    def connect(self, peers: list[tuple[str, str]]) -> Answer:
        """Call the peers of lower rank, and take the calls of the others."""
        for rank in range(self.setup.rank):
            connection, keys = socket.create_connection((HOST, int(peers[rank][1]))), os.urandom(2 * KEY_BYTES)
            connection.sendall(self.setup.rank.to_bytes(4, "big") + keys)
            self._links[rank] = Link(connection, self._cipher(keys[:KEY_BYTES], keys[KEY_BYTES:]))
        while len(self._links) < self.setup.peers - 1:
            connection, _ = self._listener.accept()
            opening = connection.recv(4 + 2 * KEY_BYTES, socket.MSG_WAITALL)
            rank, keys = int.from_bytes(opening[:4], "big"), opening[4:]
            self._links[rank] = Link(connection, self._cipher(keys[KEY_BYTES:], keys[:KEY_BYTES]))
        return {}

    def _cipher(self, send_key: bytes, receive_key: bytes) -> Plain | Sealed:
        return Sealed(send_key, receive_key) if self.setup.path == "aead" else Plain()

    def make(self, round: int) -> Answer:
        self._mine[:] = self._read(self.setup.rank, 0, len(self._mine))
        return {}

    def _read(self, rank: int, low: int, high: int) -> bytes:
        """Bytes of a rank's vector."""
        with open(f"{self.setup.vectors}/vector{rank}", "rb") as file:
            file.seek(low)
            return file.read(high - low)

    def average(self, round: int) -> Answer:
        began = time.monotonic()
        self._runner.run(asyncio.wait_for(self._exchange(), self.setup.deadline_seconds))
        return {"began": began, "ended": time.monotonic()}

    async def _exchange(self) -> None:
        own = self._part(self.setup.rank)
        async with asyncio.TaskGroup() as group:
            for rank, link in self._links.items():
                outgoing = itertools.chain(records(self._part(rank)), records(own))
                incoming = map(len, itertools.chain(records(own), records(self._part(rank))))
                group.create_task(link.exchange(outgoing, incoming))

    def check(self) -> Answer:
        """Whether the stream of each other peer ended with the last record of its own part."""
        ends = {rank: self._bounds(rank)[1] for rank in self._links}
        return {
            "whole": all(
                link.last == self._read(rank, ends[rank] - len(link.last), ends[rank])
                for rank, link in self._links.items()
            )
        }

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._listener.close()
        self._runner.close()


if __name__ == "__main__":
    run(FloorPeer)
