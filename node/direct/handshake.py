"""Opening a direct connection: the client shows its token, and both sides send a nonce.

    client                                server
    token id, client nonce      ->
                                <-        server nonce

All that follows is records (`node.direct.records`). The server answers only a valid token. The first record that it
can open proves that the client knows the token's secret; the answer to that record proves the same of the server.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket

from node.direct.connection import DirectConnection, set_options
from node.direct.messages import ConnectionToken
from node.direct.records import NONCE_BYTES, TOKEN_ID_BYTES, Handshake
from node.direct.tokens import IssuedToken, TokenIssuer
from protocols.base import PeerError, PeerId

OPENING_BYTES = TOKEN_ID_BYTES + NONCE_BYTES


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
            nonce = secrets.token_bytes(NONCE_BYTES)
            await loop.sock_sendall(sock, token.id + nonce)
            answer = await _exactly(sock, NONCE_BYTES)
    except BaseException:
        sock.close()
        raise
    keys = Handshake(cipher, token.secret, me, peer, nonce, answer)
    return DirectConnection(sock, keys.codecs(is_client=True))


def accept(
    sock: socket.socket, opening: bytes, issuer: TokenIssuer, me: PeerId
) -> tuple[IssuedToken, DirectConnection] | None:
    """Take a connection whose `opening` shows a valid token; None if it shows another, which is not answered."""
    issued = issuer.redeem(opening[:TOKEN_ID_BYTES])
    if issued is None:
        return None
    nonce = secrets.token_bytes(NONCE_BYTES)
    set_options(sock)
    if sock.send(nonce) < len(nonce):  # nothing was sent before it, so the kernel has room
        raise ConnectionAbortedError("not answered")
    keys = Handshake(issued.cipher, issued.token.secret, issued.peer, me, opening[TOKEN_ID_BYTES:], nonce)
    return issued, DirectConnection(sock, keys.codecs(is_client=False))


def reason(error: Exception) -> str:
    """Why a peer could not be dialled or asked, in a few words."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, PeerError):
        return error.why
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


async def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await asyncio.get_running_loop().sock_recv(sock, size - len(data))
        if not more:
            raise EOFError("broken off")
        data += more
    return data
