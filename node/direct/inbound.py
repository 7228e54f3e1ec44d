"""The side of direct connections that serves streams: grants tokens, takes connections, dials back."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from node.direct.connection import DirectConnection
from node.direct.handshake import dial, reason
from node.direct.idle import IDLE_SECONDS
from node.direct.link import Libp2pLink
from node.direct.listener import DirectListener
from node.direct.messages import (
    BUSY,
    HEADER_LIMIT,
    MAX_TOKENS,
    MIN_PORT,
    DialBack,
    DialBackResult,
    TokenGrant,
    TokenRequest,
)
from node.direct.pipe import DirectPipe
from node.direct.records import choose_cipher, has_fast_aes, is_known
from node.direct.routes import Attempts
from node.direct.tokens import TOKEN_SECONDS, IssuedToken, TokenIssuer
from node.runtime.bounded import renew
from protocols.aio import loop_time
from protocols.base import BadPayload, Deadline, PeerId, Stream

DIAL_BACK_SECONDS, _FAIR_SECONDS = 1.5, 0.5
_WAIT_SECONDS = 1.2 * IDLE_SECONDS
_MAX_CONNECTIONS, _MAX_PER_PEER = 64, 16
_MAX_DIALLING, _MAX_DIALLING_PER_PEER, _MAX_REMEMBERED = 16, 8, 256


class Inbound:
    """Serves other peers."""

    def __init__(self, me: PeerId, link: Libp2pLink) -> None:
        self.issuer = TokenIssuer(asyncio.get_running_loop().time)
        self.awaited: dict[bytes, asyncio.Future[DirectConnection]] = {}  # by token id: those that a peer shall dial
        self.listener = DirectListener(me, self.issuer, self._on_connection, link.refuse)
        self._me, self._link = me, link
        self._served: dict[DirectConnection, PeerId] = {}
        self._idle: dict[DirectConnection, None] = {}  # of these, those without a stream; the longest first
        self._dialling: Counter[PeerId] = Counter()
        self._dials: dict[PeerId, Attempts] = {}  # those that failed

    async def answer(self, peer: PeerId, stream: Stream) -> None:
        """Answer a request that came over libp2p."""
        header = await stream.receive(HEADER_LIMIT)
        if isinstance(header, TokenRequest):
            await stream.send(self._grant(peer, header))
        elif isinstance(header, DialBack):
            await stream.send(DialBackResult(await self._dial_back(peer, header, stream.deadline)))
        else:
            raise BadPayload(f"{type(header).__name__} where TokenRequest or DialBack is due")

    def forget(self, peer: PeerId) -> None:
        """Void a peer's tokens, and abort its connections."""
        self.issuer.void(peer)
        for connection in [each for each, owner in self._served.items() if owner == peer]:
            connection.abort()

    def close(self) -> None:
        self.listener.close()
        for connection in list(self._served):
            connection.abort()

    def _grant(self, peer: PeerId, request: TokenRequest) -> TokenGrant:
        cipher, port = choose_cipher(has_fast_aes(), request.fast_aes), self.listener.port
        host = self._link.host_of(peer)
        tokens = self.issuer.issue(peer, host or "", cipher, MAX_TOKENS) if port and host else ()
        return TokenGrant(port, cipher, TOKEN_SECONDS, tuple(tokens))

    async def _dial_back(self, peer: PeerId, request: DialBack, deadline: Deadline) -> str:
        """Dial a peer that asked for it, at the host of its libp2p connection. Returns why that failed, if it did.

        After a failure the peer has to wait, as a peer that dials waits. So no peer can make this one scan ports.
        """
        host, attempts = self._link.host_of(peer), self._dials.get(peer) or Attempts()
        if host is None or request.port < MIN_PORT or not is_known(request.cipher):
            return "there is no address that may be dialled"
        if not attempts.may_try(loop_time()):
            return attempts.why
        if self._dialling[peer] >= _MAX_DIALLING_PER_PEER or self._dialling.total() >= _MAX_DIALLING:
            return BUSY
        self._dialling[peer] += 1
        seconds = min(DIAL_BACK_SECONDS, deadline - loop_time())
        try:
            where = (host, request.port)
            connection = await dial(where, request.token, request.cipher, self._me, peer, seconds)
        except (OSError, EOFError) as error:
            why = f"cannot be dialled back: {reason(error)}"[:120]
            if seconds >= _FAIR_SECONDS or not isinstance(error, TimeoutError):
                attempts.failed(loop_time(), why)
                renew(self._dials, peer, attempts, _MAX_REMEMBERED)
            return why
        finally:
            self._dialling -= Counter((peer,))  # forgets the peer at zero
        self._dials.pop(peer, None)
        self._serve(peer, connection)
        return ""

    def _on_connection(self, issued: IssuedToken, connection: DirectConnection) -> None:
        if not issued.dialled_back:
            return self._serve(issued.peer, connection)
        awaited = self.awaited.pop(issued.token.id, None)
        if awaited is None or awaited.done():
            return connection.abort()
        awaited.set_result(connection)

    def _serve(self, peer: PeerId, connection: DirectConnection) -> None:
        mine = Counter(self._served.values())[peer]
        while self._idle and (len(self._served) >= _MAX_CONNECTIONS or mine >= _MAX_PER_PEER):
            oldest = next((each for each in self._idle if mine < _MAX_PER_PEER or self._served[each] == peer), None)
            if oldest is None:
                break
            oldest.abort()
            mine = Counter(self._served.values())[peer]
        if len(self._served) >= _MAX_CONNECTIONS or mine >= _MAX_PER_PEER:
            self._link.refuse(peer, "too many direct connections")
            return connection.abort()
        self._served[connection] = peer
        connection.on_closed = partial(self._closed, connection)
        self._await_stream(peer, connection)

    def _await_stream(self, peer: PeerId, connection: DirectConnection) -> None:
        connection.rest()
        self._idle[connection] = None
        self._link.serving.spawn(self._next_stream(peer, connection))

    async def _next_stream(self, peer: PeerId, connection: DirectConnection) -> None:
        came = await connection.until_readable(loop_time() + _WAIT_SECONDS)
        self._idle.pop(connection, None)
        if came and not connection.is_over():
            self._link.serving.take(peer, DirectPipe(connection, partial(self._await_stream, peer)))
        else:
            connection.abort()

    def _closed(self, connection: DirectConnection) -> None:
        peer = self._served.pop(connection)
        self._idle.pop(connection, None)
        self._link.note_failure(peer, connection)
