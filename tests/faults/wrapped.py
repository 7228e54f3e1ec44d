"""A transport of which each stream is wrapped, whether this peer opens it or serves it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from protocols.base import Deadline, Handler, PeerId, Stream, Transport


class WrappedTransport:
    """What it does not define is the inner transport's."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def wrapped(self, method: str, stream: Stream) -> Stream:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def serve(self, method: str, handler: Handler) -> None:
        self._inner.serve(method, lambda peer, stream: handler(peer, self.wrapped(method, stream)))

    @asynccontextmanager
    async def open(self, peer: PeerId, method: str, deadline: Deadline) -> AsyncIterator[Stream]:
        async with self._inner.open(peer, method, deadline) as stream:
            yield self.wrapped(method, stream)
