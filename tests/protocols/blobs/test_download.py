"""A part from several holders, some of which are silent."""

from __future__ import annotations

import asyncio

import pytest
import torch

from protocols.aio import Gate
from protocols.allreduce.parts import ReducedPart
from protocols.base import BadPayload, PeerError, PeerId
from protocols.blobs.parts import PartCache, PartDownload, PartStore
from protocols.streams.endpoint import RoundAccounting
from protocols.sync.snapshot import MemoryBuffer
from protocols.vectors.codec import codec
from tests.sim.swarm import SimSwarm
from tests.support.simulated import simulated
from tests.support.waiting import now

ELEMENTS, CHUNK = 10_000, 1000


def made_part() -> ReducedPart:
    part, vector = empty_part(), torch.linspace(-1, 1, ELEMENTS)
    for index in range(part.chunks):
        part.codec.encode(vector[slice(*part.elements(index))], part.chunk(index))
    part.masks = [1] * part.chunks
    part.seal([part.digest_of(index, 1) for index in range(part.chunks)])
    return part


def empty_part(clusters: int = 0) -> ReducedPart:
    part = ReducedPart(codec("fp32"), 0, ELEMENTS, CHUNK)
    part.clusters = clusters
    return part


def clustered_part() -> ReducedPart:
    """A part of two clusters, the second of which is in its first chunks only."""
    part = made_part()
    part.clusters = 2
    part.masks = [3] * 4 + [1] * 6
    part.members = [bytes([7, 0, 0, 0, 5 if mask == 3 else 0, 0, 0, 0]) for mask in part.masks]
    part.seal([part.digest_of(each, mask, part.members[each]) for each, mask in enumerate(part.masks)])
    return part


@pytest.mark.parametrize("silent, seconds", [(2, 0.5), (3, 5.5), (6, 10.5)])
@simulated(lambda silent, seconds: SimSwarm())
async def test_unreachable_holders_cost_others_little(swarm: SimSwarm, silent: int, seconds: float) -> None:
    """Three are asked at a time, and each may be silent for five seconds."""
    me, part, lost = swarm.join("me"), made_part(), list[PeerId]()
    holders = [f"silent-{each}" for each in range(silent)] + ["holder"]
    for name in holders:
        host = swarm.join(name)
        if name == "holder":
            PartCache(host).put(b"l" * 32, part)
        else:
            swarm.network.block("me", name)

    def on_lost(holder: PeerId, error: PeerError | BadPayload) -> None:
        lost.append(holder)

    assert part.result
    download = PartDownload(
        me, RoundAccounting(), wanted=part.result, part=empty_part(), silence_seconds=5.0, on_lost=on_lost
    )
    assert await download.run(lambda: holders, now() + 1000.0)
    assert now() < seconds and len(lost) == silent // 3 * 3
    assert download.part.result == part.result and download.part.digests == part.digests
    assert [bytes(download.part.chunk(each)) for each in range(part.chunks)] == [
        bytes(part.chunk(each)) for each in range(part.chunks)
    ]


@simulated(lambda: SimSwarm(latency_seconds=0.1))
async def test_small_chunks_take_no_round_trip_each(swarm: SimSwarm) -> None:
    """A peer that is behind would otherwise fetch each round for longer than the others take for it."""
    me, part = swarm.join("me"), made_part()
    PartCache(swarm.join("holder")).put(b"l" * 32, part)
    assert part.result and part.chunks == 10
    download = PartDownload(me, RoundAccounting(), wanted=part.result, part=empty_part(), silence_seconds=5.0)
    assert await download.run(lambda: ["holder"], now() + 1000.0)
    assert now() <= 0.85  # to open a stream, for the index, for all chunks: .2 s each, and the parts' bytes


