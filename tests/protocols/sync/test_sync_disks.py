"""Snapshots on disks that fail, which costs snapshots and no rounds; and that no disk is waited for on the loop."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest

import tests.support.sync_cluster
from protocols.base import Buffer
from protocols.sync.snapshot import MemoryBuffer, Snapshots
from tests.sim.host import SimCompute
from tests.support.simulated import simulated
from tests.support.sync_cluster import SyncCluster, SyncPeer

T = TypeVar("T")


class Disk(MemoryBuffer):
    """A buffer that only code inside `Compute` may use, and that fails on demand.

    Attributes:
        at_work: whether heavy work is under way.
    """

    at_work = False

    def __init__(self, lineage: bytes, round_number: int, size: int, failing: bool = False) -> None:
        super().__init__(size)
        self.failing = failing

    def read(self, offset: int, into: memoryview) -> None:
        self._use()
        super().read(offset, into)

    def write(self, offset: int, data: Buffer) -> None:
        self._use()
        super().write(offset, data)

    def _use(self) -> None:
        assert Disk.at_work, "the event loop waits for a disk"
        if self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture(autouse=True)
def disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All snapshots are on such disks."""
    run = SimCompute.run

    async def watched(self: SimCompute, work: Callable[[], T], cost_bytes: int) -> T:
        def at_work() -> T:
            Disk.at_work = True
            try:
                return work()
            finally:
                Disk.at_work = False

        return await run(self, at_work, cost_bytes)

    monkeypatch.setattr(SimCompute, "run", watched)
    monkeypatch.setattr(tests.support.sync_cluster, "Snapshots", partial(Snapshots, make_buffer=Disk))


def fails(peer: SyncPeer) -> None:
    """What it holds, and what it will."""
    peer.snapshots._make_buffer = partial(Disk, failing=True)
    for snapshot in peer.snapshots.held():
        snapshot.buffer.failing = True  # type: ignore[attr-defined]


def full(lineage: bytes, round_number: int, size: int) -> Disk:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def swarm() -> SyncCluster:
    return SyncCluster(("anna", "bert"), every_rounds=2, keep_rounds=2)


@simulated(swarm)
async def test_unwritable_snapshot_is_dropped_but_round_stands(
    world: SyncCluster, caplog: pytest.LogCaptureFixture
) -> None:
    fails(world.peers["anna"])
    await world.rounds("anna bert", 2)
    assert world.same("anna bert") and world.peers["anna"].round == 2
    assert [each.round for each in world.peers["anna"].snapshots.held()] == [0]
    assert [each.round for each in world.peers["bert"].snapshots.held()] == [2, 0]
    assert [each.message for each in caplog.records] == ["no snapshot is kept before round 3: Input/output error"]


@simulated(swarm)
async def test_donor_with_failed_disk_withdraws_the_snapshot(
    world: SyncCluster, caplog: pytest.LogCaptureFixture
) -> None:
    await world.rounds("anna bert", 5)
    fails(world.peers["anna"])
    world.network.nodes["bert"].bytes_per_second = 1e5  # so anna is asked first
    cleo = await world.add("cleo")
    report = await cleo.catch_up()
    assert report.outcome == "superseded" and world.same("anna cleo")
    assert [each.round for each in world.peers["anna"].snapshots.held()] == [2]
    assert set(report.blamed) == {"anna"} and report.bytes_downloaded == 8000
    assert [each.message for each in caplog.records] == ["the snapshot before round 5 is lost: Input/output error"]


@pytest.mark.parametrize("when", ["made", "put", "taken"])
@simulated(swarm)
async def test_joiner_unable_to_store_download_stays_unchanged(world: SyncCluster, when: str) -> None:
    await world.rounds("anna bert", 5)
    cleo = await world.add("cleo")
    if when == "put":
        fails(cleo)
    elif when == "made":
        cleo.snapshots._make_buffer = full
    else:
        download = cleo.sync.fetcher.download

        async def broken(*args: Any) -> Any:
            snapshot = await download(*args)
            snapshot.buffer.failing = True  # type: ignore[attr-defined]
            return snapshot

        cleo.sync.fetcher.download = broken  # type: ignore[assignment, method-assign]
    report = await cleo.catch_up(60.0)
    assert report.outcome == "undecided" and report.lineage == report.parent and report.blamed == {}
    cleo.snapshots._make_buffer = Disk
    if when != "taken":
        assert (await cleo.catch_up()).outcome == "superseded" and world.same("anna cleo")
