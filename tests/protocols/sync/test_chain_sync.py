"""Catching up over the network: replayed means, snapshots from several donors, healing; and what liars can do to it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from node.outer.state import OuterSGD
from protocols import wire
from protocols.base import ALL as EVERYTHING
from protocols.base import Member, RoundKey, Vector
from protocols.consensus.record import Kind
from protocols.sync.requests import (
    MAX_LOCATOR,
    MAX_SNAPSHOTS,
    CertificatesRequest,
    HeadAnnouncement,
    SnapshotRef,
)
from tests.support.simulated import simulated
from tests.support.sync_cluster import OUTER, TOKENS, SyncCluster
from tests.support.waiting import now

ANNA, BERT, CLEO, DORA, EMIL = (Member(name) for name in ("anna", "bert", "cleo", "dora", "emil"))
ALL = "anna bert cleo dora emil"
INT8 = 1000 + 4 * 8  # what a mean of 1000 elements takes


def swarm(names: str = "anna bert cleo", **options: Any) -> SyncCluster:
    return SyncCluster(names.split(), **options)


@simulated(swarm)
async def test_each_look_for_other_heads_asks_a_few_peers_and_all_in_turn(world: SyncCluster) -> None:
    peers, many = world.peers["anna"].sync._context.peers, [f"peer{number}" for number in range(30)]
    looks = [peers.some(many) for _ in range(30)]
    assert all(len({*look}) == 8 for look in looks) and {peer for look in looks for peer in look} == {*many}
    assert peers.some(many[:5]) == many[:5], "a small run is asked whole"


# -- behind -----------------------------------------------------------------------------------------------------------


@simulated(swarm, every_rounds=2)
async def test_peer_few_rounds_behind_replays_means(world: SyncCluster) -> None:
    await world.rounds("anna bert cleo", 3)
    await world.rounds("anna bert", 2)
    await world.decide("anna bert", Kind.SKIP)
    await world.rounds("anna bert", 2)
    cleo = world.peers["cleo"]
    parent = cleo.chain.head.key.lineage.hex()
    report = await cleo.catch_up()
    assert world.same("anna bert cleo") and cleo.round == 8
    assert (report.outcome, report.round, report.parent) == ("superseded", 3, parent)
    assert report.lineage == cleo.chain.head.key.lineage.hex()
    assert (report.replayed_rounds, report.bytes_downloaded) == (4, 0)
    assert (report.lost_rounds, report.lost_tokens, report.blamed) == (0, 0, {})
    assert 4 * INT8 < report.bytes_received < 4 * INT8 + 8000
    assert torch.equal(cleo.trainer.local_training.learner.vector, cleo.outer_loop.anchor), "and trains on from there"
    assert [each.round for each in cleo.snapshots.held()] == [8, 2]
    await world.rounds("anna bert cleo", 2)
    assert world.same("anna bert cleo")


@pytest.mark.parametrize("store_rounds", [0, 16])
@simulated(lambda store_rounds: swarm(every_rounds=20, store_rounds=store_rounds, keep_rounds=2 if store_rounds else 8))
async def test_peer_replays_rounds_from_before_and_after_clusters(world: SyncCluster) -> None:
    """From memory and from disk, where the masks of members are kept beside the chunks."""
    await world.decide("anna bert cleo")
    await world.rounds("anna bert", 2)
    world.cluster_size = 4
    await world.rounds("anna bert", 3)
    report = await world.peers["cleo"].catch_up()
    assert world.same("anna bert cleo") and (report.replayed_rounds, report.blamed) == (5, {})


@simulated(swarm, keep_rounds=4)
async def test_peer_far_behind_takes_snapshot_and_later_means(world: SyncCluster) -> None:
    await world.decide("anna bert cleo")
    await world.rounds("anna bert", 10)
    report = await world.peers["cleo"].catch_up()
    assert world.same("anna bert cleo")
    assert (report.outcome, report.replayed_rounds, report.bytes_downloaded) == ("superseded", 3, 8000)
    assert report.blamed == {} and report.lost_rounds == 0


@simulated(swarm, every_rounds=5, keep_rounds=20)
async def test_cheaper_of_snapshot_and_replay_is_chosen(world: SyncCluster) -> None:
    """Eight means of int8 are dearer than a snapshot and the two since; two are not."""
    await world.rounds("anna bert", 12)
    report = await world.peers["cleo"].catch_up()
    assert (report.replayed_rounds, report.bytes_downloaded) == (2, 8000)
    await world.rounds("anna bert", 5)
    report = await world.peers["cleo"].catch_up()
    assert (report.replayed_rounds, report.bytes_downloaded) == (5, 0)
    assert world.same("anna bert cleo")


@simulated(swarm, every_rounds=4, keep_rounds=2)
async def test_snapshot_that_led_nowhere_comes_last(world: SyncCluster) -> None:
    """The old snapshot, which is already here, would cost five small means; no peer has the first of them any more."""
    await world.rounds("anna bert", 7)
    cleo = world.peers["cleo"]
    assert (await cleo.catch_up()).outcome == "undecided", "no peer keeps the mean of round 4"
    await world.rounds("anna bert", 2)
    report = await cleo.catch_up()
    assert world.same("anna bert cleo") and (report.replayed_rounds, report.bytes_downloaded) == (1, 8000)


# -- newcomers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [1000, 600_000])
@simulated(lambda elements: swarm("anna", elements=elements))
async def test_newcomer_verifies_the_chain_from_the_founder(world: SyncCluster, elements: int) -> None:
    await world.rounds("anna", 2)
    bert = await world.add("bert")
    assert (await bert.catch_up()).outcome == "superseded"
    await world.decide("anna bert", roster=(ANNA, BERT))
    await world.decide("anna bert")
    await world.decide("anna", Kind.FORK, voters=(ANNA,))
    await world.rounds("anna", 3)
    cleo = await world.add("cleo")
    report = await cleo.catch_up()
    assert world.same("anna cleo") and cleo.round == 8
    assert report.bytes_downloaded == 8 * elements and report.lost_rounds == 0
    await world.decide("anna cleo", roster=(ANNA, CLEO))
    await world.decide("anna cleo")
    assert world.same("anna cleo")


@simulated(swarm, "anna")
async def test_newcomer_before_first_round_adopts_founders_state_root(world: SyncCluster) -> None:
    world.root = world.peers["anna"].chain.head.state_root
    bert = await world.add("bert")
    assert bert.chain.head.state_root != world.root
    report = await bert.catch_up()
    assert world.same("anna bert") and bert.round == 0 and bert.chain.head.state_root == world.root
    assert (report.outcome, report.bytes_downloaded) == ("superseded", 8000)


# -- branches ---------------------------------------------------------------------------------------------------------


@simulated(swarm, ALL)
async def test_losing_branch_switches_and_reports_its_loss(world: SyncCluster) -> None:
    await world.rounds(ALL, 3)
    await world.decide("anna bert cleo", roster=(ANNA, BERT, CLEO))
    await world.decide("dora emil", Kind.FORK, parts=True)
    await world.rounds("anna bert cleo", 2)
    await world.rounds("dora emil", 3)
    await world.decide("dora emil", Kind.SKIP)
    for peer in world.of("anna bert cleo"):
        assert (await peer.catch_up()).outcome == "undecided", "the winner stays"
    report = await world.peers["dora"].catch_up()
    assert world.same("anna bert cleo dora")
    assert (report.outcome, report.round) == ("superseded", 8)
    assert (report.lost_rounds, report.lost_tokens) == (5, 4 * TOKENS)
    assert (report.replayed_rounds, report.bytes_downloaded, report.blamed) == (2, 8000, {})
    assert all(each.lineage in world.peers["dora"].chain for each in world.peers["dora"].snapshots.held())
    assert (await world.peers["emil"].catch_up()).outcome == "superseded" and world.same(ALL)
    await world.decide("anna bert cleo dora", roster=(ANNA, BERT, CLEO, DORA))
    assert (await world.peers["emil"].catch_up()).lost_rounds == 0, "now it was merely behind"


@simulated(swarm, ALL)
async def test_recently_forked_peer_returns_to_own_snapshot(world: SyncCluster) -> None:
    await world.rounds(ALL, 5)
    await world.decide("anna bert cleo", roster=(ANNA, BERT, CLEO))
    await world.decide("dora emil", Kind.FORK, parts=True)
    report = await world.peers["dora"].catch_up()
    assert world.same("anna bert cleo dora") and report.lost_rounds == 1
    assert (report.replayed_rounds, report.bytes_downloaded) == (2, 0), "its snapshot before round 4"


@simulated(swarm, every_rounds=2, keep_rounds=4)
async def test_diverged_peer_rejects_decision_and_resyncs(world: SyncCluster) -> None:
    await world.rounds("anna bert cleo", 5)
    cleo = world.peers["cleo"]
    cleo.outer_loop.anchor[3] += 1e-6
    await cleo.outer_loop.settle()
    with pytest.raises(AssertionError, match="its state is not the one that the others hold"):
        await world.decide("anna bert cleo")
    assert cleo.round == 5 and world.same("anna bert")
    report = await cleo.catch_up()
    assert world.same("anna bert cleo") and report.outcome == "superseded"
    assert (report.bytes_downloaded, report.replayed_rounds) == (0, 2), "its own snapshot was sound"


@simulated(swarm, every_rounds=3)
async def test_means_leading_to_wrong_state_are_discarded(world: SyncCluster) -> None:
    """A machine that computes other bits notices at the next record, and takes a snapshot."""
    await world.rounds("anna bert cleo", 2)
    await world.rounds("anna bert", 5)
    cleo = world.peers["cleo"]
    left = [1]

    class Wrong(OuterSGD):
        def step(self, anchor: Vector, velocity: Vector, delta: Vector, part: slice = EVERYTHING) -> bool:
            finite = super().step(anchor, velocity, delta, part)
            anchor[0] += 1e-6 * bool(left and left.pop())
            return finite

        def at(self, trained: int) -> OuterSGD:
            found = OUTER.at(trained)
            return Wrong(found.learning_rate, found.momentum)

    cleo.outer_loop.state.outer = Wrong(0.7, 0.9)
    report = await cleo.catch_up()
    assert world.same("anna bert cleo") and (report.replayed_rounds, report.bytes_downloaded) == (1, 8000)


@simulated(swarm)
async def test_a_third_of_the_time_is_for_the_proof(world: SyncCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless proof leaves the rest for the state."""
    await asyncio.sleep(1000)
    limits, cleo = list[float](), world.peers["cleo"]

    async def unproven(until: float) -> None:
        limits.append(until - now())

    monkeypatch.setattr(cleo.sync, "better", unproven)
    await cleo.catch_up(600)
    assert limits == [pytest.approx(200)]


