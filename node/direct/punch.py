"""Direct connections between two peers behind routers that keep ports: both dial at once, from bound ports.

A router lets packets in that look like answers. If both sides send the first packet of one connection, from the ports
that the other side dials, each router takes the other's packet for the answer.

    asker                                                answerer
    Punch(host, ports, cipher, token)   -> over libp2p   binds as many ports, and dials
    dials                               <-               Punched(host, ports)
    shows the token over the first connection that opens

No host is dialled that the other side merely names: it must be where a reachable member sees that peer. Members that
this peer has dialled are reachable. They also tell at which host and port they see this peer's connections. Where
ports are not kept, nothing is tried.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TypeAlias, TypeVar

from node.direct.connection import DirectConnection, set_options
from node.direct.handshake import OPENING_BYTES, IssuedToken, accept, exactly, reason, show
from node.direct.messages import (
    BUSY,
    MIN_PORT,
    SECRET_BYTES,
    ConnectionToken,
    Punch,
    Punched,
    SeenAt,
    WantSeen,
)
from node.direct.records import is_known
from node.direct.routes import Attempts, NotDirect
from protocols import wire
from protocols.aio import loop_time
from protocols.base import BadPayload, Deadline, Header, PeerError, PeerId, Stream
from protocols.peers.estimates import RecentDict

PUNCH_SECONDS = 2.5
PORTS = 2  # that this peer binds for one connection: another program's connection may hold one at the router
_AGAIN_SECONDS = 0.05  # until a refused dial is repeated
_VIEW_SECONDS = 1.0  # at most this long a dial waits for the first member to tell where it sees this peer
_MAX_MEMBERS = 2  # that are asked where they see a peer
_MAX_PUNCHING, _MAX_PUNCHING_PER_PEER, _MAX_REMEMBERED = 8, 2, 256

T = TypeVar("T")
Bind: TypeAlias = Callable[[str, int], socket.socket]
"""(an IP address of the wanted family, port, 0 for a free one) -> a socket that may connect from that port."""
Request: TypeAlias = Callable[[PeerId, Header, Deadline], Awaitable[Header]]
"""Send a peer this message over libp2p, and return its answer. Raises a `PeerError`, or `BadPayload`."""


@dataclass(frozen=True, slots=True)
class PortObservation:
    """Where a reachable member has seen a connection of this peer."""

    host: str
    kept_port: bool


def own_host(views: Sequence[PortObservation]) -> str:
    """The host at which others see this peer, if its router keeps ports; else raises `NotDirect`."""
    if not views:
        raise NotDirect("no reachable member has told where it sees connections from")
    if not all(view.kept_port for view in views):
        raise NotDirect("the router changes ports")
    if len({view.host for view in views}) > 1:
        raise NotDirect("members see connections from different hosts")
    return views[0].host


def is_public(host: str) -> bool:
    try:
        return ip_address(host).is_global
    except ValueError:
        return False


class Puncher:
    """Makes these connections, answers peers that ask for them, and tells peers where it sees them."""

    def __init__(
        self,
        me: PeerId,
        request: Request,
        host_of: Callable[[PeerId], str | None],
        serve: Callable[[PeerId, DirectConnection], None],
        bind: Bind | None = None,
    ) -> None:
        """`host_of` as for `DirectPlane`. `serve` takes a connection over which the peer opens streams."""
        self._me, self._request, self._host_of, self._serve = me, request, host_of, serve
        self._bind = bind or bound
        self._views: RecentDict[PeerId, PortObservation] = RecentDict(
            _MAX_REMEMBERED
        )  # by reachable member, the latest last
        self._viewed = asyncio.Event()
        self._seen: RecentDict[bytes, tuple[PeerId, str, int]] = RecentDict(_MAX_REMEMBERED)  # by token id
        self._punching: Counter[PeerId] = Counter()
        self._failed: RecentDict[PeerId, Attempts] = RecentDict(_MAX_REMEMBERED)

    # -- where peers are seen -----------------------------------------------------------------------------------------

    def note(self, peer: PeerId, token_id: bytes, connection: DirectConnection) -> None:
        """A peer has dialled this one with that token."""
        with suppress(OSError):  # it is lost already
            self._seen[token_id] = (peer, *connection.remote)

    def tell(self, peer: PeerId, request: WantSeen) -> SeenAt:
        """Where this peer sees the asker's connection, or another peer; nowhere, if that is not a public host."""
        host, port = self._host_of(request.peer) or "", 0
        if request.token:
            owner, host, port = self._seen.get(request.token) or ("", "", 0)
            host = host if owner == peer else ""
        return SeenAt(host, port) if is_public(host) else SeenAt("", 0)

    async def learn(self, member: PeerId, token_id: bytes, connection: DirectConnection) -> None:
        """Ask a member that was dialled over this connection where it sees it."""
        with suppress(PeerError, BadPayload, OSError):
            port = connection.local[1]
            seen = await self._ask(member, WantSeen(token_id, ""), loop_time() + PUNCH_SECONDS)
            if seen.host:
                self._views.pop(member, None)
                self._views[member] = PortObservation(seen.host, seen.port == port)
                self._viewed.set()

    def forget(self, peer: PeerId) -> None:
        self._views.pop(peer, None)

    async def _ask(self, member: PeerId, request: WantSeen, deadline: Deadline) -> SeenAt:
        return wire.expect(await self._request(member, request, deadline), SeenAt)

    async def _own_host(self, until: Deadline) -> str:
        if not self._views:
            self._viewed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(until, loop_time() + _VIEW_SECONDS)):
                    await self._viewed.wait()
        return own_host([*self._views.values()][-_MAX_MEMBERS:])

    async def _require(self, peer: PeerId, host: str, ports: Sequence[int], until: Deadline) -> None:
        """Raise `NotDirect` unless these may be dialled."""
        if not is_public(host) or not ports or min(ports) < MIN_PORT:
            raise NotDirect("it names no address that may be dialled")
        for member in [each for each in self._views if each != peer][-_MAX_MEMBERS:]:
            with suppress(PeerError, BadPayload):
                if (await self._ask(member, WantSeen(b"", peer), until)).host == host:
                    return
        raise NotDirect("no reachable member sees it at the host that it names")

    # -- both sides ---------------------------------------------------------------------------------------------------

    async def dial(self, peer: PeerId, cipher: str, until: Deadline) -> DirectConnection:
        """A connection over which this peer opens streams.

        Raises `NotDirect` where it is not tried, else PeerError, BadPayload, OSError or EOFError.
        """
        try:
            host = await self._own_host(until)
        except NotDirect as error:
            raise NotDirect(f"on this side {error}") from None
        token, one_by_one = ConnectionToken(secrets.token_bytes(SECRET_BYTES)), asyncio.Lock()

        async def finish(sock: socket.socket) -> DirectConnection:
            async with one_by_one:  # over the first that opens; over the next if that one fails
                return await show(sock, token, cipher, self._me, peer)

        with _reserved(self._bind, host, PORTS) as ports:
            answer = await self._request(peer, Punch(host, ports, cipher, token), until)
            punched = wire.expect(answer, Punched)
            if punched.why:
                raise NotDirect(punched.why)
            await self._require(peer, punched.host, punched.ports, until)
            return await _first(self._bind, ports, punched.host, punched.ports, until, finish)

    async def answer(self, peer: PeerId, request: Punch, stream: Stream) -> None:
        """Dial a peer that asks for it, or tell it why not. After a failure it has to wait, as a peer that dials."""
        if self._punching[peer] >= _MAX_PUNCHING_PER_PEER or self._punching.total() >= _MAX_PUNCHING:
            return await stream.send(Punched("", (), BUSY))
        self._punching[peer] += 1
        try:
            attempts, until = self._failed.get(peer) or Attempts(), min(stream.deadline, loop_time() + PUNCH_SECONDS)
            try:
                attempts.require(loop_time())
                if not is_known(request.cipher):
                    raise NotDirect("the cipher is not known")
                host = await self._own_host(until)
                await self._require(peer, request.host, request.ports, until)
            except NotDirect as error:
                attempts.failed(loop_time(), str(error))
                self._failed[peer] = attempts
                return await stream.send(Punched("", (), f"on the other side {error}"[:120]))
            await self._meet(peer, request, stream, host, attempts)
        finally:
            self._punching -= Counter((peer,))  # forgets the peer at zero

    async def _meet(self, peer: PeerId, request: Punch, stream: Stream, host: str, attempts: Attempts) -> None:
        issued = IssuedToken(peer, request.cipher, request.token, math.inf)

        async def finish(sock: socket.socket) -> DirectConnection:
            opening = await exactly(sock, OPENING_BYTES)
            taken = accept(sock, opening, lambda key: issued if key == request.token.id else None, self._me)
            if taken is None:
                raise ConnectionRefusedError("showed no valid token")
            return taken[1]

        until = loop_time() + PUNCH_SECONDS
        with _reserved(self._bind, host, len(request.ports)) as ports:
            dialling = asyncio.create_task(_first(self._bind, ports, request.host, request.ports, until, finish))
            opened: DirectConnection | None = None
            try:
                await stream.send(Punched(host, ports, ""))
                opened = await dialling
                self._serve(peer, opened)
                self._failed.pop(peer, None)
            except (OSError, EOFError) as error:
                attempts.failed(loop_time(), f"packets do not get through: {reason(error)}")
                self._failed[peer] = attempts
            finally:
                await _ended([dialling], opened)


