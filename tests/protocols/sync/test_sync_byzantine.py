"""Contacts and donors that lie, stall or die: the peer blames and leaves each, and gets the right state elsewhere."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch

from node.outer.state import OuterState
from node.reporting.report import RoundReport
from protocols import wire
from protocols.allreduce.parts import ReducedPart
from protocols.base import Buffer, Header, Member
from protocols.blobs.serving import BlobIndex, Busy
from protocols.consensus.messages import Certificate
from protocols.consensus.record import Kind
from protocols.history.chain import follow
from protocols.streams.framing import FramedStream
from protocols.sync.requests import Certificates, HeadAnnouncement, SnapshotRef
from protocols.sync.snapshot import Snapshot
from tests.support.disguises import Send, flipped, instead, late
from tests.support.fake_rounds import certified
from tests.support.long import long
from tests.support.simulated import simulated
from tests.support.sync_cluster import SyncCluster, SyncPeer

T = TypeVar("T")

ANNA, BERT, CLEO = (Member(name) for name in ("anna", "bert", "cleo"))
LARGE = 400_000
"""Four chunks of snapshot."""


def truncated() -> Send:
    """Only the first certificate, as if it were all there are."""
    sent = [0]

    async def lie(stream: FramedStream, header: Header, payload: Buffer) -> None:
        if isinstance(header, Certificates):
            sent[0] = 0
            return await stream.send(replace(header, count=min(1, header.count), more=False))
        if isinstance(header, Certificate):
            sent[0] += 1
            if sent[0] > 1:
                return
        await stream.send(header, payload)

    return lie


UNVOTED = instead(Certificate, lambda each: replace(each, votes=()))
AHEAD = instead(HeadAnnouncement, lambda each: replace(each, key=replace(each.key, lineage=b"x" * 32, round=1 << 39)))


class RoundsBehind(SyncCluster):
    """Anna and bert are eleven rounds ahead of cleo; anna lies, if there is a lie, and is asked first."""

    def __init__(self, lie: Send | None, **options: Any) -> None:
        super().__init__(("anna", "bert", "cleo"), **{"keep_rounds": 4, **options})
        self._lie = lie

    @property
    def cleo(self) -> SyncPeer:
        return self.peers["cleo"]

    def play(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async def whole() -> T:
            await self.rounds("anna bert", 11)
            if self._lie:
                self.peers["anna"].disguise(self._lie)
            return await main()

        return super().play(whole)


def check_cleo(world: SyncCluster, report: RoundReport, why: str | None) -> None:
    """Cleo got the right state, and blamed anna for this reason, if there is one, and no other peer."""
    assert world.same("bert cleo") and report.outcome == "superseded", report.blamed
    assert why is None or (list(report.blamed) == ["anna"] and why in report.blamed["anna"]), report.blamed


# -- contacts ---------------------------------------------------------------------------------------------------------


CONTACTS: tuple[tuple[Send, str | None], ...] = (
    (truncated(), "does not prove the head"),
    (instead(Certificates, lambda each: replace(each, more=True)), None),
    (late(Certificates), "lost as a contact"),
    (late(Header), None),
)


@pytest.mark.parametrize("lie, said", CONTACTS)
@simulated(RoundsBehind)
async def test_lying_contact_is_blamed_and_others_are_believed(world: RoundsBehind, said: str | None) -> None:
    report = await world.cleo.catch_up()
    check_cleo(world, report, said)
    assert asyncio.get_running_loop().time() < 60.0


@simulated(RoundsBehind, None)
async def test_lying_directory_costs_only_time(world: RoundsBehind) -> None:
    world.hints[:0] = ["absent", "zeno", "cleo", "anna", "anna", *(f"invented-{each}" for each in range(500))]
    zeno = await world.add("zeno")
    zeno.disguise(AHEAD)
    world.network.block("cleo", "absent")
    report = await world.cleo.catch_up()
    assert world.same("anna bert cleo") and list(report.blamed) == ["zeno"]
    assert asyncio.get_running_loop().time() < 10.0


@simulated(RoundsBehind, UNVOTED)
async def test_liar_is_not_asked_again_for_a_while(world: RoundsBehind) -> None:
    assert (await world.cleo.catch_up()).blamed
    await world.decide("anna bert")
    report = await world.cleo.catch_up()
    assert world.same("bert cleo") and report.blamed == {}
    await asyncio.sleep(61.0)
    await world.decide("anna bert")
    assert list((await world.cleo.catch_up()).blamed) == ["anna"]


@simulated(RoundsBehind, UNVOTED)
async def test_refused_proofs_are_told_of_at_once_and_once_a_peer(world: RoundsBehind) -> None:
    """A newcomer without a state has no round whose report could say it."""
    said: list[str] = []
    world.cleo.sync.complain_to(said.append)
    for _ in range(3):
        await world.cleo.sync.better(asyncio.get_running_loop().time() + 10.0)
        await asyncio.sleep(61.0)
    (line,) = said
    assert "anna are refused (0 votes after" in line and line.endswith("with another --state-dir")
    zeno = await world.add("zeno")
    await world.decide("anna bert")
    zeno.disguise(AHEAD)
    world.hints.append("zeno")
    await world.cleo.sync.better(asyncio.get_running_loop().time() + 10.0)
    assert len(said) == 2 and "zeno" in said[1]


@simulated(RoundsBehind, None)
async def test_single_member_fork_cannot_capture_a_majority(world: RoundsBehind) -> None:
    await world.cleo.catch_up()
    capture = await world.decide("anna", Kind.FORK)
    await world.rounds("anna", 5)
    assert (await world.cleo.catch_up()).outcome == "undecided", "bert and cleo are enough"
    world.cleo.sync.stranded = True
    report = await world.cleo.catch_up()
    assert (report.outcome, report.lost_rounds) == ("superseded", 0) and capture.lineage in world.cleo.chain
    await world.decide("bert", voters=(BERT, CLEO))
    report = await world.cleo.catch_up()
    assert world.same("bert cleo") and report.lost_rounds == 6


@simulated(RoundsBehind, AHEAD)
async def test_greetings_of_a_liar_do_not_flood_peer(world: RoundsBehind) -> None:
    await world.cleo.catch_up()
    asked, better = [], world.cleo.sync.better

    async def counted(deadline: float) -> Any:
        asked.append(asyncio.get_running_loop().time())
        return await better(deadline)

    world.cleo.sync.better = counted  # type: ignore[method-assign]
    healing = asyncio.create_task(world.cleo.sync.run())
    anna = world.peers["anna"]
    for _ in range(500):
        await anna.sync._exchange(["cleo"], asyncio.get_running_loop().time() + 1.0)
        await asyncio.sleep(0.1)
    assert len(asked) <= 2, "it is not listened to for a minute"
    healing.cancel()


async def spoiled_then_closed(stream: FramedStream, header: Header, payload: Buffer) -> None:
    """A spoiled chunk, and nothing after it: the stream ends before the chunk is verified."""
    await flipped(wire.Chunk)(stream, header, payload)
    if isinstance(header, wire.Chunk):
        stream._pipe.close()  # type: ignore[attr-defined]


# -- donors -----------------------------------------------------------------------------------------------------------


RESTLESS = instead(BlobIndex, lambda each: Busy(0.0))
DONORS: tuple[tuple[Send, str | None], ...] = (
    (flipped(wire.Chunk), "another digest"),
    (spoiled_then_closed, "another digest"),
    (instead(wire.Chunk, lambda each: replace(each, index=each.index + 1)), "is due"),
    (instead(BlobIndex, lambda each: wire.Availability(False)), None),
    (instead(BlobIndex, lambda each: Busy(600.0)), None),
    (late(wire.Chunk), "nothing moved for 30 s"),
)
RARE_DONORS: tuple[tuple[Send, str | None], ...] = (
    (flipped(BlobIndex), "does not make the state root"),
    (instead(wire.Chunk, lambda each: replace(each, size=1 << 32)), "is due"),
    (instead(HeadAnnouncement, lambda each: replace(each, kept=(SnapshotRef(b"x" * 32, 1 << 30),))), None),
    (late(wire.Chunk, 20.0), None),
    (RESTLESS, None),
    (late(BlobIndex), "nothing moved for 30 s"),
)


@pytest.mark.parametrize("lie, said", [*DONORS, *long(*RARE_DONORS)])
@simulated(RoundsBehind, elements=LARGE)
async def test_lying_donor_is_blamed_and_state_is_correct(world: RoundsBehind, said: str | None) -> None:
    if said and "nothing moved" in said:  # bert alone would be done before that
        world.network.nodes["bert"].bytes_per_second = 1e5
    report = await world.cleo.catch_up()
    check_cleo(world, report, said)
    assert report.bytes_downloaded < 2 * 8 * LARGE
    assert said or report.blamed == {}


@simulated(RoundsBehind, flipped(wire.Chunk), elements=LARGE)
async def test_single_lying_donor_changes_and_leaks_nothing(world: RoundsBehind) -> None:
    """After a catch-up that failed: the state is what it was, buffers are gone, and a later try works."""

    def held() -> list[int]:
        gc.collect()
        return [sum(type(each) is kind for each in gc.get_objects()) for kind in (Snapshot, OuterState, ReducedPart)]

    world.network.block("bert", "cleo")
    before, count = (world.cleo.chain.head, world.cleo.outer_loop.anchor.clone()), held()
    for _ in range(3):
        report = await world.cleo.catch_up(120.0)
        assert report.outcome == "undecided" and "another digest" in report.blamed["anna"]
        assert world.cleo.chain.head == before[0] and torch.equal(world.cleo.outer_loop.anchor, before[1])
        await asyncio.sleep(61.0)
    assert held() == count
    world.network.heal("bert", "cleo")
    check_cleo(world, await world.cleo.catch_up(), "another digest")


@pytest.mark.parametrize("chunks", [1, *long(0)])
@simulated(RoundsBehind, None, elements=LARGE)
async def test_donor_killed_mid_chunk_is_replaced(world: RoundsBehind, chunks: int) -> None:
    brought = [0]

    async def count(stream: FramedStream, header: Header, payload: Buffer) -> None:
        brought[0] += isinstance(header, wire.Chunk)
        if brought[0] == chunks + 1:
            asyncio.get_running_loop().call_later(0.03, world.network.kill, "anna")
            brought[0] += 1000
        await stream.send(header, payload)

    world.peers["anna"].disguise(count)
    report = await world.cleo.catch_up()
    check_cleo(world, report, "lost as a donor")
    assert report.bytes_downloaded < 8 * LARGE + 5 * (1 << 20)


@simulated(RoundsBehind, RESTLESS)
async def test_always_busy_donors_are_asked_a_bounded_number(world: RoundsBehind) -> None:
    world.network.kill("bert")
    report = await world.cleo.catch_up(1e6)
    assert report.outcome == "undecided" and asyncio.get_running_loop().time() < 60.0
    assert 2000 < report.bytes_sent < 10_000


@simulated(RoundsBehind, None, elements=2 * LARGE)
async def test_dead_donors_give_undecided_in_bounded_time(world: RoundsBehind) -> None:
    loop = asyncio.get_running_loop()
    loop.call_later(0.7, world.network.kill, "anna")
    loop.call_later(0.8, world.network.kill, "bert")
    report = await world.cleo.catch_up(3600.0)
    assert report.outcome == "undecided" and sorted(report.blamed) == ["anna", "bert"]
    assert 0 < report.bytes_downloaded < 16 * LARGE and loop.time() < 60.0


@simulated(RoundsBehind, None, elements=LARGE)
async def test_donor_serves_few_at_once_and_eventually_all(world: RoundsBehind) -> None:
    world.network.kill("bert")
    joiners = [await world.add(f"j{each}") for each in range(7)]
    server, most = world.peers["anna"].sync._blobs, [0]

    async def watch() -> None:
        while True:
            most[0] = max(most[0], server.fetching)
            await asyncio.sleep(0.05)

    watcher = asyncio.create_task(watch())
    reports = await asyncio.gather(*(joiner.catch_up() for joiner in joiners))
    watcher.cancel()
    assert [report.outcome for report in reports] == ["superseded"] * 7 and most == [3]
    assert world.same("anna j0 j1 j2 j3 j4 j5 j6") and server.fetching == 0


# -- kept means -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lie",
    [flipped(wire.Chunk), late(wire.Chunk), instead(BlobIndex, lambda each: wire.Availability(False))],
)
@simulated(RoundsBehind, keep_rounds=20, every_rounds=50)
async def test_source_lying_about_a_mean_is_bypassed(world: RoundsBehind) -> None:
    report = await world.cleo.catch_up()
    check_cleo(world, report, None)
    assert (report.replayed_rounds, report.bytes_downloaded) == (11, 0)
    assert list(report.blamed) in (["anna"], []) and asyncio.get_running_loop().time() < 60.0


@simulated(RoundsBehind, late(Header), keep_rounds=20, every_rounds=50)
async def test_silent_source_of_a_mean_is_blamed_while_others_are_slow(world: RoundsBehind) -> None:
    world.peers["bert"].disguise(late(wire.Chunk, 19.0))
    check_cleo(world, await world.cleo.catch_up(), "lost as a source")


@simulated(RoundsBehind, None)
async def test_record_with_invalid_part_bounds_is_not_replayed(world: RoundsBehind) -> None:
    assert (await world.cleo.catch_up()).outcome == "superseded"
    head = world.cleo.chain.head
    link = await world.decide("anna bert")
    for bounds in ((), (0, 5), (0, 700, 300), (1, 500, 1000), (0, 333, 1 << 40)):
        bad = replace(link.record, bounds=bounds)
        with pytest.raises(Exception, match="do not make up its mean"):
            await world.cleo.sync.fetcher.parts(follow(head, certified(head, bad)), 1e6)
