"""Parts of past rounds on a disk: what is kept of them, who gets them, and disks that fail."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from node.storage.scratch import ScratchFile
from protocols.allreduce.parts import ReducedPart, chunk_digest, seal
from protocols.base import Buffer
from protocols.butterfly.part_store import GIVE_WAY_SECONDS, PartStore
from protocols.codec import codec
from protocols.gate import Gate
from protocols.sync.snapshot import MemoryBuffer
from tests.protocols.sync.test_sync_rounds import ROUND_SECONDS, Lives
from tests.sim import loop as simloop
from tests.sim.host import SimCompute
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
    made.result = seal(*span, made.masks, [chunk_digest(m, made.chunk(i)) for i, m in enumerate(made.masks)])
    return made


def name(number: int) -> bytes:
    return bytes([number]) * 32


class Rooms:
    """Makes rooms that fail when they are told to.

    Attributes:
        full: there is none.
        written: sizes of the pieces.
    """

    def __init__(self) -> None:
        self.full = self.failing = False
        self.written: list[int] = []
        self.made = 0

    def __call__(self, size: int) -> MemoryBuffer:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.made += 1
        rooms = self

        class Room(MemoryBuffer):
            def read(self, offset: int, into: memoryview) -> None:
                rooms.fail()
                super().read(offset, into)

            def write(self, offset: int, data: Buffer) -> None:
                rooms.fail()
                rooms.written.append(len(data))
                super().write(offset, data)

        return Room(size)

    def fail(self) -> None:
        if self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def store(rooms: Callable[[int], Any] | None = None, **bounds: int) -> PartStore:
    return PartStore(rooms or Rooms(), SimCompute(), Gate(), **bounds)


def play(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    simloop.run(main())


def digest(made: ReducedPart) -> bytes:
    assert made.result
    return made.result.digest


def test_part_round_trips(tmp_path: Path) -> None:
    async def main() -> None:
        kept, parts = (
            store(lambda size: ScratchFile(tmp_path, size)),
            [part(1), part(2, (1100, 1100)), part(3, (0, 100))],
        )
        assert await kept.put(name(1), parts) and name(1) in kept and kept.size_bytes == SIZE + 400
        for made in parts:
            found = kept.get(digest(made))
            assert found and (found.low, found.high, found.masks, found.result) == (
                made.low, made.high, made.masks, made.result,
            )  # fmt: skip
            assert [bytes(found.chunk(index)) for index in range(found.chunks)] == [
                bytes(made.chunk(index)) for index in range(made.chunks)
            ]
            loaded = found.load()
            assert bytes(loaded._memory) == bytes(made._memory) and loaded.masks == made.masks
        assert kept.get(b"x" * 32) is None

    play(main)


@pytest.mark.parametrize(
    "bounds, left",
    [
        ({"most_rounds": 3}, [5, 6, 7]),
        ({"limit_bytes": 2 * SIZE, "least_rounds": 1}, [6, 7]),
        ({"limit_bytes": 1, "least_rounds": 4}, [4, 5, 6, 7]),
        ({"limit_bytes": 1, "least_rounds": 1}, [7]),
    ],
)
def test_oldest_rounds_are_evicted_first(bounds: dict[str, int], left: list[int]) -> None:
    async def main() -> None:
        kept = store(**{"least_rounds": 1, **bounds})
        first = part(0)
        await kept.put(name(0), [first])
        held = kept.get(digest(first))
        for number in range(1, 8):
            await kept.put(name(number), [part(number)])
        assert [number for number in range(8) if name(number) in kept] == left and kept.rounds == len(left)
        assert held and bytes(held.chunk(1)) == bytes(first.chunk(1)), "who is being served it reads on"

    play(main)


def test_full_disk_costs_rounds_parts_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        rooms = Rooms()
        kept = store(rooms)
        for number in range(3):
            assert await kept.put(name(number), [part(number)])
        rooms.full = True
        assert not await kept.put(name(3), [part(3)]) and not await kept.put(name(4), [part(4)])
        assert [number for number in range(5) if name(number) in kept] == [2], "the oldest make room"
        rooms.full, rooms.failing = False, True
        assert not await kept.put(name(5), [part(5)])
        rooms.failing = False
        assert await kept.put(name(6), [part(6)]) and kept.rounds == 1

    play(main)
    assert [each.message for each in caplog.records] == [
        "cannot store a round's parts for peers that come later: No space left on device"
    ]


def test_interrupted_write_resumes_at_its_position() -> None:
    async def main() -> None:
        rooms, made = Rooms(), part(1)
        kept = store(rooms)
        for _ in range(3):  # a piece that is under way is written again
            writing = asyncio.create_task(kept.put(name(1), [made]))
            await asyncio.sleep(1e-7)
            writing.cancel()
            await asyncio.wait([writing])
        assert name(1) not in kept and len(rooms.written) >= 3
        assert await kept.put(name(1), [made]) and rooms.made == 1
        found = kept.get(digest(made))
        assert found and bytes(found.load()._memory) == bytes(made._memory)
        assert max(rooms.written) <= 4 * CHUNK and sum(rooms.written) <= SIZE + 3 * 4 * CHUNK

    play(main)


def test_writing_yields_to_data_phase_for_limited_time() -> None:
    async def main() -> None:
        gate, rooms, made = Gate(), Rooms(), part(1)
        kept, loop = PartStore(rooms, SimCompute(), gate), asyncio.get_running_loop()
        gate.close(5.0)
        loop.call_later(3.0, gate.open)
        await kept.put(name(1), [made])
        assert 3.0 <= loop.time() < 3.1
        gate.close(loop.time() + 1e6)
        began = loop.time()
        await kept.put(name(2), [made])
        assert loop.time() - began == pytest.approx(made.chunks * GIVE_WAY_SECONDS, abs=0.1)

    play(main)


def test_failing_file_costs_its_round() -> None:
    world = SyncCluster(("anna", "bert"), keep_rounds=2, store_rounds=64, every_rounds=50)

    async def main() -> None:
        part_cache, rooms = world.peers["anna"].part_cache, Rooms()
        assert part_cache.past
        part_cache.past._make_room = rooms
        links = await world.rounds("anna bert", 6)
        rooms.failing = True
        wanted = links[0].record.parts[0].digest
        assert (
            wanted in part_cache
            and await part_cache.load(wanted) is None
            and wanted not in part_cache
            and part_cache.past.rounds == 5
        )
        cleo = await world.add("cleo")
        assert (await cleo.catch_up()).outcome == "superseded" and world.same("anna cleo"), "bert has them, too"

    world.play(main)


def test_long_absent_peer_replays_stored_rounds() -> None:
    world = SyncCluster(("anna", "bert", "cleo"), keep_rounds=2, store_rounds=64, every_rounds=100)

    async def main() -> None:
        await world.rounds("anna bert", 40)
        part_cache = world.peers["anna"].part_cache
        assert len(part_cache._parts) == 2 and part_cache.past and part_cache.past.rounds == 40
        report = await world.peers["cleo"].catch_up()
        assert world.same("anna bert cleo") and (report.replayed_rounds, report.blamed) == (40, {})

    world.play(main)


def test_swarm_keeps_two_rounds_in_memory_others_stored() -> None:
    world = Lives("anna bert", keep_rounds=4, rooms=Rooms())

    async def main() -> None:
        for name in world.founders:
            world.begin(name.peer)
        most = 0
        for _ in range(100):
            await asyncio.sleep(10 * ROUND_SECONDS / 100)
            most = max(most, *(len(life.averager.part_cache._parts) for life in world.lives.values()))
        anna = world.lives["anna"]
        rounds = anna.chain.head.key.round
        assert most == 2 and rounds > 7 and anna.averager.part_cache.past
        assert anna.averager.part_cache.past.rounds == 5

    world.play(main)
