"""Frames over a pipe in memory: bounds are checked before reading, failures have one meaning, counts are right."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols import wire
from protocols.base import BadPayload, Buffer, PeerSilent
from protocols.streams.endpoint import RoundAccounting
from protocols.streams.framing import FramedStream, LimitReached, accepted, opened

SECONDS = 30.0  # no test waits this long
CHUNK = wire.Chunk(index=3, size=5)


class MemoryPipe:
    """One end of a pipe, whose other end is `other`. It raises `error` if there is one."""

    def __init__(self) -> None:
        self.arrived = bytearray()
        self.changed = asyncio.Event()
        self.ended = False
        self.moved_bytes = 0
        self.error: Exception | None = None
        self.other: MemoryPipe

    def feed(self, data: Buffer) -> None:
        self.arrived += data
        self.changed.set()

    def close(self) -> None:
        self.other.ended = True
        self.other.changed.set()

    async def write(self, *pieces: Buffer) -> None:
        if self.error:
            raise self.error
        self.other.feed(b"".join(pieces))

    async def read_into(self, buffer: memoryview) -> None:
        while len(self.arrived) < len(buffer):
            if self.error:
                raise self.error
            if self.ended:
                raise EOFError
            self.changed.clear()
            await self.changed.wait()
        buffer[:] = self.arrived[: len(buffer)]
        del self.arrived[: len(buffer)]


def pipes() -> tuple[MemoryPipe, MemoryPipe]:
    here, there = MemoryPipe(), MemoryPipe()
    here.other, there.other = there, here
    return here, there


def streams(seconds: float = SECONDS) -> tuple[FramedStream, FramedStream]:
    here, there = pipes()
    deadline = asyncio.get_running_loop().time() + seconds
    return FramedStream("there", here, deadline), FramedStream("here", there, deadline)


def receiver(data: bytes, ended: bool = False) -> FramedStream:
    """A stream at which this data has arrived."""
    here, there = pipes()
    there.feed(data)
    if ended:
        here.close()
    return FramedStream("here", there, asyncio.get_running_loop().time() + SECONDS)


def arrived(stream: FramedStream) -> bytearray:
    """What has arrived and is not read yet."""
    pipe = stream._pipe
    assert isinstance(pipe, MemoryPipe)
    return pipe.arrived


def frame(packed: bytes) -> bytes:
    return len(packed).to_bytes(4, "big") + packed


@given(data=st.binary(max_size=200), limit=st.integers(0, 200))
def test_any_bytes_give_header_or_named_error(data: bytes, limit: int) -> None:
    async def run() -> None:
        stream = receiver(data, ended=True)
        with suppress(BadPayload, PeerSilent):
            await stream.receive(limit)
        assert stream.bytes_received + len(arrived(stream)) == len(data)

    asyncio.run(run())


@pytest.mark.parametrize("declared, limit", [(101, 100), (wire.MAX_HEADER_BYTES + 1, 1 << 40), (0xFFFFFFFF, 1 << 40)])
async def test_oversized_header_is_rejected_unread(declared: int, limit: int) -> None:
    stream = receiver(declared.to_bytes(4, "big") + b"untouched")
    with pytest.raises(BadPayload, match=f"{declared} bytes"):
        await stream.receive(limit)
    assert arrived(stream) == b"untouched" and stream.bytes_received == 4


async def test_header_at_the_limit_is_accepted() -> None:
    here, there = streams()
    await here.send(CHUNK)
    assert await there.receive(len(wire.encode(CHUNK))) == CHUNK


@pytest.mark.parametrize("length", range(len(frame(wire.encode(CHUNK)))))
async def test_end_within_frame_raises_peer_silent(length: int) -> None:
    stream = receiver(frame(wire.encode(CHUNK))[:length], ended=True)
    with pytest.raises(PeerSilent, match="ended while receiving") as raised:
        await stream.receive(100)
    assert raised.value.peer == "here"


async def test_end_within_payload_raises_peer_silent() -> None:
    with pytest.raises(PeerSilent, match="EOFError"):
        await receiver(b"1234", ended=True).receive_into(memoryview(bytearray(5)))


async def test_cancellation_is_not_mistaken_for_silence() -> None:
    _, there = streams()
    receiving = asyncio.create_task(there.receive(100))
    await asyncio.sleep(0)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving


async def test_opening_deadline_is_capped_by_the_wire() -> None:
    here, there = pipes()
    stream = await opened("there", here, asyncio.get_running_loop().time() + 1e12)
    assert stream.bytes_sent == len(there.arrived)
    assert wire.decode(bytes(there.arrived[4:])) == wire.Opening(wire.MAX_SECONDS)


async def test_stream_is_not_opened_after_its_deadline() -> None:
    here, there = pipes()
    with pytest.raises(PeerSilent):
        await opened("there", here, asyncio.get_running_loop().time() - 5.0)
    assert not there.arrived


@pytest.mark.parametrize("first", [wire.encode(CHUNK), b"", b"\xc1" * 10, b"x" * 65], ids=["chunk", "", "junk", "long"])
async def test_bad_opening_is_rejected_and_sender_blamed(first: bytes) -> None:
    _, there = pipes()
    there.feed(frame(first))
    refused: list[str] = []
    assert await accepted("here", there, SECONDS, lambda peer, error: refused.append(peer)) is None
    assert refused == ["here"]


async def test_missing_opening_raises_peer_silent() -> None:
    _, there = pipes()
    with pytest.raises(PeerSilent):
        await accepted("here", there, 0.01, lambda peer, error: None)


@pytest.mark.parametrize("error, blames", [(LimitReached("the quota is used up"), False), (OSError("reset"), True)])
async def test_own_limits_blame_no_other_peer(error: OSError, blames: bool) -> None:
    accounting, (here, _) = RoundAccounting(), streams()
    assert isinstance(here._pipe, MemoryPipe)
    here._pipe.error = error
    with pytest.raises(PeerSilent) as raised:
        async with accounting.counting(here):
            await here.send(CHUNK)
    accounting.name(here.peer, f"lost as a reducer: {raised.value.why}")
    assert [each.peer for each in accounting.take()[0]] == ["there"] * blames
