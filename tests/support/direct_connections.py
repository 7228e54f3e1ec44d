"""Direct connections without libp2p: over a pair of sockets, and through a listener on the loopback."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from node.direct.connection import DirectConnection
from node.direct.handshake import IssuedToken, TokenIssuer, dial
from node.direct.inbound import DirectListener
from node.direct.messages import ConnectionToken
from node.direct.records import AES, Handshake

_SO_ATTACH_FILTER = 26


def handshake(cipher: str = AES) -> Handshake:
    nonces = bytes(range(0x40, 0x60))
    return Handshake(cipher, bytes(range(32)), "12D3KooWClient", "12D3KooWServer", nonces[:16], nonces[16:])


def connected(cipher: str = AES, buffer_bytes: int = 0) -> tuple[DirectConnection, DirectConnection]:
    """The client's and the server's end of a connection in this process."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
        if buffer_bytes:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    made = [DirectConnection(end, handshake(cipher).codecs(is_client=end is ends[0])) for end in ends]
    return made[0], made[1]


def swallow_packets(sock: socket.socket) -> None:
    """Have the kernel drop all that arrives for a socket, as a firewall does. A listening one gets no connections."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


class SimpleServer:
    """A direct listener on the loopback, without libp2p, and what it was given."""

    def __init__(self) -> None:
        self.issuer = TokenIssuer(asyncio.get_running_loop().time)
        self.connections: list[DirectConnection] = []
        self.refused: Counter[tuple[str, str]] = Counter()
        self.listener = DirectListener("server", self.issuer, self._take, lambda *what: self.refused.update([what]))
        self.listener.start(["127.0.0.1"])
        self.where = ("127.0.0.1", self.listener.port)

    def _take(self, _: IssuedToken, connection: DirectConnection) -> None:
        self.connections.append(connection)

    def token(self, peer: str = "client") -> ConnectionToken:
        return self.issuer.issue(peer, "127.0.0.1", AES).token

    async def dialled(self, me: str = "client", token: ConnectionToken | None = None) -> DirectConnection:
        return await dial(self.where, token or self.token(), AES, me, "server", 5.0)

    async def pair(self, me: str = "client", token: ConnectionToken | None = None) -> tuple[DirectConnection, ...]:
        return await self.dialled(me, token), self.connections[-1]

    def close(self) -> None:
        self.listener.close()
        for connection in self.connections:
            connection.abort()


@contextmanager
def silent_strangers(where: tuple[str, int], host: str, count: int) -> Iterator[None]:
    """Connections from a host of the loopback that never speak, as many as the kernel lets begin at once."""
    with ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.bind((host, 0))
            sock.connect_ex(where)
        yield


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
