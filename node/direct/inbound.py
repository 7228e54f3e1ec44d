"""The side of direct connections that serves streams: grants tokens, listens, takes connections, dials back.

Strangers without a token cost little, and not for long. Connections that have shown no token yet are few, whatever
arrives. They are counted in two groups: those from hosts where a peer holds a token, and all others. So strangers
elsewhere take no place from the run's peers. A new connection replaces the oldest of its group, because a peer shows
its token at once, and a flood of strangers does not.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from node.direct.connection import DirectConnection, DirectPipe
from node.direct.handshake import OPENING_BYTES, TOKEN_SECONDS, IssuedToken, TokenIssuer, accept, dial, reason
from node.direct.messages import (
    BUSY,
    HEADER_LIMIT,
    MAX_TOKENS,
    MIN_PORT,
    DialBack,
    DialBackResult,
    Punch,
    TokenGrant,
    TokenRequest,
    WantSeen,
)
from node.direct.punch import Puncher, Request
from node.direct.records import RecordError, choose_cipher, has_fast_aes, is_known
from node.direct.routes import Attempts
from node.runtime.listening import listen
from node.streams.serving import Serving
from protocols.aio import loop_time
from protocols.base import BadPayload, Deadline, PeerId, Stream
from protocols.peers.estimates import RecentDict

log = logging.getLogger(__name__)

DIAL_BACK_SECONDS, _FAIR_SECONDS = 1.5, 0.5
IDLE_SECONDS = 100.0
"""The opener closes an idle connection after this time: before the serving side, so it never opens on a closed one."""
_WAIT_SECONDS = 1.2 * IDLE_SECONDS
_MAX_CONNECTIONS, _MAX_PER_PEER = 64, 16
_MAX_DIALLING, _MAX_DIALLING_PER_PEER, _MAX_REMEMBERED = 16, 8, 256
OPENING_SECONDS = 5.0
_BACKLOG = 4096
_WINDOW_SECONDS, _ACCEPTED_PER_WINDOW = 0.02, 80
"""So the listener accepts at most 4,000 connections a second, for a tenth of a core, and never so many at once that the
event loop lags. A burst of 4,096 waits in the kernel for a second at most, and peers that dial behind it wait with it.
While a flood lasts that is faster, dials fail: peers are dialled back, or take libp2p."""


class Inbound:
    def __init__(self, me: PeerId, host_of: Callable[[PeerId], str | None], serving: Serving, request: Request) -> None:
        self.issuer = TokenIssuer(asyncio.get_running_loop().time)
        self.awaited: dict[bytes, asyncio.Future[DirectConnection]] = {}  # by token id: those that a peer shall dial
        self.listener = DirectListener(me, self.issuer, self._on_connection, serving.refuse)
        self.puncher = Puncher(me, request, host_of, self._serve)
        self._me, self._host_of, self._serving = me, host_of, serving
        self._served: dict[DirectConnection, PeerId] = {}
        self._idle: dict[DirectConnection, None] = {}  # of these, those without a stream; the longest first
        self._dialling: Counter[PeerId] = Counter()
        self._dials: RecentDict[PeerId, Attempts] = RecentDict(_MAX_REMEMBERED)  # those that failed

    async def answer(self, peer: PeerId, stream: Stream) -> None:
        header = await stream.receive(HEADER_LIMIT)
        if isinstance(header, TokenRequest):
            await stream.send(self._grant(peer, header))
        elif isinstance(header, DialBack):
            await stream.send(DialBackResult(await self._dial_back(peer, header, stream.deadline)))
        elif isinstance(header, WantSeen):
            await stream.send(self.puncher.tell(peer, header))
        elif isinstance(header, Punch):
            await self.puncher.answer(peer, header, stream)
        else:
            raise BadPayload(f"{type(header).__name__} where TokenRequest, DialBack, WantSeen or Punch is due")

    def forget(self, peer: PeerId) -> None:
        self.issuer.void(peer)
        self.puncher.forget(peer)
        for connection in [each for each, owner in self._served.items() if owner == peer]:
            connection.abort()

    def close(self) -> None:
        self.listener.close()
        for connection in list(self._served):
            connection.abort()

    def _grant(self, peer: PeerId, request: TokenRequest) -> TokenGrant:
        cipher, port = choose_cipher(has_fast_aes(), request.fast_aes), self.listener.port
        host = self._host_of(peer)
        count = MAX_TOKENS if port and host else 0
        tokens = tuple(self.issuer.issue(peer, host or "", cipher).token for _ in range(count))
        return TokenGrant(port, cipher, TOKEN_SECONDS, tokens)

    async def _dial_back(self, peer: PeerId, request: DialBack, deadline: Deadline) -> str:
        """Dial a peer that asked for it, at the host of its libp2p connection. Returns why that failed, if it did.

        After a failure the peer has to wait, as a peer that dials waits. So no peer can make this one scan ports.
        """
        host, attempts = self._host_of(peer), self._dials.get(peer) or Attempts()
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
                self._dials[peer] = attempts
            return why
        finally:
            self._dialling -= Counter((peer,))  # forgets the peer at zero
        self._dials.pop(peer, None)
        self._serve(peer, connection)
        return ""

    def _on_connection(self, issued: IssuedToken, connection: DirectConnection) -> None:
        if not issued.dialled_back:
            self.puncher.note(issued.peer, issued.token.id, connection)
            return self._serve(issued.peer, connection)
        awaited = self.awaited.pop(issued.token.id, None)
        if awaited is None or awaited.done():
            return connection.abort()
        awaited.set_result(connection)

    def _serve(self, peer: PeerId, connection: DirectConnection) -> None:
        while (mine := Counter(self._served.values())[peer]) >= _MAX_PER_PEER or len(self._served) >= _MAX_CONNECTIONS:
            oldest = next((each for each in self._idle if mine < _MAX_PER_PEER or self._served[each] == peer), None)
            if oldest is None:
                self._serving.refuse(peer, "too many direct connections")
                return connection.abort()
            oldest.abort()
        self._served[connection] = peer
        connection.on_closed = partial(self._closed, connection)
        self._await_stream(peer, connection)

    def _await_stream(self, peer: PeerId, connection: DirectConnection) -> None:
        connection.release_memory()
        self._idle[connection] = None
        self._serving.spawn(self._next_stream(peer, connection))

    async def _next_stream(self, peer: PeerId, connection: DirectConnection) -> None:
        came = await connection.until_readable(loop_time() + _WAIT_SECONDS)
        self._idle.pop(connection, None)
        if came and not connection.has_ended():
            self._serving.take(peer, DirectPipe(connection, partial(self._await_stream, peer)))
        else:
            connection.abort()

    def _closed(self, connection: DirectConnection) -> None:
        peer = self._served.pop(connection)
        self._idle.pop(connection, None)
        self.note_failure(peer, connection)

    def note_failure(self, peer: PeerId, connection: DirectConnection) -> None:
        if isinstance(connection.failure, RecordError):
            self._serving.refuse(peer, "sent a record over a direct connection that was not genuine")


KNOWN_PEER_LIMITS, STRANGER_LIMITS = (256, 128), (16, 4)
"""How many connections without a token there may be, in all and from one host.