# -- healing ----------------------------------------------------------------------------------------------------------


@simulated(swarm, ALL)
async def test_evicted_peers_are_dialled_and_learn_better_branch(world: SyncCluster) -> None:
    await world.rounds(ALL, 2)
    await world.decide("anna bert cleo", roster=(ANNA, BERT, CLEO))
    fork = await world.decide("dora emil", Kind.FORK)
    found: dict[str, list[float]] = {name: [] for name in ALL.split()}
    began = asyncio.get_running_loop().time()
    for name, peer in world.peers.items():
        peer.on_better = lambda branch, name=name: found[name].append(asyncio.get_running_loop().time())  # type: ignore[misc]
    healing = [asyncio.create_task(peer.sync.run()) for peer in world.of("anna dora emil")]
    await asyncio.sleep(1.0)
    assert [name for name, times in found.items() if times] == ["dora", "emil"], "greeted at once"
    for name in ("dora", "emil"):
        assert world.peers[name].chain.head.key.lineage == fork.lineage, "it only tells"
        await world.peers[name].catch_up()
    await asyncio.sleep(60.0)
    assert world.same(ALL) and max(map(max, filter(None, found.values()))) < began + 30
    for task in healing:
        assert not task.done()
        task.cancel()


@simulated(swarm, "anna bert cleo")
async def test_idle_peer_is_woken_by_a_greeting(world: SyncCluster) -> None:
    await world.rounds("anna bert cleo", 2)
    world.hints.clear()
    await world.decide("anna bert", roster=(ANNA, BERT))
    cleo, found = world.peers["cleo"], []
    cleo.on_better = lambda branch: found.append(asyncio.get_running_loop().time())
    sleeper = asyncio.create_task(cleo.sync.run())
    await asyncio.sleep(3.0)
    assert not found, "all that it knows are in its roster"
    caller = asyncio.create_task(world.peers["anna"].sync.run())
    await asyncio.sleep(2.0)
    assert len(found) == 1 and found[0] < 5.0
    sleeper.cancel(), caller.cancel()


