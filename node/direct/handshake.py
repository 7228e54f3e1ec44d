"""Opening a direct connection: the client shows its token, and both sides send a nonce.

    client                                server
    token id, client nonce      ->
                                <-        server nonce

All that follows is records (`node.direct.records`). The server answers only a valid token. The first record that it
can open proves that the client knows the token's secret; the answer to that record proves the same of the server.
"""

from __future__ import annotations

import asyncio
import secrets
import socket

from node.direct.connection import DirectConnection, set_options
from node.direct.messages import TOKEN_ID_BYTES, ConnectionToken
from node.direct.records import NONCE_BYTES, Handshake
from node.direct.tokens import IssuedToken, TokenIssuer
from protocols.base import PeerId


async def dial(
    where: tuple[str, int], token: ConnectionToken, cipher: str, me: PeerId, peer: PeerId, seconds: float
) -> DirectConnection:
    """Connect to a peer with a token that it issued.

    Args:
        where: IP address and port.

    Raises:
        OSError, EOFError: it cannot be reached there within this time, or does not take the token.
    """
    family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        set_options(sock)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(seconds):
            await loop.sock_connect(sock, where)
            nonce = secrets.token_bytes(NONCE_BYTES)
            await loop.sock_sendall(sock, token.id + nonce)
            answer = await _exactly(sock, NONCE_BYTES)
    except BaseException:
        sock.close()
        raise
    keys = Handshake(cipher, token.id, token.secret, me, peer, nonce, answer)
    return DirectConnection(sock, keys.codecs(is_client=True))


async def accept(sock: socket.socket, issuer: TokenIssuer, me: PeerId) -> tuple[IssuedToken, DirectConnection] | None:
    """Take a connection that shows a valid token; None if it shows another, which is not answered.

    Raises:
        OSError, EOFError: it ended before.
    """
    opening = await _exactly(sock, TOKEN_ID_BYTES + NONCE_BYTES)
    issued = issuer.redeem(opening[:TOKEN_ID_BYTES])
    if issued is None:
        return None
    nonce = secrets.token_bytes(NONCE_BYTES)
    await asyncio.get_running_loop().sock_sendall(sock, nonce)
    theirs = opening[TOKEN_ID_BYTES:]
    keys = Handshake(issued.cipher, issued.token.id, issued.token.secret, issued.peer, me, theirs, nonce)
    return issued, DirectConnection(sock, keys.codecs(is_client=False))


async def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await asyncio.get_running_loop().sock_recv(sock, size - len(data))
        if not more:
            raise EOFError("broken off")
        data += more
    return data