With 128 a host, a peer beside a flood from its own host has 32 ms for its token to arrive after the connection."""

OnConnection = Callable[[IssuedToken, DirectConnection], None]
OnRefused = Callable[[str, str], object]
"""Called with the host and the reason, in words that are the same for all hosts."""


@dataclass(eq=False, slots=True)
class _Waiting:
    sock: socket.socket
    host: str
    opening: bytes = b""
    timer: asyncio.TimerHandle | None = None


class DirectListener:
    def __init__(self, me: PeerId, issuer: TokenIssuer, on_connection: OnConnection, on_refused: OnRefused) -> None:
        self.port = 0
        self._me, self._issuer = me, issuer
        self._on_connection, self._on_refused = on_connection, on_refused
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._waiting: dict[_Waiting, None] = {}  # the oldest first
        self._window_began, self._accepted = 0.0, 0

    def start(self, hosts: Sequence[str], port: int = 0) -> None:
        self._sockets = listen(hosts, port, _BACKLOG)
        self.port = self._sockets[0].getsockname()[1]
        for sock in self._sockets:
            self._loop.add_reader(sock, self._accept, sock)

    def close(self) -> None:
        for sock in self._sockets:
            self._loop.remove_reader(sock)
            sock.close()
        self._sockets = []
        for waiting in list(self._waiting):
            self._release(waiting).close()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _accept(self, listening: socket.socket) -> None:
        now = self._loop.time()
        if now >= self._window_began + _WINDOW_SECONDS:
            self._window_began, self._accepted = now, 0
        while self._accepted < _ACCEPTED_PER_WINDOW:
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:  # no descriptors are left, or the connection ended before it was accepted
                log.debug("a direct connection could not be accepted: %s", error)
                break
            self._accepted += 1
            self._take(sock, address[0])
        self._loop.remove_reader(listening)
        self._loop.call_at(self._window_began + _WINDOW_SECONDS, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _take(self, sock: socket.socket, host: str) -> None:
        self._make_room(host)
        sock.setblocking(False)
        waiting = _Waiting(sock, host)
        waiting.timer = self._loop.call_later(OPENING_SECONDS, self._drop, waiting, "showed no token in time")
        self._waiting[waiting] = None
        self._loop.add_reader(sock.fileno(), self._read, waiting)
        self._read(waiting)

    def _make_room(self, host: str) -> None:
        is_known = self._issuer.expects(host)
        total, per_host = KNOWN_PEER_LIMITS if is_known else STRANGER_LIMITS
        group = [each for each in self._waiting if self._issuer.expects(each.host) == is_known]
        same = [each for each in group if each.host == host]
        oldest = same[0] if len(same) >= per_host else group[0] if len(group) >= total else None
        if oldest:
            self._drop(oldest, "showed no token, and others came")

    def _read(self, waiting: _Waiting) -> None:
        try:
            more = waiting.sock.recv(OPENING_BYTES - len(waiting.opening))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            more = b""
        waiting.opening += more
        if not more:
            self._drop(waiting, "ended before it showed a token")
        elif len(waiting.opening) == OPENING_BYTES:
            self._greet(self._release(waiting), waiting)

    def _greet(self, sock: socket.socket, waiting: _Waiting) -> None:
        why = "showed no valid token"
        try:
            if taken := accept(sock, waiting.opening, self._issuer.redeem, self._me):
                return self._on_connection(*taken)
        except OSError:
            why = "ended before it was answered"
        sock.close()
        self._on_refused(waiting.host, why)

    def _release(self, waiting: _Waiting) -> socket.socket:
        del self._waiting[waiting]
        if waiting.timer:
            waiting.timer.cancel()
        self._loop.remove_reader(waiting.sock.fileno())
        return waiting.sock

    def _drop(self, waiting: _Waiting, why: str) -> None:
        self._release(waiting).close()
        self._on_refused(waiting.host, why)
