"""The port that other peers dial. Strangers without a token cost little, and not for long.

Connections that have shown no token yet are few, whatever arrives. They are counted in two groups: those from hosts
where a peer holds a token, and all others. So strangers elsewhere take no place from the run's peers. A new connection
replaces the oldest of its group, because a peer shows its token at once, and a flood of strangers does not.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.direct.connection import DirectConnection
from node.direct.handshake import OPENING_BYTES, accept
from node.direct.tokens import IssuedToken, TokenIssuer
from protocols.base import PeerId

log = logging.getLogger(__name__)

OPENING_SECONDS = 5.0
_BACKLOG = 4096
_WINDOW_SECONDS, _ACCEPTED_PER_WINDOW = 0.02, 80
"""So the listener accepts at most 4,000 connections a second, for a tenth of a core, and never so many at once that the
event loop lags. A burst of 4,096 waits in the kernel for a second at most, and peers that dial behind it wait with it.
While a flood lasts that is faster, dials fail: peers are dialled back, or take libp2p."""
_PORT_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    """How many connections without a token there may be."""

    total: int
    per_host: int


EXPECTED, STRANGERS = WaitingLimits(256, 128), WaitingLimits(16, 4)
"""With 128 a host, a peer beside a flood from its own host has 32 ms for its token to arrive after the connection."""

OnConnection = Callable[[IssuedToken, DirectConnection], None]
OnRefused = Callable[[str, str], None]
"""Called with the host and the reason, in words that are the same for all hosts."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A connection that has shown no token yet."""

    sock: socket.socket
    host: str
    opening: bytes = b""
    timer: asyncio.TimerHandle | None = None


class DirectListener:
    """Listens, and passes on connections that have shown a token."""

    def __init__(self, me: PeerId, issuer: TokenIssuer, on_connection: OnConnection, on_refused: OnRefused) -> None:
        self.port = 0
        self._me, self._issuer = me, issuer
        self._on_connection, self._on_refused = on_connection, on_refused
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._waiting: dict[_Waiting, None] = {}  # the oldest first
        self._window_began, self._accepted = 0.0, 0

    def start(self, hosts: Sequence[str], port: int = 0) -> None:
        """Listen on these IP addresses, all with one port; port 0 takes a free one."""
        for attempt in range(_PORT_ATTEMPTS):
            try:
                self._sockets = _listening(hosts, port)
                break
            except OSError:
                if port or attempt == _PORT_ATTEMPTS - 1:
                    raise
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
        """Connections that have shown no token yet."""
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
        expected = self._issuer.expects(host)
        limits = EXPECTED if expected else STRANGERS
        group = [each for each in self._waiting if self._issuer.expects(each.host) == expected]
        same = [each for each in group if each.host == host]
        oldest = same[0] if len(same) >= limits.per_host else group[0] if len(group) >= limits.total else None
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
            if taken := accept(sock, waiting.opening, self._issuer, self._me):
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


def _listening(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """A listening socket for each host, but for those that this machine does not have."""
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for host in hosts:
            try:
                sockets.append(_bound(host, port))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
            else:
                port = sockets[0].getsockname()[1]
        if not sockets:
            raise missing or OSError(errno.EADDRNOTAVAIL, "no address to listen on")
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _bound(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
