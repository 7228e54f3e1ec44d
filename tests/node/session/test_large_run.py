"""Rounds of a run in which each peer watches few others: real memberships, votes and downloads, on virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from node.membership import watching
from protocols.butterfly import round as round_module
from tests.support.session_cluster import SessionCluster
from tests.support.simulated import on_virtual_time
from tests.support.waiting import until

FOUNDERS, OBSERVERS = "abcd", "efghij"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SessionCluster:
    """Of four voters. Each peer may watch six."""
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
