"""Joining a run that goes on, over lines of a given speed: how long it takes, what comes twice, who brings what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from node.reporting.report import RoundReport
from protocols import wire
from protocols.base import Buffer, Header
from protocols.framing import FramedStream
from protocols.limits import SLOWEST_BYTES_PER_SECOND
from protocols.sync.chunk_scheduler import MAX_REQUESTED_CHUNKS, ChunkScheduler, DonorRate
from protocols.sync.requests import Busy
from protocols.sync.snapshot import MemoryBuffer, Snapshot
from protocols.sync.snapshot_download import STALL_SECONDS
from protocols.sync.snapshot_server import LEND_SECONDS, MAX_PAUSES, PUT_OFF_SECONDS
from tests.node.storage import test_checkpoint as checkpoints
from tests.support.sync_cluster import SpoofedPeer, SyncCluster, SyncPeer

ELEMENTS = 800_000
STATE = 8 * ELEMENTS
MIB = 1 << 20
MEAN = ELEMENTS + ELEMENTS // 32
SLOW = 1.25e6  # 10 Mbit/s
ROUND_SECONDS = 4.0


def now() -> float:
    return asyncio.get_running_loop().time()


def play(
    main: Callable[[SyncCluster], Coroutine[Any, Any, None]],
    names: str = "anna bert",
    elements: int = ELEMENTS,
    **more: Any,
) -> None:
    world = SyncCluster(names.split(), elements=elements, **{"keep_rounds": 2, "store_rounds": 64, **more})

    async def whole() -> None:
        await world.rounds(names, 5)
        await main(world)

    world.play(whole)


async def joiner(world: SyncCluster, bytes_per_second: float, name: str = "cleo") -> SyncPeer:
    peer = await world.add(name)
    world.network.nodes[name].bytes_per_second = bytes_per_second
    return peer


async def deciding(world: SyncCluster, names: str, seconds: float = ROUND_SECONDS) -> None:
    while True:
        await asyncio.sleep(seconds)
        await world.decide(names)


async def caught_up(peer: SyncPeer, goal: SyncPeer, passes: int = 10) -> list[RoundReport]:
    """As a peer's life has it: again and again, until it stands where the others do."""
    reports: list[RoundReport] = []
    while peer.chain.head != goal.chain.head:
        reports.append(await peer.catch_up(120.0))
        assert reports[-1].outcome == "superseded" and len(reports) <= passes, reports[-1].blamed
    return reports


def chunks_from(peer: SyncPeer) -> list[float]:
    """When it sends a chunk of a snapshot, from now on."""
    sent: list[float] = []

    async def count(stream: FramedStream, header: Header, payload: Buffer) -> None:
        if isinstance(header, wire.Chunk):
            sent.append(now())
        await stream.send(header, payload)

    peer.transport.disguise = lambda method, stream, pipe: SpoofedPeer(stream, count)  # type: ignore[assignment,return-value]
    return sent


# -- time -------------------------------------------------------------------------------------------------------------


def test_slow_joiner_catches_up_while_rounds_continue() -> None:
    async def main(world: SyncCluster) -> None:
        cleo, began = await joiner(world, SLOW), now()
        rounds = asyncio.create_task(deciding(world, "anna bert"))
        reports = await caught_up(cleo, world.peers["anna"])
        rounds.cancel()
        assert world.same("anna bert cleo") and len(reports) > 1
        assert reports[0].bytes_downloaded == STATE and not any(each.bytes_downloaded for each in reports[1:])
        received = sum(each.bytes_received for each in reports)
        assert received < STATE + MEAN * sum(each.replayed_rounds for each in reports) + 50_000
        assert now() - began < 1.2 * received / SLOW

    play(main)


def test_three_slow_donors_are_fully_used() -> None:
    async def main(world: SyncCluster) -> None:
        names, sent = "anna bert dora", {}
        for name in names.split():
            world.network.nodes[name].bytes_per_second = 3.75e6
            sent[name] = chunks_from(world.peers[name])
        cleo, began = await joiner(world, 12.5e6), now()
        report = await cleo.catch_up()
        seconds = max(max(times) for times in sent.values()) - began
        assert report.bytes_downloaded == 8 * 2_000_000 and seconds < 1.2 * 8 * 2_000_000 / (3 * 3.75e6)
        assert all(0.28 < len(times) / 16 < 0.4 for times in sent.values()), sent

    play(main, "anna bert dora", elements=2_000_000)


def test_fast_donor_sends_more_and_finishes_the_download() -> None:
    async def main(world: SyncCluster) -> None:
        world.network.nodes["anna"].bytes_per_second = 1e5
        sent, began = {name: chunks_from(world.peers[name]) for name in ("anna", "bert")}, now()
        cleo = await joiner(world, 12.5e6)
        report = await cleo.catch_up()
        assert max(map(max, sent.values())) - began < STATE / 12.5e6 + 4.0, "anna alone takes ten seconds for one"
        assert len(sent["anna"]) <= 2 < len(sent["bert"]) and report.bytes_downloaded <= STATE + MIB

    play(main)


