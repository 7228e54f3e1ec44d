"""Joining a run that goes on, over links of a given speed: how long it takes, and which donor sends what."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from node.reporting.report import RoundReport
from protocols import wire
from protocols.base import SLOWEST_BYTES_PER_SECOND, Buffer, Header, PeerId
from protocols.blobs.download import STALL_SECONDS
from protocols.blobs.serving import PUT_OFF_SECONDS, BlobIndex, Busy
from protocols.streams.framing import FramedStream
from protocols.sync.snapshot import LEND_SECONDS, MAX_PAUSES, MemoryBuffer, Snapshot
from protocols.vectors.views import chunk_count
from tests.support import checkpoints as saved
from tests.support.disguises import late
from tests.support.simulated import simulated
from tests.support.sync_cluster import SyncCluster, SyncPeer
from tests.support.waiting import now

ELEMENTS = 800_000
STATE = 8 * ELEMENTS
MIB = 1 << 20
MEAN = ELEMENTS + ELEMENTS // 32
SLOW = 1.25e6  # 10 Mbit/s
ROUND_SECONDS = 4.0


class RoundsDecided(SyncCluster):
    """The named peers have decided some rounds, and keep the parts of past rounds in their stores."""

    def __init__(self, names: str = "anna bert", elements: int = ELEMENTS, decided: int = 5, **options: Any) -> None:
        super().__init__(names.split(), elements, **{"keep_rounds": 2, "store_rounds": 64, **options})
        self._decided = decided

    async def set_up(self) -> None:
        await super().set_up()
        await self.rounds(" ".join(self.peers), self._decided)

    def block_later(self, seconds: float, joiner: PeerId) -> None:
        """After so long, nothing that anna or bert sends reaches the joiner."""
        for name in ("anna", "bert"):
            asyncio.get_running_loop().call_later(seconds, self.network.block, name, joiner)


async def joiner(world: SyncCluster, bytes_per_second: float, name: str = "cleo") -> SyncPeer:
    peer = await world.add(name)
    world.network.nodes[name].bytes_per_second = bytes_per_second
    return peer


async def deciding(world: SyncCluster, names: str, seconds: float = ROUND_SECONDS) -> None:
    while True:
        await asyncio.sleep(seconds)
        await world.decide(names)


async def caught_up(peer: SyncPeer, goal: SyncPeer, passes: int = 10) -> list[RoundReport]:
    """Catch up again and again, as a peer does, until its head is that of `goal`."""
    reports: list[RoundReport] = []
    while peer.chain.head != goal.chain.head:
        reports.append(await peer.catch_up(120.0))
        assert reports[-1].outcome == "superseded" and len(reports) <= passes, reports[-1].blamed
    return reports


def chunks_from(peer: SyncPeer) -> list[float]:
    """The times at which the peer sends a chunk of a snapshot, from now on."""
    sent: list[float] = []
    streams: list[FramedStream] = []  # those of snapshots, not of parts

    async def count(stream: FramedStream, header: Header, payload: Buffer) -> None:
        if isinstance(header, BlobIndex) and header.chunks == 2 * chunk_count(peer.swarm.elements):
            streams.append(stream)
        if isinstance(header, wire.Chunk) and stream in streams:
            sent.append(now())
        await stream.send(header, payload)

    peer.disguise(count)
    return sent


def serving(world: SyncCluster, **rates: float) -> dict[PeerId, list[float]]:
    """The times at which each of these donors, which send that many bytes a second, sends a chunk, from now on."""
    for name, rate in rates.items():
        world.network.nodes[name].bytes_per_second = rate
    return {name: chunks_from(world.peers[name]) for name in rates}


# -- time -------------------------------------------------------------------------------------------------------------


@simulated(RoundsDecided)
async def test_slow_joiner_catches_up_while_rounds_continue(world: RoundsDecided) -> None:
    cleo, began = await joiner(world, SLOW), now()
    rounds = asyncio.create_task(deciding(world, "anna bert"))
    reports = await caught_up(cleo, world.peers["anna"])
    rounds.cancel()
    assert world.same("anna bert cleo") and len(reports) > 1
    assert reports[0].bytes_downloaded == STATE and not any(each.bytes_downloaded for each in reports[1:])
    received = sum(each.bytes_received for each in reports)
    assert received < STATE + MEAN * sum(each.replayed_rounds for each in reports) + 50_000
    assert now() - began < 1.2 * received / SLOW


@simulated(RoundsDecided, "anna bert dora", elements=2_000_000)
async def test_three_slow_donors_are_fully_used(world: RoundsDecided) -> None:
    sent = serving(world, anna=3.75e6, bert=3.75e6, dora=3.75e6)
    cleo, began = await joiner(world, 12.5e6), now()
    report = await cleo.catch_up()
    seconds = max(max(times) for times in sent.values()) - began
    assert report.bytes_downloaded == 8 * 2_000_000 and seconds < 1.2 * 8 * 2_000_000 / (3 * 3.75e6)
    assert all(0.28 < len(times) / 16 < 0.4 for times in sent.values()), sent


@simulated(RoundsDecided, "anna bert dora", elements=4_000_000, decided=1, every_rounds=1)
async def test_slow_donor_among_fast_ones_delays_nothing(world: RoundsDecided) -> None:
    sent = serving(world, anna=12.5e6, bert=12.5e6, dora=1.25e6)
    cleo = await joiner(world, 125e6)
    report = await cleo.catch_up()
    end, pace = max(map(max, sent.values())), median(b - a for a, b in pairwise(sent["anna"]))
    alone = pace * 8 * 4_000_000 / MIB / 2
    assert report.bytes_downloaded <= 8 * 4_000_000 + 2 * MIB, "two chunks may come twice"
    assert end - min(sent["anna"]) < alone, "no later than from the two fast ones"


@pytest.mark.long
@simulated(RoundsDecided, "anna bert dora", elements=4_000_000)
async def test_donor_that_stops_delays_the_end_by_seconds(world: RoundsDecided) -> None:
    rate = 3.75e6
    sent = serving(world, anna=rate, bert=rate, dora=rate)
    cleo = await joiner(world, 12.5e6)
    began, stopped = now(), 1.5
    asyncio.get_running_loop().call_later(stopped, world.network.block, "anna", "cleo")
    report = await cleo.catch_up()
    least = stopped + (8 * 4_000_000 - 3 * rate * stopped) / (2 * rate)
    end = max(max(sent[name]) for name in ("bert", "dora")) - began
    assert report.outcome == "superseded" and end < least + 1.0 + 4 * MIB / (2 * rate), "1 s, and what anna was asked"


@simulated(RoundsDecided)
async def test_progressing_download_outlasts_deadline_and_stalled_ends(world: RoundsDecided) -> None:
    cleo, began = await joiner(world, 2e5), now()
    assert (await cleo.catch_up(10.0)).outcome == "superseded" and now() - began > STATE / 2e5
    dora, began = await joiner(world, 2e5, "dora"), now()
    world.block_later(20.0, "dora")
    report = await dora.catch_up(10.0)
    assert report.outcome == "undecided" and 20.0 < now() - began < 20.0 + 2 * STALL_SECONDS


@simulated(RoundsDecided)
async def test_slow_chunks_do_not_extend_download_forever(world: RoundsDecided) -> None:
    world.peers["anna"].disguise(late(wire.Chunk, 29.0))
    world.network.kill("bert")
    cleo, began = await joiner(world, 12.5e6), now()
    assert (await cleo.catch_up(10.0)).outcome == "undecided"
    assert now() - began < 20.0 + STATE / SLOWEST_BYTES_PER_SECOND


# -- a download that goes on ------------------------------------------------------------------------------------------


@simulated(RoundsDecided, every_rounds=1)
async def test_second_attempt_fetches_only_missing_chunks(world: RoundsDecided) -> None:
    cleo = await joiner(world, SLOW)
    world.block_later(4.0, "cleo")
    first = await cleo.catch_up(10.0)
    assert first.outcome == "undecided" and 2 * MIB < first.bytes_downloaded < STATE
    world.heal(["anna", "bert"], ["cleo"])
    await world.rounds("anna bert", 4)  # its snapshot has made room for others
    second = await cleo.catch_up(10.0)
    assert world.same("anna bert cleo") and (second.outcome, second.replayed_rounds) == ("superseded", 5)
    assert first.bytes_downloaded + second.bytes_downloaded < STATE + 5 * MIB


@simulated(RoundsDecided)
async def test_snapshot_in_transfer_is_kept_until_done(world: RoundsDecided) -> None:
    anna, cleo = world.peers["anna"], await joiner(world, SLOW)
    asyncio.get_running_loop().call_later(3.0, world.network.kill, "bert")
    sync_progress = asyncio.create_task(cleo.catch_up(60.0))
    await asyncio.sleep(2.0)
    taken = anna.snapshots.held()[0]
    await world.rounds("anna", 8, voters=[anna.me, world.peers["bert"].me])
    announced = {each.lineage for each in anna.snapshots.served()}
    assert taken not in anna.snapshots.held() and taken.lineage in announced
    assert (await sync_progress).outcome == "superseded"
    await asyncio.sleep(LEND_SECONDS + 1.0)
    assert len(anna.snapshots.served()) == len(anna.snapshots.held()) and not anna.snapshots._leases


@simulated(RoundsDecided, store_rounds=10)
async def test_snapshot_is_lent_only_while_replayable(world: RoundsDecided) -> None:
    anna, cleo = world.peers["anna"], await joiner(world, SLOW)
    sync_progress = asyncio.create_task(cleo.catch_up(60.0))
    await asyncio.sleep(2.0)
    for rounds, lent in ((8, 1), (4, 0)):
        await world.rounds("anna bert", rounds)
        assert len(anna.snapshots.served()) == len(anna.snapshots.held()) + lent
    sync_progress.cancel()


class LastingBuffers(dict[bytes, MemoryBuffer]):
    """Lineage -> the buffer of a snapshot, which outlives the peer that asked for it."""

    def make(self, lineage: bytes, round_number: int, size: int) -> MemoryBuffer:
        if lineage in self:
            self[lineage].fresh = False
        return self.setdefault(lineage, MemoryBuffer(size))


@pytest.mark.parametrize("spoilt", [False, True])
@simulated(RoundsDecided, every_rounds=2)
async def test_next_incarnation_resumes_the_download(world: RoundsDecided, spoilt: bool) -> None:
    buffers, first = LastingBuffers(), await joiner(world, SLOW)
    first.snapshots._make_buffer = buffers.make
    sync_progress = asyncio.create_task(first.catch_up())
    await asyncio.sleep(3.5)
    sync_progress.cancel()
    world.network.kill("cleo")
    await world.rounds("anna bert", 2)  # a newer snapshot is there now
    (buffer,) = buffers.values()
    if spoilt:
        buffer.write(5, b"x")
    again = await joiner(world, SLOW, "emil")
    again.snapshots._make_buffer = buffers.make
    again.snapshots.has_begun = lambda lineage, before: lineage in buffers
    report = await again.catch_up()
    assert world.same("anna bert emil") and len(buffers) == 1
    assert MIB < report.bytes_downloaded < STATE - (1 if spoilt else 2) * MIB
    assert again.snapshots.held()[0].fresh is False


def test_next_incarnation_finds_download_begun_on_disk(tmp_path: Path) -> None:
    before, whole = saved.checkpoints(tmp_path).snapshots, saved.state()
    lineage = saved.lineage_of(5)
    made = Snapshot(lineage, 5, whole.index)
    made.fill(whole.anchor, whole.velocity)
    assert not before.has_begun(lineage, 5)
    begun = before.new(lineage, 5, whole.index)
    begun.put(0, made.chunk(0))
    again = saved.checkpoints(tmp_path).snapshots
    assert again.has_begun(lineage, 5) and not again.has_begun(saved.lineage_of(10), 10)
    found = again.new(lineage, 5, whole.index)
    assert begun.fresh and not found.fresh and found.chunk(0) == made.chunk(0)


@simulated(RoundsDecided)
async def test_newer_snapshot_is_taken_when_replay_costs_more(world: RoundsDecided) -> None:
    cleo = await joiner(world, SLOW)
    world.block_later(2.5, "cleo")
    assert (await cleo.catch_up(10.0)).bytes_downloaded < 3 * MIB
    world.heal(["anna", "bert"], ["cleo"])
    await world.rounds("anna bert", 8)
    report = await cleo.catch_up()
    assert (report.bytes_downloaded, report.replayed_rounds) == (STATE, 1)


# -- rounds go first --------------------------------------------------------------------------------------------------


@simulated(RoundsDecided)
async def test_donors_pause_while_a_round_needs_the_link(world: RoundsDecided) -> None:
    peers, began = world.of("anna bert"), now()
    sent, cleo = [chunks_from(peer) for peer in peers], await joiner(world, SLOW)
    loop = asyncio.get_running_loop()
    for peer in peers:
        loop.call_at(began + 0.5, peer.part_cache.gate.close, began + 100.0)
        loop.call_at(began + 15.0, peer.part_cache.gate.open)
    report = await cleo.catch_up()
    assert report.outcome == "superseded" and report.bytes_downloaded == STATE, "nothing is asked for twice"
    assert not [at for times in sent for at in times if began + 0.6 < at < began + 15.0]
    assert now() - began < 14.5 + 1.2 * report.bytes_received / SLOW


@simulated(RoundsDecided)
async def test_endless_data_phase_lets_joiners_fetch_one_chunk_at_a_time(world: RoundsDecided) -> None:
    """Only its begin holds them up. So rounds that always fill the lines keep most of them, and joiners catch up."""
    sending, most = Counter[str](), Counter[str]()
    first: list[float] = []

    def watch(donor: str, peer: SyncPeer) -> None:
        async def count(stream: FramedStream, header: Header, payload: Buffer) -> None:
            is_chunk = isinstance(header, wire.Chunk) and len(payload) == MIB  # parts of the last mean do not wait
            sending[donor] += is_chunk
            first.extend([now()] if is_chunk and not first else [])
            most[donor] = max(most[donor], sending[donor])
            await stream.send(header, payload)
            sending[donor] -= is_chunk

        peer.disguise(count)

    for donor in ("anna", "bert"):
        world.network.nodes[donor].bytes_per_second = SLOW
        world.peers[donor].part_cache.gate.close(now() + 1e6)
        watch(donor, world.peers[donor])
    began, joiners = now(), [await joiner(world, 10 * SLOW, name) for name in ("cleo", "dora")]
    found = await asyncio.gather(*(each.catch_up(10.0) for each in joiners))
    assert [each.outcome for each in found] == ["superseded"] * 2
    assert set(most.values()) == {1}
    assert first[0] - began >= MAX_PAUSES * PUT_OFF_SECONDS
    assert now() - first[0] < 1.5 * sum(each.bytes_received for each in found) / (2 * SLOW)


@simulated(RoundsDecided)
async def test_donor_postponing_one_chunk_forever_is_blamed(world: RoundsDecided) -> None:
    async def later(stream: FramedStream, header: Header, payload: Buffer) -> None:
        if isinstance(header, wire.Chunk):
            for _ in range(1000):
                await stream.send(Busy(0.0))
        await stream.send(header, payload)

    world.peers["anna"].disguise(later)
    world.network.nodes["bert"].bytes_per_second = 1e6
    report = await (await joiner(world, 12.5e6)).catch_up()
    assert report.outcome == "superseded" and "puts off one chunk" in report.blamed["anna"]