@contextmanager
def _reserved(bind: Bind, host: str, count: int) -> Iterator[tuple[int, ...]]:
    """Free ports of this machine, from which connections to other hosts may be opened inside the context."""
    with ExitStack() as stack:
        yield tuple(stack.enter_context(bind(host, 0)).getsockname()[1] for _ in range(count))


def bound(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "darwin":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("::" if ":" in host else "", port))
    except BaseException:
        sock.close()
        raise
    return sock


Finish: TypeAlias = Callable[[socket.socket], Awaitable[DirectConnection]]
"""Makes the connection of a socket that has connected, or raises OSError or EOFError."""


async def _first(
    bind: Bind, ports: Sequence[int], host: str, targets: Sequence[int], until: Deadline, finish: Finish
) -> DirectConnection:
    """The first connection of those from each port to the target at the same place."""
    pairs = zip(ports, targets, strict=False)  # the other side decides how many it dials
    tasks = [asyncio.create_task(connected(bind, port, (host, target), finish)) for port, target in pairs]
    chosen: DirectConnection | None = None
    try:
        async with asyncio.timeout_at(until):
            for each in asyncio.as_completed(tasks):
                with suppress(OSError, EOFError):
                    chosen = await each
                    return chosen
        raise ConnectionRefusedError("no connection opens")
    finally:
        await _ended(tasks, chosen)


async def _ended(tasks: Sequence[asyncio.Task[DirectConnection]], chosen: DirectConnection | None) -> None:
    """Cancel tasks, and close what they have made but the chosen connection."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)  # each closes its socket, and ends
    for task in tasks:
        if not task.cancelled() and not task.exception() and task.result() is not chosen:
            task.result().abort()


async def connected(
    bind: Bind, port: int, where: tuple[str, int], finish: Callable[[socket.socket], Awaitable[T]]
) -> T:
    """Dial from this port again and again until the other side's router lets it in; what is made of the connection."""
    loop = asyncio.get_running_loop()
    while True:
        sock = bind(where[0], port)
        try:
            await loop.sock_connect(sock, where)
            set_options(sock)
            return await finish(sock)
        except (OSError, EOFError):  # refused before the other side's packet was on its way
            sock.close()
        except BaseException:
            sock.close()
            raise
        await asyncio.sleep(_AGAIN_SECONDS)