def test_progressing_download_outlasts_deadline_and_stalled_ends() -> None:
    async def main(world: SyncCluster) -> None:
        cleo, began = await joiner(world, 2e5), now()
        assert (await cleo.catch_up(10.0)).outcome == "superseded" and now() - began > STATE / 2e5
        dora, began = await joiner(world, 2e5, "dora"), now()
        asyncio.get_running_loop().call_later(20.0, world.network.block, "anna", "dora")
        asyncio.get_running_loop().call_later(20.0, world.network.block, "bert", "dora")
        report = await dora.catch_up(10.0)
        assert report.outcome == "undecided" and 20.0 < now() - began < 20.0 + 2 * STALL_SECONDS

    play(main)


def test_slow_chunks_do_not_extend_download_forever() -> None:
    async def main(world: SyncCluster) -> None:
        async def drop(stream: FramedStream, header: Header, payload: Buffer) -> None:
            if isinstance(header, wire.Chunk):
                await asyncio.sleep(29.0)
            await stream.send(header, payload)

        world.peers["anna"].transport.disguise = lambda method, stream, pipe: SpoofedPeer(stream, drop)  # type: ignore[assignment,return-value]
        world.network.kill("bert")
        cleo, began = await joiner(world, 12.5e6), now()
        assert (await cleo.catch_up(10.0)).outcome == "undecided"
        assert now() - began < 20.0 + STATE / SLOWEST_BYTES_PER_SECOND

    play(main)


def test_link_slower_than_rounds_is_reported_once() -> None:
    async def main(world: SyncCluster) -> None:
        cleo, told = await joiner(world, 2e5), list[str]()
        cleo.sync.complain_to(told.append)
        rounds = asyncio.create_task(deciding(world, "anna bert", 3.5))
        for _ in range(3):
            await cleo.catch_up(60.0)
        rounds.cancel()
        (line,) = told
        assert "this peer's line is too slow for the run" in line and "has 1.5" in line and "rounds of 0.825 MB" in line

    play(main)


# -- what is here stays -----------------------------------------------------------------------------------------------


def test_second_attempt_fetches_only_missing_chunks() -> None:
    async def main(world: SyncCluster) -> None:
        cleo = await joiner(world, SLOW)
        for name in ("anna", "bert"):
            asyncio.get_running_loop().call_later(4.0, world.network.block, name, "cleo")
        first = await cleo.catch_up(10.0)
        assert first.outcome == "undecided" and 2 * MIB < first.bytes_downloaded < STATE
        for name in ("anna", "bert"):
            world.network.heal(name, "cleo")
        await world.rounds("anna bert", 4)  # its snapshot has made room for others
        second = await cleo.catch_up(10.0)
        assert world.same("anna bert cleo") and (second.outcome, second.replayed_rounds) == ("superseded", 5)
        assert first.bytes_downloaded + second.bytes_downloaded < STATE + 5 * MIB

    play(main, every_rounds=1)


def test_snapshot_in_transfer_is_kept_until_done() -> None:
    async def main(world: SyncCluster) -> None:
        anna, cleo = world.peers["anna"], await joiner(world, SLOW)
        asyncio.get_running_loop().call_later(3.0, world.network.kill, "bert")
        sync_progress = asyncio.create_task(cleo.catch_up(60.0))
        await asyncio.sleep(2.0)
        taken = anna.snapshots.held()[0]
        await world.rounds("anna", 8, voters=[anna.me, world.peers["bert"].me])
        told = {each.lineage for each in anna.sync._donor.kept()}
        assert taken not in anna.snapshots.held() and taken.lineage in told
        assert (await sync_progress).outcome == "superseded"
        await asyncio.sleep(LEND_SECONDS + 1.0)
        assert anna.sync._donor.kept() == anna.snapshots.kept() and not anna.sync._donor._loans

    play(main)


def test_snapshot_is_lent_only_while_replayable() -> None:
    async def main(world: SyncCluster) -> None:
        anna, cleo = world.peers["anna"], await joiner(world, SLOW)
        sync_progress = asyncio.create_task(cleo.catch_up(60.0))
        await asyncio.sleep(2.0)
        for rounds, lent in ((8, 1), (4, 0)):
            await world.rounds("anna bert", rounds)
            assert len(anna.sync._donor.kept()) == len(anna.snapshots.kept()) + lent
        sync_progress.cancel()

    play(main, store_rounds=10)


class Rooms:
    """Room that outlives the peer that asked for it."""

    def __init__(self) -> None:
        self.rooms: dict[bytes, MemoryBuffer] = {}

    def __call__(self, lineage: bytes, round_number: int, size: int) -> MemoryBuffer:
        if lineage in self.rooms:
            self.rooms[lineage].fresh = False
        return self.rooms.setdefault(lineage, MemoryBuffer(size))


