"""Catching up in real rounds: peers that vote, miss some, join, part and meet again."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.replicated_swarm import ELEMENTS, ROUND_SECONDS, ReplicatedSwarm
from tests.support.simulated import simulated


@simulated(ReplicatedSwarm, "anna bert cleo dora", chunk_elements=1000, fork_peers=0)
async def test_peer_missing_few_rounds_replays_them(world: ReplicatedSwarm) -> None:
    await asyncio.sleep(3 * ROUND_SECONDS)
    world.cut("dora", "anna bert cleo")
    await asyncio.sleep(5 * ROUND_SECONDS)
    world.cut("dora", "anna bert cleo", heal=True)
    await asyncio.sleep(9 * ROUND_SECONDS)
    assert world.together()
    reports = world.peers["dora"].caught_up()
    assert sum(each.bytes_downloaded for each in reports) == 0
    assert sum(each.lost_rounds for each in reports) == 0
    assert not any(world.peers[name].caught_up() for name in ("anna", "bert", "cleo"))


@simulated(ReplicatedSwarm, "anna bert cleo dora", chunk_elements=1000)
async def test_peer_that_forked_alone_returns(world: ReplicatedSwarm) -> None:
    await asyncio.sleep(3 * ROUND_SECONDS)
    world.cut("dora", "anna bert cleo")
    await asyncio.sleep(24 * ROUND_SECONDS)
    dora = world.peers["dora"]
    assert [each.outcome for each in dora.history[-2:]] == ["alone", "alone"]
    alone = sum(each.outcome in ("alone", "fork") for each in dora.history)
    world.cut("dora", "anna bert cleo", heal=True)
    await asyncio.sleep(9 * ROUND_SECONDS)
    assert world.together()
    (report,) = dora.caught_up()
    assert alone <= report.lost_rounds <= alone + 10 and report.lost_tokens > 0 and report.blamed == {}


@pytest.mark.long
@simulated(ReplicatedSwarm, "anna bert cleo dora emil", chunk_elements=1000)
async def test_two_halves_of_a_swarm_merge(world: ReplicatedSwarm) -> None:
    await asyncio.sleep(3 * ROUND_SECONDS)
    world.cut("dora emil", "anna bert cleo")
    await asyncio.sleep(24 * ROUND_SECONDS)
    assert [len(peer.chain.head.roster) for peer in world.peers.values()] == [3, 3, 3, 2, 2]
    world.cut("dora emil", "anna bert cleo", heal=True)
    await asyncio.sleep(12 * ROUND_SECONDS)
    assert world.together()
    assert [len(peer.caught_up()) > 0 for peer in world.peers.values()] == [False] * 3 + [True] * 2


@simulated(ReplicatedSwarm, "anna", chunk_elements=1000)
async def test_newcomers_join_a_running_swarm(world: ReplicatedSwarm) -> None:
    await asyncio.sleep(10 * ROUND_SECONDS)
    world.begin("bert")
    await asyncio.sleep(5 * ROUND_SECONDS)
    world.begin("cleo"), world.begin("dora")
    await asyncio.sleep(10 * ROUND_SECONDS)
    assert world.together()
    for name in ("bert", "cleo", "dora"):
        first = world.peers[name].history[0]
        assert (first.outcome, first.bytes_downloaded, first.lost_rounds) == ("superseded", 8 * ELEMENTS, 0)
    assert all(each.outcome in ("alone", "committed", "skipped") for each in world.peers["anna"].history)
