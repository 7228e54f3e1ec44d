"""Open connections that wait for their next stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from node.direct.connection import DirectConnection
from protocols.base import PeerId

IDLE_SECONDS = 100.0
"""Less than the side that serves waits, so that the opener closes first, and never opens on a closed connection."""
MAX_IDLE, MAX_IDLE_PER_PEER = 64, 4


class IdleConnections:
    """Connections on which this peer may open a stream. They are closed after 100 seconds, or by the peer."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        self._spawn = spawn
        self._idle: dict[DirectConnection, tuple[PeerId, asyncio.Task[None]]] = {}  # the longest first

    def __len__(self) -> int:
        return len(self._idle)

    def put(self, peer: PeerId, connection: DirectConnection) -> None:
        """Keep a connection that no stream uses; of too many, the one that is idle for longest is closed."""
        if connection.is_worn or sum(owner == peer for owner, _ in self._idle.values()) >= MAX_IDLE_PER_PEER:
            return connection.abort()
        if len(self._idle) >= MAX_IDLE:
            self._remove(next(iter(self._idle))).abort()
        connection.rest()
        self._idle[connection] = (peer, self._spawn(self._watch(connection)))

    def take(self, peer: PeerId) -> DirectConnection | None:
        """The connection that was used last; None if there is none."""
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