@pytest.mark.parametrize("spoilt", [False, True])
def test_next_incarnation_resumes_the_download(spoilt: bool) -> None:
    async def main(world: SyncCluster) -> None:
        rooms, first = Rooms(), await joiner(world, SLOW)
        first.snapshots._make_room = rooms
        sync_progress = asyncio.create_task(first.catch_up())
        await asyncio.sleep(3.5)
        sync_progress.cancel()
        world.network.kill("cleo")
        await world.rounds("anna bert", 2)  # a newer snapshot is there now
        (room,) = rooms.rooms.values()
        if spoilt:
            room.write(5, b"x")
        again = await joiner(world, SLOW, "emil")
        again.snapshots._make_room = rooms
        again.snapshots.has_begun = lambda lineage, before: lineage in rooms.rooms
        report = await again.catch_up()
        assert world.same("anna bert emil") and len(rooms.rooms) == 1
        assert MIB < report.bytes_downloaded < STATE - (1 if spoilt else 2) * MIB
        assert again.snapshots.held()[0].fresh is False

    play(main, every_rounds=2)


def test_next_incarnation_finds_download_begun_on_disk(tmp_path: Path) -> None:
    before, whole = checkpoints.checkpoints(tmp_path).snapshots, checkpoints.state()
    lineage = checkpoints.lineage_of(5)
    made = Snapshot(lineage, 5, whole.index)
    made.fill(whole.anchor, whole.velocity)
    assert not before.has_begun(lineage, 5)
    begun = before.new(lineage, 5, whole.index)
    begun.put(0, made.chunk(0))
    again = checkpoints.checkpoints(tmp_path).snapshots
    assert again.has_begun(lineage, 5) and not again.has_begun(checkpoints.lineage_of(10), 10)
    found = again.new(lineage, 5, whole.index)
    assert begun.fresh and not found.fresh and found.chunk(0) == made.chunk(0)


def test_newer_snapshot_is_taken_when_replay_costs_more() -> None:
    async def main(world: SyncCluster) -> None:
        cleo = await joiner(world, SLOW)
        for name in ("anna", "bert"):
            asyncio.get_running_loop().call_later(2.5, world.network.block, name, "cleo")
        assert (await cleo.catch_up(10.0)).bytes_downloaded < 3 * MIB
        for name in ("anna", "bert"):
            world.network.heal(name, "cleo")
        await world.rounds("anna bert", 8)
        report = await cleo.catch_up()
        assert (report.bytes_downloaded, report.replayed_rounds) == (STATE, 1)

    play(main)


# -- rounds go first --------------------------------------------------------------------------------------------------


def test_donors_pause_while_a_round_needs_the_link() -> None:
    async def main(world: SyncCluster) -> None:
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

    play(main)


def test_endless_rounds_still_allow_a_slow_download() -> None:
    async def main(world: SyncCluster) -> None:
        for peer in world.of("anna bert"):
            peer.part_cache.gate.close(now() + 1e6)
        sent = [chunks_from(peer) for peer in world.of("anna bert")]
        cleo, began = await joiner(world, SLOW), now()
        assert (await cleo.catch_up(10.0)).outcome == "superseded"
        times = sorted(at for each in sent for at in each)
        assert now() - began > len(times) / 2 * MAX_PAUSES * PUT_OFF_SECONDS - 60.0

    play(main)


def test_donor_postponing_one_chunk_forever_is_blamed() -> None:
    async def main(world: SyncCluster) -> None:
        async def later(stream: FramedStream, header: Header, payload: Buffer) -> None:
            if isinstance(header, wire.Chunk):
                for _ in range(1000):
                    await stream.send(Busy(0.0))
            await stream.send(header, payload)

        world.peers["anna"].transport.disguise = lambda method, stream, pipe: SpoofedPeer(stream, later)  # type: ignore[assignment,return-value]
        world.network.nodes["bert"].bytes_per_second = 1e6
        report = await (await joiner(world, 12.5e6)).catch_up()
        assert report.outcome == "superseded" and "puts off one chunk" in report.blamed["anna"]

    play(main)


# -- who is asked for what --------------------------------------------------------------------------------------------


def test_request_window_follows_the_donor_rate() -> None:
    fast, slow, crawling = DonorRate(), DonorRate(), DonorRate()
    assert fast.window == 2
    for rate, seconds in ((fast, 0.01), (slow, 0.28), (crawling, 8.0)):
        rate.took(seconds)
    assert (fast.window, slow.window, crawling.window) == (MAX_REQUESTED_CHUNKS, 4, 1)
    assert (fast.patience_seconds, crawling.patience_seconds) == (1.0, 24.0)


def test_released_chunks_are_reclaimed_and_shared_at_end() -> None:
    time = [0.0]
    scheduler = ChunkScheduler([3, 1, 2, 0], lambda: time[0])
    assert [scheduler.share(donors) for donors in (0, 1, 2, 9)] == [4, 4, 2, 2]
    assert [scheduler.claim((), 5.0) for _ in range(5)] == [0, 1, 2, 3, None]
    scheduler.release(2)
    assert scheduler.claim((), 5.0) == 2, "it was not brought"
    scheduler.missing.discard(0)
    scheduler.release(0)
    assert scheduler.next((), 5.0) is None, "it was"
    time[0] = 6.0
    assert scheduler.next((), 9.0) is None and scheduler.next((), 5.0) == 1 and scheduler.next([1], 5.0) == 3
    assert [scheduler.claim((), 5.0) for _ in range(4)] == [1, 3, 2, None], "two are asked, never three"
