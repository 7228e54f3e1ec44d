"""Frames over any byte pipe: the only implementation of `Stream`, shared by every transport.

A frame is a 4-byte big-endian header length, the header (`protocols.wire`), and the raw payload that it announces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from protocols import wire
from protocols.aio import before
from protocols.base import BadPayload, Buffer, Deadline, Header, PeerId, PeerSilent, StoppedHere

BULK_METHODS = frozenset(
    {
        "starling/blobs/1",
        "starling/butterfly/data/1",
        "starling/data-parallel/1",
        "starling/gossip/exchange/1",
        "starling/moshpit/data/1",
        "starling/moshpit/part/1",
        "starling/parameter-server-async/1",
        "starling/parameter-server/1",
        "starling/push-sum/share/1",
        "starling/ring/1",
        "starling/stage-chain/1",
        "starling/stage-hop/1",
        "starling/stage-outer/2",
        "starling/stage/1",
        "starling/sync/1",
    }
)
"""The methods whose streams carry vectors and states: a node may send them another way than the small messages."""

CATCH_UP_METHODS = frozenset({"starling/blobs/1", "starling/sync/1"})
"""Of these, the methods by which peers fetch what they missed: no round waits for them."""

T = TypeVar("T")

_LENGTH_BYTES = 4
_OPENING_LIMIT = 64
_JOINED_BYTES = 64 << 10


class LimitReached(OSError):
    """A pipe moves no more bytes, because of a limit of this peer's own machine."""


class Pipe(Protocol):
    """Bytes to and from one peer. Every failure is an `OSError` or an `EOFError`."""

    @property
    def moved_bytes(self) -> int:
        """Bytes written and read so far, which grows during a long write or read, too."""

    async def write(self, *pieces: Buffer) -> None:
        """Send the pieces in their order, waiting for flow control."""

    async def read_into(self, buffer: memoryview) -> None:
        """Fill the whole buffer; `EOFError` if the peer closed first."""


def joined(pieces: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
    """The pieces as one if they are small, as a message is with its payload: a call of the kernel costs more than a
    copy.
    """
    return (b"".join(pieces),) if sum(map(len, pieces)) <= _JOINED_BYTES else pieces


class FramedStream:
    def __init__(self, peer: PeerId, pipe: Pipe, deadline: Deadline) -> None:
        self.peer = peer
        self.bytes_sent = 0
        self.bytes_received = 0
        self._pipe = pipe
        self.deadline = deadline

    @property
    def moved_bytes(self) -> int:
        return self._pipe.moved_bytes

    async def send(self, header: Header, payload: Buffer = b"") -> None:
        packed = wire.encode(header)
        head = len(packed).to_bytes(_LENGTH_BYTES, "big") + packed
        await self._within_deadline("sending", self._pipe.write(head, payload))
        self.bytes_sent += len(head) + len(payload)

    async def receive(self, limit: int) -> Header:
        return wire.decode(await self._within_deadline("receiving", self._read_header(limit)))

    async def receive_into(self, buffer: memoryview) -> None:
        await self._within_deadline("receiving", self._read_into(buffer))

    async def _read_header(self, limit: int) -> bytes:
        prefix = bytearray(_LENGTH_BYTES)
        await self._read_into(memoryview(prefix))
        size = int.from_bytes(prefix, "big")
        if size > min(limit, wire.MAX_HEADER_BYTES):
            raise BadPayload(f"a header of {size} bytes where at most {limit} are allowed")
        packed = bytearray(size)
        await self._read_into(memoryview(packed))
        return bytes(packed)

    async def _read_into(self, buffer: memoryview) -> None:
        await self._pipe.read_into(buffer)
        self.bytes_received += len(buffer)

    async def _within_deadline(self, doing: str, step: Coroutine[Any, Any, T]) -> T:
        if asyncio.get_running_loop().time() >= self.deadline:  # a step that never waits would succeed
            step.close()
            raise PeerSilent(self.peer, f"deadline passed before {doing}")
        try:
            return await before(self.deadline, step)
        except TimeoutError:
            raise PeerSilent(self.peer, f"deadline passed while {doing}") from None
        except LimitReached as error:
            raise StoppedHere(self.peer, f"stopped here while {doing} ({error})") from None
        except (OSError, EOFError) as error:
            raise PeerSilent(self.peer, f"stream ended while {doing} ({str(error) or type(error).__name__})") from None


async def opened(peer: PeerId, pipe: Pipe, deadline: Deadline) -> FramedStream:
    """Begin a stream as its opener: send how many seconds the stream may last."""
    stream = FramedStream(peer, pipe, deadline)
    remaining = max(0.0, deadline - asyncio.get_running_loop().time())
    await stream.send(wire.Opening(min(remaining, wire.MAX_SECONDS)))
    return stream


async def accepted(
    peer: PeerId, pipe: Pipe, opening_seconds: float, on_bad: Callable[[PeerId, BadPayload], None]
) -> FramedStream | None:
    """Begin a stream as its server, with the deadline that the opener asked for. None if its first message is bad."""
    loop = asyncio.get_running_loop()
    stream = FramedStream(peer, pipe, loop.time() + opening_seconds)
    try:
        opening = wire.expect(await stream.receive(_OPENING_LIMIT), wire.Opening)
    except BadPayload as error:
        on_bad(peer, error)
        return None
    stream.deadline = loop.time() + opening.seconds
    return stream
