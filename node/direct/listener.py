"""The port that other peers dial. Whoever shows no token costs little, and not for long.

Connections that have shown no token yet are few, whatever arrives. They are counted in two groups: those from hosts
where a peer holds a token, and all others. So strangers elsewhere take no place from the run's peers. A new connection
replaces the oldest of its group, because a peer shows its token at once, and whoever floods the port does not.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.direct.connection import DirectConnection, set_options
from node.direct.handshake import accept
from node.direct.tokens import IssuedToken, TokenIssuer
from protocols.base import PeerId

log = logging.getLogger(__name__)

OPENING_SECONDS = 5.0
_BACKLOG = 128
_ACCEPTED_AT_ONCE = 16
_PAUSE_SECONDS = 0.02
"""After this many connections the listener pauses: at most 800 a second, which cost a twentieth of a core."""
_PORT_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    """How many connections that have shown no token there may be, in all and from one host."""

    total: int
    per_host: int


EXPECTED, STRANGERS = WaitingLimits(64, 32), WaitingLimits(16, 4)

OnConnection = Callable[[IssuedToken, DirectConnection], None]
OnRefused = Callable[[str, str], None]
"""Called with the host and the reason, in words that are the same for all hosts."""


class DirectListener:
    """Listens, and hands over connections that have shown a token.

    Attributes:
        port: 0 until `start` has succeeded.
    """

    def __init__(self, me: PeerId, issuer: TokenIssuer, on_connection: OnConnection, on_refused: OnRefused) -> None:
        self.port = 0
        self._me, self._issuer = me, issuer
        self._on_connection, self._on_refused = on_connection, on_refused
        self._sockets: list[socket.socket] = []
        self._waiting: dict[asyncio.Task[None], str] = {}  # the oldest first

    def start(self, hosts: Sequence[str], port: int = 0) -> None:
        """Listen on these IP addresses, all with one port; port 0 takes a free one.

        Raises:
            OSError: the port is taken, or an address is not this machine's.
        """
        for attempt in range(_PORT_ATTEMPTS):
            try:
                self._sockets = _listening(hosts, port)
                break
            except OSError:
                if port or attempt == _PORT_ATTEMPTS - 1:
                    raise
        self.port = self._sockets[0].getsockname()[1]
        for sock in self._sockets:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    async def close(self) -> None:
        """Stop listening, and drop all connections that have shown no token."""
        for sock in self._sockets:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()
        self._sockets = []
        waiting = list(self._waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    @property
    def waiting(self) -> int:
        """Connections that have shown no token yet."""
        return len(self._waiting)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:  # no descriptors are left, or the connection ended before it was accepted
                log.debug("a direct connection could not be accepted: %s", error)
                break
            self._take(sock, address[0].removeprefix("::ffff:"))
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)
        loop.call_later(_PAUSE_SECONDS, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _take(self, sock: socket.socket, host: str) -> None:
        self._make_room(host)
        task = asyncio.create_task(self._greet(sock, host))
        self._waiting[task] = host

        def done(_: object) -> None:
            self._waiting.pop(task, None)
            if task.cancelled():  # perhaps before its first step
                sock.close()

        task.add_done_callback(done)

    def _make_room(self, host: str) -> None:
        expected = self._issuer.expects(host)
        limits = EXPECTED if expected else STRANGERS
        group = [task for task, other in self._waiting.items() if self._issuer.expects(other) == expected]
        same = [task for task in group if self._waiting[task] == host]
        oldest = same[0] if len(same) >= limits.per_host else group[0] if len(group) >= limits.total else None
        if oldest:
            self._on_refused(self._waiting.pop(oldest), "showed no token, and others came")
            oldest.cancel()

    async def _greet(self, sock: socket.socket, host: str) -> None:
        why = ""
        try:
            set_options(sock)
            async with asyncio.timeout(OPENING_SECONDS):
                taken = await accept(sock, self._issuer, self._me)
            if taken:
                return self._on_connection(*taken)
            why = "showed no valid token"
        except TimeoutError:
            why = "showed no token in time"
        except (OSError, EOFError):
            why = "ended before it showed a token"
        sock.close()
        self._on_refused(host, why)


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
