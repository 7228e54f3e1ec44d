"""Opening a direct connection: the client shows its token, and both sides send a nonce.

    client                                server
    token id, client nonce      ->
                                <-        server nonce

All that follows is records (`node.direct.records`). The server answers only a valid token that it has issued, once. The
first record that it can open proves that the client knows the token's secret; the answer to that record proves the same
of the server.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

from node.direct.connection import DirectConnection, set_options
from node.direct.messages import SECRET_BYTES, ConnectionToken
from node.direct.records import NONCE_BYTES, TOKEN_ID_BYTES, Handshake
from protocols.base import PeerError, PeerId
from protocols.peers.estimates import RecentDict

OPENING_BYTES = TOKEN_ID_BYTES + NONCE_BYTES
TOKEN_SECONDS = 600.0
MAX_TOKENS_PER_PEER = 32
MAX_TOKENS, MAX_HOSTS = 2048, 512


@dataclass(frozen=True, slots=True)
class IssuedToken:
    peer: PeerId
    cipher: str
    token: ConnectionToken
    expires: float  # time of the event loop
    dialled_back: bool = False  # this peer asked to be dialled, and opens the streams; else the dialling peer does


class TokenIssuer:
    """Issues tokens, and redeems each at most once. Of too many, the oldest are void."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._issued: RecentDict[bytes, IssuedToken] = RecentDict(MAX_TOKENS)
        self._hosts: RecentDict[str, float] = RecentDict(MAX_HOSTS)  # host -> when its last token expires

    def __len__(self) -> int:
        return len(self._issued)

    def issue(self, peer: PeerId, host: str, cipher: str, *, dialled_back: bool = False) -> IssuedToken:
        """For one connection, over which the peer at this host opens streams, or this one if it is dialled back."""
        token = ConnectionToken(secrets.token_bytes(SECRET_BYTES))
        expires = self._now() + TOKEN_SECONDS
        self.void(peer, keep=MAX_TOKENS_PER_PEER - 1)
        issued = IssuedToken(peer, cipher, token, expires, dialled_back)
        self._issued[token.id], self._hosts[host] = issued, expires
        return issued

    def redeem(self, token_id: bytes) -> IssuedToken | None:
        """None if it is unknown, was used already, or has expired."""
        issued = self._issued.pop(token_id, None)
        return issued if issued and self._now() < issued.expires else None

    def void(self, peer: PeerId, keep: int = 0) -> None:
        """Forget a peer's tokens, except the latest ones."""
        mine = [key for key, each in self._issued.items() if each.peer == peer]
        for key in mine[: max(0, len(mine) - keep)]:
            del self._issued[key]

    def expects(self, host: str) -> bool:
        """Whether a peer that was at this host has got a token that has not expired."""
        return self._now() < self._hosts.get(host, 0.0)


async def dial(
    where: tuple[str, int], token: ConnectionToken, cipher: str, me: PeerId, peer: PeerId, seconds: float
) -> DirectConnection:
    """Connect to a peer at (IP address, port) with a token that it issued. Raises OSError or EOFError."""
    family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        set_options(sock)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(seconds):
            await loop.sock_connect(sock, where)
            if sock.getsockname() == sock.getpeername():  # TCP allows it, on a free port of this machine
                raise ConnectionRefusedError("connected to itself")
            return await show(sock, token, cipher, me, peer)
    except BaseException:
        sock.close()
        raise


async def show(sock: socket.socket, token: ConnectionToken, cipher: str, me: PeerId, peer: PeerId) -> DirectConnection:
    """Show a token over a socket that has connected to the peer that knows it. Raises OSError or EOFError."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    await asyncio.get_running_loop().sock_sendall(sock, token.id + nonce)
    keys = Handshake(cipher, token.secret, me, peer, nonce, await exactly(sock, NONCE_BYTES))
    return DirectConnection(sock, keys.codecs(is_client=True))


def accept(
    sock: socket.socket, opening: bytes, redeem: Callable[[bytes], IssuedToken | None], me: PeerId
) -> tuple[IssuedToken, DirectConnection] | None:
    """Take a connection whose `opening` shows a valid token; None if it shows another, which is not answered.

    `redeem` returns the token of an id, if it is valid.
    """
    issued = redeem(opening[:TOKEN_ID_BYTES])
    if issued is None:
        return None
    nonce = secrets.token_bytes(NONCE_BYTES)
    set_options(sock)
    if sock.send(nonce) < len(nonce):  # nothing was sent before it, so the kernel has room
        raise ConnectionAbortedError("not answered")
    keys = Handshake(issued.cipher, issued.token.secret, issued.peer, me, opening[TOKEN_ID_BYTES:], nonce)
    return issued, DirectConnection(sock, keys.codecs(is_client=False))


def reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, PeerError):
        return error.why
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


async def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await asyncio.get_running_loop().sock_recv(sock, size - len(data))
        if not more:
            raise EOFError("broken off")
        data += more
    return data
