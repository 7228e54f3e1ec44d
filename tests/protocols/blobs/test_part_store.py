"""Parts of past rounds on a disk: what is kept of them, who gets them, and disks that fail."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from node.storage.buffers import ScratchFile
from protocols.aio import Gate
from protocols.allreduce.parts import ReducedPart
from protocols.base import Buffer
from protocols.blobs.parts import GIVE_WAY_SECONDS, PartStore
from protocols.sync.snapshot import MemoryBuffer
from protocols.vectors.codec import codec
from tests.sim.host import SimCompute
from tests.support.simulated import on_virtual_time, simulated
from tests.support.sync_cluster import SyncCluster

SPAN = (100, 1100)
CHUNK = 256
SIZE = 4 * (SPAN[1] - SPAN[0])


def part(seed: int, span: tuple[int, int] = SPAN) -> ReducedPart:
    """A sealed part, another for each seed."""
    vector = torch.randn(span[1] - span[0], generator=torch.Generator().manual_seed(seed))
    made = ReducedPart(codec("fp32"), *span, CHUNK)
    for index in range(made.chunks):
        low, high = made.elements(index)
        made.codec.encode(vector[low - span[0] : high - span[0]], made.chunk(index))
    made.masks = [seed % 7 + 1] * made.chunks
    made.seal([made.digest_of(index, mask) for index, mask in enumerate(made.masks)])
    return made


def lineage(number: int) -> bytes:
    return bytes([number]) * 32


class FailingBuffers:
    """Makes buffers that fail on demand.

    Attributes:
        full: no more buffers can be made.
        failing: buffers can be neither read nor written.
        made: how many buffers there are.
        written: sizes of the pieces.
    """

    def __init__(self) -> None:
        self.full = self.failing = False
        self.made, self.written = 0, list[int]()

    def __call__(self, size: int) -> MemoryBuffer:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.made += 1
        return FailingBuffer(self, size)


class FailingBuffer(MemoryBuffer):
    def __init__(self, all_buffers: FailingBuffers, size: int) -> None:
        super().__init__(size)
        self._all = all_buffers

    def read(self, offset: int, into: memoryview) -> None:
        self._check()
        super().read(offset, into)

    def write(self, offset: int, data: Buffer) -> None:
        self._check()
        self._all.written.append(len(data))
        super().write(offset, data)

    def _check(self) -> None:
        if self._all.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def store(make_buffer: Callable[[int], Any] | None = None, **bounds: int) -> PartStore:
    return PartStore(make_buffer or FailingBuffers(), SimCompute(), Gate(), **bounds)


def digest(made: ReducedPart) -> bytes:
    assert made.result
    return made.result.digest


def chunks(kept: Any) -> list[bytes]:
    return [bytes(kept.chunk(index)) for index in range(kept.chunks)]


@on_virtual_time
async def test_part_round_trips(tmp_path: Path) -> None:
    kept = store(lambda size: ScratchFile(tmp_path, size))
    parts = [part(1), part(2, (1100, 1100)), part(3, (0, 100))]
    parts[0].clusters, parts[0].members = 1, [b"\1\0\0\0"] * parts[0].chunks
    assert await kept.put(lineage(1), parts) and lineage(1) in kept and kept.size_bytes == SIZE + 400
    for made in parts:
        found = kept.get(digest(made))
        assert found and (found.low, found.high, found.masks) == (made.low, made.high, made.masks)
        assert found.result == made.result and chunks(found) == chunks(made)
        loaded = found.load()
        assert chunks(loaded) == chunks(made) and loaded.masks == made.masks
        assert (loaded.clusters, loaded.members) == (made.clusters, made.members)
    assert kept.get(b"x" * 32) is None


@pytest.mark.parametrize(
    "bounds, left",
    [
        ({"most_rounds": 3}, [5, 6, 7]),
        ({"limit_bytes": 2 * SIZE, "least_rounds": 1}, [6, 7]),
        ({"limit_bytes": 1, "least_rounds": 4}, [4, 5, 6, 7]),
        ({"limit_bytes": 1, "least_rounds": 1}, [7]),
    ],
)
@on_virtual_time
async def test_oldest_rounds_are_evicted_first(bounds: dict[str, Any], left: list[int]) -> None:
    kept = store(**{"least_rounds": 1, **bounds})
    first = part(0)
    await kept.put(lineage(0), [first])
    held = kept.get(digest(first))
    for number in range(1, 8):
        await kept.put(lineage(number), [part(number)])
    assert [number for number in range(8) if lineage(number) in kept] == left and kept.rounds == len(left)
    assert held and bytes(held.chunk(1)) == bytes(first.chunk(1)), "a peer that is being served it reads on"


@on_virtual_time
async def test_full_disk_costs_rounds_parts_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    buffers = FailingBuffers()
    kept = store(buffers)
    for number in range(3):
        assert await kept.put(lineage(number), [part(number)])
    buffers.full = True
    assert not await kept.put(lineage(3), [part(3)]) and not await kept.put(lineage(4), [part(4)])
    assert [number for number in range(5) if lineage(number) in kept] == [2], "the oldest make room"
    buffers.full, buffers.failing = False, True
    assert not await kept.put(lineage(5), [part(5)])
    buffers.failing = False
    assert await kept.put(lineage(6), [part(6)]) and kept.rounds == 1
    assert [each.message for each in caplog.records] == [
        "cannot store a round's parts for peers that come later: No space left on device"
    ]


@on_virtual_time
async def test_interrupted_write_resumes_at_its_position() -> None:
    buffers, made = FailingBuffers(), part(1)
    kept = store(buffers)
    for _ in range(3):  # a piece that is under way is written again
        writing = asyncio.create_task(kept.put(lineage(1), [made]))
        await asyncio.sleep(1e-7)
        writing.cancel()
        await asyncio.wait([writing])
    assert lineage(1) not in kept and len(buffers.written) >= 3
    assert await kept.put(lineage(1), [made]) and buffers.made == 1
    found = kept.get(digest(made))
    assert found and chunks(found.load()) == chunks(made)
    assert max(buffers.written) <= 4 * CHUNK and sum(buffers.written) <= SIZE + 3 * 4 * CHUNK


@on_virtual_time
async def test_writing_yields_to_data_phase_for_limited_time() -> None:
    gate, made = Gate(), part(1)
    kept, loop = PartStore(FailingBuffers(), SimCompute(), gate), asyncio.get_running_loop()
    gate.close(5.0)
    loop.call_later(3.0, gate.open)
    await kept.put(lineage(1), [made])
    assert 3.0 <= loop.time() < 3.1
    gate.close(loop.time() + 1e6)
    began = loop.time()
    await kept.put(lineage(2), [made])
    assert loop.time() - began == pytest.approx(made.chunks * GIVE_WAY_SECONDS, abs=0.1)


@simulated(SyncCluster, ("anna", "bert"), keep_rounds=2, store_rounds=64, every_rounds=50)
async def test_failing_file_costs_its_round(world: SyncCluster) -> None:
    part_cache, buffers = world.peers["anna"].part_cache, FailingBuffers()
    assert part_cache.past
    part_cache.past._make_buffer = buffers
    links = await world.rounds("anna bert", 6)
    buffers.failing = True
    wanted = links[0].record.parts[0].digest
    assert wanted in part_cache and await part_cache.load(wanted) is None
    assert wanted not in part_cache and part_cache.past.rounds == 5
    cleo = await world.add("cleo")
    assert (await cleo.catch_up()).outcome == "superseded" and world.same("anna cleo"), "bert has them, too"


@simulated(SyncCluster, ("anna", "bert", "cleo"), keep_rounds=2, store_rounds=64, every_rounds=100)
async def test_long_absent_peer_replays_stored_rounds(world: SyncCluster) -> None:
    await world.rounds("anna bert", 40)
    part_cache = world.peers["anna"].part_cache
    assert len(part_cache._parts) == 2 and part_cache.past and part_cache.past.rounds == 40
    report = await world.peers["cleo"].catch_up()
    assert world.same("anna bert cleo") and (report.replayed_rounds, report.blamed) == (40, {})
