"""Memory of parts over the rounds: that of old rounds serves new ones, except what a stream still sends."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator

import pytest

from protocols import wire
from protocols.allreduce.parts import ReducedPart, chunk_digest
from protocols.base import Stream
from protocols.blobs.parts import PartCache
from protocols.blobs.serving import BLOBS, BlobIndex, WantBlob, WantChunk
from tests.sim import pipe
from tests.sim.scenario_runner import ScenarioRunner, ScenarioSetup
from tests.support.simulated import simulated

HEADER_LIMIT = 1 << 12


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams on which a part does not fit, so that a sender waits for its reader."""
    monkeypatch.setattr(pipe, "WINDOW_BYTES", 300)


two_rounds_in_memory = ScenarioSetup(2, keep_rounds=1, elements=3000, chunk_elements=256)


def parts_of(part_cache: PartCache) -> Iterator[ReducedPart]:
    """Parts in memory, the oldest first."""
    return (part for parts in part_cache._parts.values() for part in parts.values() if part.chunks)


async def next_chunk(stream: Stream) -> bytes:
    header = wire.expect(await stream.receive(HEADER_LIMIT), wire.Chunk)
    data = bytearray(header.size)
    await stream.receive_into(memoryview(data))
    return bytes(data)


@simulated(ScenarioRunner, two_rounds_in_memory)
async def test_served_part_keeps_its_bytes_for_rounds(world: ScenarioRunner, narrow: None) -> None:
    await world.rounds(2)
    part_cache = world.averager("p0").part_cache
    part = next(parts_of(part_cache))
    assert part.result
    wanted, masks, digests, chunks = part.result.digest, part.masks, part.digests, part.chunks
    del part
    async with world.join("zoe").transport.open("p0", BLOBS, world.now + 60.0) as stream:
        await stream.send(WantBlob(wanted))
        assert wire.expect(await stream.receive(HEADER_LIMIT), BlobIndex).chunks == chunks
        await stream.receive_into(memoryview(bytearray(32 * chunks)))
        for index in range(chunks):
            await stream.send(WantChunk(index))
        received = [await next_chunk(stream)]
        await world.rounds(4, world.peers)
        assert wanted not in part_cache, "the peer itself needs it no more"
        received += [await next_chunk(stream) for _ in range(chunks - 1)]
    assert tuple(map(chunk_digest, masks, received)) == digests


@simulated(ScenarioRunner, two_rounds_in_memory)
async def test_later_rounds_need_no_fresh_memory(world: ScenarioRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds are in memory at a time. Garbage collection is off, so nothing waits for it."""
    fresh, make = list[int](), mmap.mmap

    def counted(where: int, size: int, **options: int) -> mmap.mmap:
        fresh.append(size)
        return make(where, size, **options)

    monkeypatch.setattr("protocols.allreduce.parts.mmap.mmap", counted)
    gc.disable()
    try:
        await world.rounds(4)
        first = len(fresh)
        await world.rounds(8)
    finally:
        gc.enable()
    chunks = sum(part.chunks for part in parts_of(world.averager("p0").part_cache))
    assert chunks >= 12 and first >= 2 * chunks, "nothing was counted"
    assert len(fresh) - first < chunks, f"{len(fresh) - first} new pieces in eight rounds of {chunks} chunks"