@simulated(SimSwarm)
async def test_part_without_elements_is_fetched(swarm: SimSwarm) -> None:
    """A reducer whose bandwidth is too low reduces nothing, and its part has a digest all the same."""
    me, part = swarm.join("me"), ReducedPart(codec("fp32"), 5, 5, CHUNK)
    part.seal([])
    PartCache(swarm.join("holder")).put(b"l" * 32, part)
    assert part.result and part.chunks == 0
    empty = ReducedPart(codec("fp32"), 5, 5, CHUNK)
    download = PartDownload(me, RoundAccounting(), wanted=part.result, part=empty, silence_seconds=5.0)
    assert await download.run(lambda: ["holder"], now() + 1000.0) and empty.result == part.result


@simulated(SimSwarm)
async def test_holder_of_another_part_is_refused(swarm: SimSwarm) -> None:
    """It changes a chunk after it has made the index."""
    me, part, errors = swarm.join("me"), made_part(), list[str]()
    PartCache(swarm.join("liar")).put(b"l" * 32, part)
    part.chunk(7)[0] ^= 1
    assert part.result
    download = PartDownload(
        me,
        RoundAccounting(),
        wanted=part.result,
        part=empty_part(),
        silence_seconds=5.0,
        on_lost=lambda holder, error: errors.append(f"{holder}: {error}"),
    )
    assert not await download.run(lambda: ["liar"], now() + 1000.0)
    assert errors == ["liar: chunk 7 of a part with another digest than its index has"] and now() < 1.0


@simulated(SimSwarm)
async def test_clustered_part_travels_with_its_members(swarm: SimSwarm) -> None:
    """From memory and from disk. A holder that names other members is refused."""
    me, part, errors = swarm.join("me"), clustered_part(), list[str]()
    assert part.result
    for name in ("memory", "disk", "liar"):
        host = swarm.join(name)
        held = PartCache(host, PartStore(MemoryBuffer, host.compute, Gate()))
        held.put(b"l" * 32, part if name != "liar" else clustered_part())
        if name == "disk":
            held.decided(b"l" * 32, [part.result.digest])
            await held.save()
            held.keep([b"l" * 32])
            assert held.get(part.result.digest) is None and part.result.digest in held
        elif name == "liar":
            lying = held.get(part.result.digest)
            assert lying
            lying.members = [bytes(8)] * 10
    for holders in (["liar"], ["disk"], ["memory", "disk"]):
        download = PartDownload(
            me,
            RoundAccounting(),
            wanted=part.result,
            part=empty_part(2),
            silence_seconds=5.0,
            on_lost=lambda holder, error: errors.append(f"{holder}: {error}"),
        )
        assert await download.run(lambda: holders, now() + 1000.0) is (holders != ["liar"])  # noqa: B023 - awaited
    assert download.part.members == part.members and download.part.masks == part.masks
    assert len(errors) == 1 and errors[0].startswith("liar: chunk")
    assert [bytes(download.part.chunk(each)) for each in range(10)] == [bytes(part.chunk(each)) for each in range(10)]


@simulated(SimSwarm)
async def test_idle_holder_does_not_outlast_the_deadline(swarm: SimSwarm) -> None:
    """One of three has nothing to send, as the others were asked for the only chunk, at a few bytes a second."""
    me, part = swarm.join("me"), ReducedPart(codec("fp32"), 0, CHUNK, CHUNK)
    part.codec.encode(torch.zeros(CHUNK), part.chunk(0))
    part.masks = [1]
    part.seal([part.digest_of(0, 1)])
    assert part.result
    for name in ("slow", "slower", "idle"):
        PartCache(swarm.join(name, 20.0)).put(b"l" * 32, part)
    empty = ReducedPart(codec("fp32"), 0, CHUNK, CHUNK)
    download = PartDownload(me, RoundAccounting(), wanted=part.result, part=empty, silence_seconds=1000.0)
    asking = swarm.spawn("me", download.run(lambda: ["slow", "slower", "idle"], now() + 1000.0))
    await asyncio.sleep(60.0)
    download._until = now() + 1.0  # a deadline that one holder's task notices before the download does
    await asyncio.sleep(60.0)
    asking.cancel()
