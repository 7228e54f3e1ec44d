"""The direct data plane of one peer: streams over encrypted TCP connections instead of libp2p.

libp2p proves who a peer is, and at which host. Over it, peers grant each other connection tokens. Then one dials the
other's direct port, and streams go over that connection, one after another, encrypted. If the peer cannot be dialled,
it is asked to dial back. Whatever fails before it has accepted a stream, `open` returns None, and the caller takes
libp2p. docs/threat-model.md says what this protects against.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any

from node.direct.connection import ConnectionSilent, DirectConnection, DirectPipe
from node.direct.handshake import dial, reason
from node.direct.inbound import IDLE_SECONDS, Inbound
from node.direct.messages import BUSY, HEADER_LIMIT, METHOD, DialBack, DialBackResult, TokenGrant, TokenRequest
from node.direct.punch import is_public
from node.direct.records import RecordError, has_fast_aes, is_known
from node.direct.routes import SPARE_TOKENS, NotDirect, Route, RouteKind
from node.streams.serving import Serving
from protocols import wire
from protocols.aio import loop_time
from protocols.base import BadPayload, Deadline, Header, PeerError, PeerGone, PeerId, PeerSilent, Stream
from protocols.peers.estimates import RecentDict

log = logging.getLogger(__name__)

DIAL_SECONDS = 2.0
DEADLINE_SHARE = 0.25
"""The direct way gets at most this share of the time that a stream may last, so that libp2p still has time."""
_DIAL_SHARE = 0.7
"""Of this, for dialling. Of 2 seconds it leaves time for TCP to repeat its first packet, which it does after one."""
_FAIR_SECONDS = 0.5
"""No answer within less time than this says nothing about the peer: it is tried again with the next stream."""
_MAX_ROUTES = 256
_MAX_REQUESTS = 4
MAX_IDLE, MAX_IDLE_PER_PEER = 64, 4


class DirectPlane:
    def __init__(
        self,
        me: PeerId,
        methods: Container[str],
        *,
        open_stream: Callable[[PeerId, str, Deadline], AbstractAsyncContextManager[Stream]],
        host_of: Callable[[PeerId], str | None],
        serving: Serving,
    ) -> None:
        """Streams of these methods go directly if they can; `open_stream` opens one over libp2p.

        `host_of` returns the IP address at the other end of the latest libp2p connection to a peer; None for a relay's.
        """
        self.routes: RecentDict[PeerId, Route] = RecentDict(_MAX_ROUTES)
        self._me, self.methods = me, methods
        self._open_stream, self._host_of, self._serving = open_stream, host_of, serving
        self._inbound = Inbound(me, host_of, serving, self._request)
        self._idle = IdleConnections(serving.spawn)
        self._connections: dict[DirectConnection, tuple[PeerId, RouteKind]] = {}
        self._renewals: dict[PeerId, asyncio.Task[None]] = {}
        self._closed = False
        serving.serve(METHOD, self._inbound.answer)

    def start(self, hosts: Sequence[str], port: int = 0) -> None:
        """Listen on these IP addresses; port 0 takes a free one. If the port is taken, this peer still dials others."""
        try:
            self._inbound.listener.start(hosts, port)
        except OSError as error:
            log.warning("no direct port: others send their data over libp2p (%s)", error.strerror or error)

    @property
    def port(self) -> int:
        return self._inbound.listener.port

    async def open(self, peer: PeerId, method: str, deadline: Deadline) -> DirectPipe | None:
        """Open a stream that the peer has accepted. None if the method goes over libp2p, or has to for now."""
        if self._closed or method not in self.methods:
            return None
        route = self.routes.put_newest(peer, Route)
        until = loop_time() + min(DIAL_SECONDS, DEADLINE_SHARE * (deadline - loop_time()))
        try:
            return await self._opened(peer, route, method, until)
        except NotDirect as error:
            route.record(RouteKind.LIBP2P, str(error))
        return None

    def forget(self, peer: PeerId) -> None:
        self._inbound.forget(peer)
        self.routes.pop(peer, None)
        for connection in [each for each, (owner, _) in self._connections.items() if owner == peer]:
            connection.abort()

    async def close(self) -> None:
        self._closed = True
        self._inbound.close()
        for connection in list(self._connections):
            connection.abort()

    async def _opened(self, peer: PeerId, route: Route, method: str, until: Deadline) -> DirectPipe:
        connection = self._idle.take(peer)
        if connection is not None:
            try:
                return await self._ask(peer, route, connection, method, until)
            except NotDirect:  # perhaps the peer had closed it; one more that is new will tell
                if loop_time() >= until:
                    raise
        return await self._ask(peer, route, await self._connected(peer, route, until), method, until)

    async def _connected(self, peer: PeerId, route: Route, until: Deadline) -> DirectConnection:
        try:
            kind, connection = RouteKind.DIRECT, await self._dialled(peer, route, until)
        except NotDirect as error:
            kind, connection = await self._otherwise(peer, route, until, error)
        if self._closed or connection.closed:
            connection.abort()
            raise NotDirect("closed meanwhile")
        self._connections[connection] = (peer, kind)
        connection.on_closed = partial(self._lost, connection)
        return connection

    async def _otherwise(
        self, peer: PeerId, route: Route, until: Deadline, why: NotDirect
    ) -> tuple[RouteKind, DirectConnection]:
        """A connection to a peer that cannot be dialled, as `why` says."""
        try:
            return RouteKind.DIALLED_BACK, await self._dialled_back(peer, route, until)
        except NotDirect as error:
            why = NotDirect(f"{why}; {error}")
        try:
            return RouteKind.PUNCHED, await self._punched(peer, route, until)
        except NotDirect as error:
            raise NotDirect(f"{why}; {error}") from None

    async def _ask(
        self, peer: PeerId, route: Route, connection: DirectConnection, method: str, until: Deadline
    ) -> DirectPipe:
        """If the peer does not accept, the connection is closed."""
        _, kind = self._connections[connection]
        attempts = route.attempts(kind)
        pipe, started = DirectPipe(connection, partial(self._free, peer)), loop_time()
        try:
            async with asyncio.timeout_at(until):
                await self._serving.ask(peer, pipe, method)
        except (TimeoutError, RecordError) as error:
            why = "the connection opens, but its answer does not come, or has other keys"
            is_fair = isinstance(error, RecordError) or until - started >= _FAIR_SECONDS
            raise attempts.failed(loop_time(), why) if is_fair else NotDirect(why) from None
        except (OSError, EOFError):
            raise NotDirect("it did not accept the stream") from None
        attempts.succeeded()
        route.record(kind)
        return pipe

    def _free(self, peer: PeerId, connection: DirectConnection) -> None:
        if self._closed:
            connection.abort()
        else:
            self._idle.put(peer, connection)

    async def _dialled(self, peer: PeerId, route: Route, until: Deadline) -> DirectConnection:
        """Dial a peer. If it does not take the tokens from before, it may have started anew: ask for others once."""
        route.dialling.require(loop_time())
        for last in (not route.tokens_left(loop_time()), True):
            await self._have_tokens(peer, route, until)
            where, token = route.take_token(loop_time())
            seconds = _DIAL_SHARE * (until - loop_time())  # the rest is for being dialled back
            try:
                connection = await dial(where, token, route.cipher, self._me, peer, seconds)
                if is_public(where[0]):
                    self._serving.spawn(self._inbound.puncher.learn(peer, token.id, connection))
                return connection
            except TimeoutError as error:
                why = f"its port cannot be dialled: {reason(error)}"
                raise route.dialling.failed(loop_time(), why) if seconds >= _FAIR_SECONDS else NotDirect(why) from None
            except (OSError, EOFError) as error:
                route.drop_tokens()
                if last:
                    raise route.dialling.failed(loop_time(), f"its port cannot be dialled: {reason(error)}") from None
        raise AssertionError("unreachable")

    async def _have_tokens(self, peer: PeerId, route: Route, until: Deadline) -> None:
        if route.tokens_left(loop_time()) <= SPARE_TOKENS:
            self._renewal(peer, route)
        for _ in range(_MAX_REQUESTS):  # streams that are opened at the same time may take all tokens of one grant
            if route.tokens_left(loop_time()):
                return
            if loop_time() >= until or (renewal := self._renewal(peer, route)) is None:
                break
            await asyncio.wait([renewal], timeout=until - loop_time())
        raise NotDirect(route.asking.why or "it granted no connection in time")

    def _renewal(self, peer: PeerId, route: Route) -> asyncio.Task[None] | None:
        """The request for tokens that is under way, or a new one. None if none is to be sent now."""
        if (renewal := self._renewals.get(peer)) is None and route.asking.may_try(loop_time()):
            renewal = self._renewals[peer] = self._serving.spawn(self._renew(peer, route))
            renewal.add_done_callback(lambda _: self._renewals.pop(peer, None))
        return renewal

    async def _renew(self, peer: PeerId, route: Route) -> None:
        try:
            try:
                grant = await self._request_tokens(peer)
            except PeerGone:  # of a peer that has started anew, p2pd may not know yet that the old connection is lost
                grant = await self._request_tokens(peer)
        except PeerSilent:
            return
        except (PeerGone, BadPayload) as error:
            route.asking.failed(loop_time(), f"it grants no connections: {reason(error)}")
            return
        if (host := self._host_of(peer)) is None:
            route.cipher = grant.cipher
            route.asking.failed(loop_time(), "it is reached through a relay")
            return
        with suppress(NotDirect):
            route.granted(grant, host, loop_time())
            if not grant.tokens:
                route.asking.failed(loop_time(), "it has no direct port")

    async def _request_tokens(self, peer: PeerId) -> TokenGrant:
        answer = await self._request(peer, TokenRequest(has_fast_aes()), loop_time() + DIAL_SECONDS)
        return wire.expect(answer, TokenGrant)

    async def _request(self, peer: PeerId, request: Header, deadline: Deadline) -> Header:
        async with self._open_stream(peer, METHOD, deadline) as stream:
            await stream.send(request)
            return await stream.receive(HEADER_LIMIT)

    async def _dialled_back(self, peer: PeerId, route: Route, until: Deadline) -> DirectConnection:
        route.dialled_back.require(loop_time())
        inbound, port, host = self._inbound, self._inbound.listener.port, self._host_of(peer)
        if not (port and host and route.cipher):
            raise NotDirect("it cannot dial this peer either")
        issued = inbound.issuer.issue(peer, host, route.cipher, dialled_back=True)
        awaited: asyncio.Future[DirectConnection] = asyncio.get_running_loop().create_future()
        inbound.awaited[issued.token.id] = awaited
        started, connection = loop_time(), None
        try:
            async with asyncio.timeout_at(until), self._open_stream(peer, METHOD, until) as stream:
                await stream.send(DialBack(port, route.cipher, issued.token))
                result = wire.expect(await stream.receive(HEADER_LIMIT), DialBackResult)
                if result.why == BUSY:
                    raise NotDirect(BUSY)
                if result.why:
                    raise ConnectionRefusedError(result.why)
                connection = await awaited
        except NotDirect:
            raise
        except (PeerError, BadPayload, OSError) as error:
            why = f"it cannot dial this peer: {reason(error)}"
            is_fair = not isinstance(error, PeerSilent | TimeoutError) or loop_time() - started >= 2 * _FAIR_SECONDS
            raise route.dialled_back.failed(loop_time(), why) if is_fair else NotDirect(why) from None
        finally:
            inbound.awaited.pop(issued.token.id, None)
            if connection is None and awaited.done() and not awaited.cancelled():
                awaited.result().abort()  # it came too late
        return connection

    async def _punched(self, peer: PeerId, route: Route, until: Deadline) -> DirectConnection:
        route.punching.require(loop_time())
        if not is_known(route.cipher):
            raise NotDirect("it has named no cipher")
        started = loop_time()
        try:
            async with asyncio.timeout_at(until):
                return await self._inbound.puncher.dial(peer, route.cipher, until)
        except NotDirect as error:
            raise error if str(error) == BUSY else route.punching.failed(loop_time(), str(error)) from None
        except (PeerError, BadPayload, OSError, EOFError) as error:
            why = f"no packets get through both routers: {reason(error)}"
            is_fair = loop_time() - started >= 2 * _FAIR_SECONDS
            raise route.punching.failed(loop_time(), why) if is_fair else NotDirect(why) from None

    def _lost(self, connection: DirectConnection) -> None:
        peer, kind = self._connections.pop(connection)
        self._inbound.note_failure(peer, connection)
        if isinstance(connection.failure, ConnectionSilent) and (route := self.routes.get(peer)):
            route.attempts(kind).failed(loop_time(), "its direct connection went silent")


class IdleConnections:
    """Connections on which this peer may open a stream. They are closed after 100 seconds, or by the peer."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        self._spawn = spawn
        self._idle: dict[DirectConnection, tuple[PeerId, asyncio.Task[None]]] = {}  # the longest first

    def __len__(self) -> int:
        return len(self._idle)

    def put(self, peer: PeerId, connection: DirectConnection) -> None:
        """Keep a connection that no stream uses; of too many, the one that is idle for longest is closed."""
        if connection.needs_rekey or sum(owner == peer for owner, _ in self._idle.values()) >= MAX_IDLE_PER_PEER:
            return connection.abort()
        if len(self._idle) >= MAX_IDLE:
            self._remove(next(iter(self._idle))).abort()
        connection.release_memory()
        self._idle[connection] = (peer, self._spawn(self._watch(connection)))

    def take(self, peer: PeerId) -> DirectConnection | None:
        for connection in [each for each, (owner, _) in reversed(self._idle.items()) if owner == peer]:
            self._remove(connection)
            if connection.is_quiet():
                return connection
            connection.abort()
        return None

    def _remove(self, connection: DirectConnection) -> DirectConnection:
        _, watch = self._idle.pop(connection)
        watch.cancel()
        return connection

    async def _watch(self, connection: DirectConnection) -> None:
        await connection.until_readable(asyncio.get_running_loop().time() + IDLE_SECONDS)
        self._idle.pop(connection, None)
        connection.abort()
