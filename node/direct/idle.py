"""Open connections that wait for their next stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from node.direct.connection import DirectConnection
from protocols.base import PeerId

IDLE_SECONDS = 100.0
"""Less than the side that serves waits, so that the opener closes first, and never opens on a closed connection."""
MAX_IDLE_PER_PEER = 4


class IdleConnections:
    """Connections on which this peer may open a stream. They are closed after 100 seconds, or by the peer."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        self._spawn = spawn
        self._idle: dict[PeerId, dict[DirectConnection, asyncio.Task[None]]] = {}

    def put(self, peer: PeerId, connection: DirectConnection) -> None:
        """Keep a connection that no stream uses."""
        idle = self._idle.setdefault(peer, {})
        if len(idle) >= MAX_IDLE_PER_PEER:
            return connection.abort()
        connection.rest()
        idle[connection] = self._spawn(self._watch(peer, connection))

    def take(self, peer: PeerId) -> DirectConnection | None:
        """Take the connection that was used last; None if there is none."""
        idle = self._idle.get(peer, {})
        while idle:
            connection, watch = idle.popitem()
            watch.cancel()
            if connection.is_quiet():
                return connection
            connection.abort()
        return None

    async def _watch(self, peer: PeerId, connection: DirectConnection) -> None:
        await connection.until_readable(asyncio.get_running_loop().time() + IDLE_SECONDS)
        idle = self._idle.get(peer, {})
        idle.pop(connection, None)
        if not idle:
            self._idle.pop(peer, None)
        connection.abort()
