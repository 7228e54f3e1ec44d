"""Streams between peers of a world: chunks of bytes, an echo, and handlers that a test controls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from protocols import wire
from protocols.base import PeerId, PeerSilent, Stream, Transport
from protocols.streams.framing import FramedStream, Pipe
from tests.conformance.worlds import GENEROUS_SECONDS, soon

MIB = 1 << 20
SHORT_SECONDS = 0.5
LATE_SECONDS = 5.0
LIMIT = 256


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def pipe_of(stream: Stream) -> Pipe:
    """The pipe below the frames, to write what a correct peer would not."""
    assert isinstance(stream, FramedStream)
    return stream._pipe


async def send_bytes(stream: Stream, data: bytes, index: int = 0) -> None:
    await stream.send(wire.Chunk(index, len(data)), data)


async def receive_bytes(stream: Stream) -> tuple[int, bytes]:
    chunk = wire.expect(await stream.receive(LIMIT), wire.Chunk)
    buffer = bytearray(chunk.size)
    await stream.receive_into(memoryview(buffer))
    return chunk.index, bytes(buffer)


async def echo(peer: PeerId, stream: Stream) -> None:
    """Sends back each chunk, up to one with index 0."""
    while True:
        index, data = await receive_bytes(stream)
        await send_bytes(stream, data, index)
        if index == 0:
            return


async def ask_echo(transport: Transport, peer: PeerId, data: bytes = b"are you there?") -> None:
    async with transport.open(peer, "echo", soon()) as stream:
        await send_bytes(stream, data)
        assert await receive_bytes(stream) == (0, data)


@asynccontextmanager
async def strikes(seconds: float) -> AsyncIterator[None]:
    """Assert that the body ends with `PeerSilent` about when this many seconds have passed."""
    started = asyncio.get_running_loop().time()
    with pytest.raises(PeerSilent):
        yield
    taken = asyncio.get_running_loop().time() - started
    assert seconds - 0.1 <= taken <= seconds + LATE_SECONDS


class Probe:
    """A handler whose stream the test uses, and which ends when the test allows it."""

    @classmethod
    def at(cls, transport: Transport, method: str = "probe") -> Probe:
        probe = cls()
        transport.serve(method, probe)
        return probe

    def __init__(self) -> None:
        self.opened: asyncio.Future[tuple[PeerId, Stream]] = asyncio.get_running_loop().create_future()
        self.may_end = asyncio.Event()

    async def __call__(self, peer: PeerId, stream: Stream) -> None:
        self.opened.set_result((peer, stream))
        await self.may_end.wait()

    async def stream(self) -> Stream:
        async with asyncio.timeout(GENEROUS_SECONDS):
            return (await self.opened)[1]


class Broken(Exception):
    """Raised by tests inside a stream."""
