"""Rounds of a run in which each peer watches few others: real memberships, votes and downloads, on virtual time."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

from node.membership import watching
from protocols.butterfly import round as round_module
from tests.support.session_cluster import SessionCluster, SessionPeer
from tests.support.simulated import on_virtual_time
from tests.support.waiting import until

FOUNDERS, OBSERVERS = "abcd", "efghij"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SessionCluster:
    """Of four voters. Each peer may watch six. None collects garbage after its rounds: it would visit that of all."""
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setattr(round_module, "MAX_ROSTER", len(FOUNDERS))
    monkeypatch.setattr(watching, "MAX_WATCHED", 6)
    monkeypatch.setattr(watching, "VOTERS_WATCHED", 2)
    monkeypatch.setattr(watching, "OTHERS_WATCHED", 1)
    return SessionCluster(tmp_path, FOUNDERS)


@on_virtual_time
async def test_observer_takes_the_place_of_a_dead_voter(cluster: SessionCluster) -> None:
    peers = cluster.all(FOUNDERS + OBSERVERS, run_rounds=400)
    await until(lambda: all(peer.chain.head.key.round >= 3 for peer in peers), 60.0)
    assert min(len(peer.members.live()) for peer in peers) < len(peers) - 2, "each sees each"
    cluster.network.kill("b")

    def roster() -> set[str]:
        return {member.peer for member in cluster.peers["a"].chain.head.roster}

    await until(lambda: "b" not in roster() and len(roster()) == len(FOUNDERS), 60.0)
    assert roster() & {*OBSERVERS}
    newcomer = cluster.add("n", run_rounds=400)
    rest = [peer for peer in peers if peer.name != "b"]
    reached = cluster.peers["a"].chain.head.key.round + 4
    await until(lambda: all(peer.chain.head.key.round >= reached for peer in (*rest, newcomer)), 60.0)
    assert not any("b" in {member.peer for member in peer.members.live()} for peer in rest)
    for name in cluster.peers:
        if name != "b":
            cluster.network.kill(name)
    await asyncio.sleep(5.0)
    assert not cluster.network.bugs


@pytest.mark.long
@on_virtual_time
async def test_clusters_see_each_other_in_a_large_run(cluster: SessionCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that all work counts, also after a lead's death."""
    monkeypatch.setattr(watching, "MAX_WATCHED", 12)
    cluster.settings = {"clusters": True, "voters": len(FOUNDERS)}
    peers = cluster.all(FOUNDERS + "efghijklmnopqrst", run_rounds=400)
    await until(lambda: all(sees_cluster(peer, len(peers)) for peer in peers), 120.0)
    assert min(len(peer.members.live()) for peer in peers) < len(peers) - 4, "each sees each"
    cluster.network.kill("b")
    rest = [peer for peer in peers if peer.name != "b"]
    await until(lambda: all(sees_cluster(peer, len(rest)) for peer in rest), 120.0)
    for peer in rest:
        cluster.network.kill(peer.name)
    await asyncio.sleep(5.0)
    assert not cluster.network.bugs


def sees_cluster(peer: SessionPeer, contributors: int) -> bool:
    """Whether the latest mean holds so many peers' work, and this one sees all of its cluster in it."""
    last, live = peer.view.reports[-1:], {member.peer for member in peer.members.live()}
    return any(each.contributors == contributors and live.issuperset(each.contributions) for each in last)
