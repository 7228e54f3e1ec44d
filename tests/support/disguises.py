"""Streams of peers that send something else than their honest code does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from protocols.base import Buffer, Header, PeerId, Signer
from protocols.streams.framing import FramedStream
from tests.sim.byzantine.contributors import ByzantineContributorStream
from tests.sim.pipe import SimPipe

Disguise: TypeAlias = Callable[[str, FramedStream, SimPipe], Any]
"""What a simulated transport makes of each of its streams: (method, honest stream, pipe) -> stream."""
Send: TypeAlias = Callable[[FramedStream, Header, Buffer], Awaitable[None]]


class SpoofedStream:
    """A stream that hands everything that its peer's honest code sends to `send`, with the honest stream."""

    def __init__(self, stream: FramedStream, send: Send) -> None:
        self._stream, self._send = stream, send

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, header: Header, payload: Buffer = b"") -> None:
        await self._send(self._stream, header, payload)


def sending(send: Send) -> Disguise:
    return lambda method, stream, pipe: SpoofedStream(stream, send)


def changing(change: Callable[[PeerId, Header], Header]) -> Disguise:
    """The disguise of a peer that changes its headers: (receiver, honest header) -> header."""

    async def send(stream: FramedStream, header: Header, payload: Buffer) -> None:
        await stream.send(change(stream.peer, header), payload)

    return sending(send)


def changing_kind(kind: type[Any], change: Callable[[Any], Header]) -> Disguise:
    return sending(instead(kind, change))


def instead(kind: type[Header], change: Callable[[Any], Header]) -> Send:
    async def send(stream: FramedStream, header: Header, payload: Buffer) -> None:
        await stream.send(change(header) if isinstance(header, kind) else header, payload)

    return send


def flipped(kind: type[Header]) -> Send:
    async def send(stream: FramedStream, header: Header, payload: Buffer) -> None:
        data = bytearray(payload)
        if isinstance(header, kind) and data:
            data[len(data) // 2] ^= 1
        await stream.send(header, data)

    return send


def late(kind: type[Header], seconds: float = 1e5) -> Send:
    """Each header of this kind comes so much later; by default never."""

    async def send(stream: FramedStream, header: Header, payload: Buffer) -> None:
        if isinstance(header, kind):
            await asyncio.sleep(seconds)
        await stream.send(header, payload)

    return send


def lying(lie: str, signer: Signer | None = None) -> Disguise:
    """The disguise of a peer that tells one of `tests.sim.byzantine.contributors.LIES` in its chunks."""
    return lambda method, stream, pipe: ByzantineContributorStream(stream, pipe, lie, signer)  # type: ignore[arg-type]
