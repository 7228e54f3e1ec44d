"""The side of direct connections that opens streams."""

from __future__ import annotations

import asyncio
from functools import partial

from node.direct.connection import DirectConnection
from node.direct.handshake import dial
from node.direct.idle import IdleConnections
from node.direct.inbound import Inbound
from node.direct.link import Libp2pLink
from node.direct.messages import HEADER_LIMIT, METHOD, DialBack, DialBackResult, TokenGrant, TokenRequest
from node.direct.pipe import DirectPipe
from node.direct.records import RecordError, has_fast_aes
from node.direct.routes import SPARE_TOKENS, Attempts, NotDirect, Route, Way
from node.network.serving import ask
from node.runtime.bounded import renew
from protocols import wire
from protocols.aio import loop_time
from protocols.base import BadPayload, Deadline, PeerError, PeerGone, PeerId, PeerSilent

DIAL_SECONDS = 2.0
DEADLINE_SHARE = 0.25
"""The direct way gets at most this share of the time that a stream may last, so that libp2p still has time."""
_MAX_ROUTES = 256


class Outbound:
    """Opens streams over direct connections.

    Attributes:
        routes: peer -> how bulk data goes there.
    """

    def __init__(self, me: PeerId, link: Libp2pLink, inbound: Inbound) -> None:
        self.routes: dict[PeerId, Route] = {}
        self._me, self._link, self._inbound = me, link, inbound
        self._idle = IdleConnections(link.serving.spawn)
        self._connections: dict[DirectConnection, PeerId] = {}
        self._renewals: dict[PeerId, asyncio.Task[None]] = {}

    async def open(self, peer: PeerId, method: str, deadline: Deadline) -> DirectPipe | None:
        """Open a stream. The peer has accepted the method. None if that is not possible now."""
        route = self._route(peer)
        until = loop_time() + min(DIAL_SECONDS, DEADLINE_SHARE * (deadline - loop_time()))
        try:
            return await self._opened(peer, route, method, until)
        except NotDirect as error:
            route.went(Way.LIBP2P, str(error))
        return None

    def forget(self, peer: PeerId) -> None:
        """Abort the connections to a peer, and forget its tokens."""
        self.routes.pop(peer, None)
        for connection in [each for each, owner in self._connections.items() if owner == peer]:
            connection.abort()

    def close(self) -> None:
        """Abort all connections."""
        for connection in list(self._connections):
            connection.abort()

    def _route(self, peer: PeerId) -> Route:
        route = self.routes.get(peer) or Route()
        renew(self.routes, peer, route, _MAX_ROUTES)
        return route

    async def _opened(self, peer: PeerId, route: Route, method: str, until: Deadline) -> DirectPipe:
        while connection := self._idle.take(peer):
            try:
                return await self._ask(peer, route.dialling, connection, method, until)
            except NotDirect:
                route.dialling.require(loop_time())  # it does not answer at all: a new connection would not help
        try:
            way, attempts, connection = Way.DIRECT, route.dialling, await self._dialled(peer, route, until)
        except NotDirect as error:
            try:
                way, attempts = Way.DIALLED_BACK, route.dialled_back
                connection = await self._dialled_back(peer, route, until)
            except NotDirect as other:
                raise NotDirect(f"{error}; {other}") from None
        self._connections[connection] = peer
        connection.on_closed = partial(self._closed, connection)
        pipe = await self._ask(peer, attempts, connection, method, until)
        attempts.succeeded()
        route.went(way)
        return pipe

    async def _ask(
        self, peer: PeerId, attempts: Attempts, connection: DirectConnection, method: str, until: Deadline
    ) -> DirectPipe:
        """Ask the peer to serve a method over this connection.

        Raises:
            NotDirect: it did not accept. The connection is closed.
        """
        pipe = DirectPipe(connection, partial(self._idle.put, peer))
        try:
            async with asyncio.timeout_at(until):
                await ask(pipe, method)
        except (TimeoutError, RecordError):
            raise attempts.failed(loop_time(), "nobody who knows its keys answers over the connection") from None
        except (OSError, EOFError):
            raise NotDirect("it did not accept the stream") from None
        return pipe

    async def _dialled(self, peer: PeerId, route: Route, until: Deadline) -> DirectConnection:
        """Dial a peer. If it does not take the tokens from before, it may have started anew: ask for others once."""
        route.dialling.require(loop_time())
        for last in (not route.tokens_left(loop_time()), True):
            await self._have_tokens(peer, route, until)
            where, token = route.take_token(loop_time())
            try:
                seconds = (until - loop_time()) / 2  # the other half is for being dialled back
                return await dial(where, token, route.cipher, self._me, peer, seconds)
            except (OSError, EOFError) as error:
                route.drop_tokens()
                if last or isinstance(error, TimeoutError):
                    raise route.dialling.failed(loop_time(), f"its port cannot be dialled: {_reason(error)}") from None
        raise AssertionError("unreachable")

    async def _have_tokens(self, peer: PeerId, route: Route, until: Deadline) -> None:
        """See that there are tokens, and ask for more before the last ones are used.

        Raises:
            NotDirect: the peer granted none in time.
        """
        if route.tokens_left(loop_time()) > SPARE_TOKENS:
            return
        renewal = self._renewals.get(peer)
        if renewal is None and route.asking.may_try(loop_time()):
            renewal = self._renewals[peer] = self._link.serving.spawn(self._renew(peer, route))
            renewal.add_done_callback(lambda _: self._renewals.pop(peer, None))
        if not route.tokens_left(loop_time()):
            if renewal:
                await asyncio.wait([renewal], timeout=until - loop_time())
            if not route.tokens_left(loop_time()):
                raise NotDirect(route.asking.why or "it granted no connection in time")

    async def _renew(self, peer: PeerId, route: Route) -> None:
        try:
            async with self._link.open(peer, METHOD, loop_time() + DIAL_SECONDS) as stream:
                await stream.send(TokenRequest(has_fast_aes()))
                grant = wire.expect(await stream.receive(HEADER_LIMIT), TokenGrant)
        except PeerSilent:
            return
        except (PeerGone, BadPayload) as error:
            route.asking.failed(loop_time(), f"it grants no connections: {error}")
            return
        if (host := self._link.host_of(peer)) is None:
            route.asking.failed(loop_time(), "it is reached through a relay")
        elif not grant.tokens:
            route.granted(grant, host, loop_time())
            route.asking.failed(loop_time(), "it has no direct port")
        else:
            route.granted(grant, host, loop_time())

    async def _dialled_back(self, peer: PeerId, route: Route, until: Deadline) -> DirectConnection:
        """Ask a peer, over libp2p, to dial this one."""
        route.dialled_back.require(loop_time())
        inbound, port, host = self._inbound, self._inbound.listener.port, self._link.host_of(peer)
        if not (port and host and route.is_granted):
            raise NotDirect("it cannot dial this peer either")
        issued = inbound.issuer.issue_for_dial_back(peer, host, route.cipher)
        awaited: asyncio.Future[DirectConnection] = asyncio.get_running_loop().create_future()
        inbound.awaited[issued.token.id] = awaited
        try:
            async with asyncio.timeout_at(until), self._link.open(peer, METHOD, until) as stream:
                await stream.send(DialBack(port, route.cipher, issued.token))
                result = wire.expect(await stream.receive(HEADER_LIMIT), DialBackResult)
                if result.why:
                    raise ConnectionError(result.why)
                return await awaited
        except (PeerError, BadPayload, OSError) as error:
            if awaited.done() and not awaited.cancelled():
                awaited.result().abort()
            raise route.dialled_back.failed(loop_time(), f"it cannot dial this peer: {_reason(error)}") from None
        finally:
            inbound.awaited.pop(issued.token.id, None)

    def _closed(self, connection: DirectConnection) -> None:
        peer = self._connections.pop(connection)
        self._link.note_failure(peer, connection)
        if isinstance(connection.failure, TimeoutError) and (route := self.routes.get(peer)):
            route.dialling.failed(loop_time(), "its direct connection went silent")


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, PeerError):
        return error.why
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