@simulated(swarm, "anna bert cleo")
async def test_peer_about_to_decide_round_stays_in_it(world: SyncCluster) -> None:
    await world.decide("anna bert cleo", roster=(ANNA, BERT))
    link = await world.decide("bert cleo", voters=(ANNA, BERT))
    anna, found = world.peers["anna"], []
    anna.on_better = lambda branch: found.append(branch)
    healing = asyncio.create_task(anna.sync.run())
    await asyncio.sleep(0.5)
    anna.chain.switch(link.record.parent, [link])
    await asyncio.sleep(8.0)
    assert not found
    await world.rounds("bert cleo", 1, voters=(ANNA, BERT))
    await asyncio.sleep(12.0)
    assert len(found) == 1
    healing.cancel()


# -- messages ---------------------------------------------------------------------------------------------------------


def test_largest_messages_fit() -> None:
    key = RoundKey(b"r" * 32, "s" * 64, b"l" * 32, 1 << 40, 1 << 16)
    kept = (SnapshotRef(b"l" * 32, 1 << 40),) * MAX_SNAPSHOTS
    for header in (
        HeadAnnouncement(key, Member("p" * 64, 1 << 40), kept),
        CertificatesRequest((b"l" * 32,) * MAX_LOCATOR),
    ):
        assert wire.decode(wire.encode(header)) == header
