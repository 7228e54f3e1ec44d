"""What lying sync peers send in the place of what their honest code would send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from protocols.base import Buffer, Header
from protocols.framing import FramedStream
from tests.support.sync_cluster import SpoofedPeer, SyncPeer

Lie = Callable[[FramedStream, Header, Buffer], Coroutine[Any, Any, None]]
"""Gets the honest stream, the header and the payload, and sends what it likes."""


def disguise(peer: SyncPeer, lie: Lie) -> None:
    """From now on, all that the peer sends goes through `lie`."""
    peer.transport.disguise = lambda method, stream, pipe: SpoofedPeer(stream, lie)  # type: ignore[assignment,return-value]


def instead(kind: type[Header], change: Callable[[Any], Header]) -> Lie:
    """A lie: another header in the place of each of this kind."""

    async def lie(stream: FramedStream, header: Header, payload: Buffer) -> None:
        await stream.send(change(header) if isinstance(header, kind) else header, payload)

    return lie


def spoiled(kind: type[Header]) -> Lie:
    """A lie: a flipped bit in each payload of this kind."""

    async def lie(stream: FramedStream, header: Header, payload: Buffer) -> None:
        data = bytearray(payload)
        if isinstance(header, kind) and data:
            data[len(data) // 2] ^= 1
        await stream.send(header, data)

    return lie


def late(kind: type[Header], seconds: float) -> Lie:
    """A lie: each header of this kind comes so much later."""

    async def lie(stream: FramedStream, header: Header, payload: Buffer) -> None:
        if isinstance(header, kind):
            await asyncio.sleep(seconds)
        await stream.send(header, payload)

    return lie


def raw(kind: type[Header], data: bytes) -> Lie:
    """A lie: bytes that no encoder writes, in the place of each header of this kind."""

    async def lie(stream: FramedStream, header: Header, payload: Buffer) -> None:
        if isinstance(header, kind):
            await stream._pipe.write(data)
        else:
            await stream.send(header, payload)

    return lie
