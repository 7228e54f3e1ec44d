"""A peer's session in a run whose peers share no anchor: rounds, joining, leaving, the end. On virtual time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from tests.support.independent_checkers import check
from tests.support.session_cluster import SPREAD_LIMIT, IndependentSessionPeer, SessionCluster, SessionPeer
from tests.support.simulated import on_virtual_time
from tests.support.waiting import now, until

alone = pytest.mark.parametrize("founders", ["a"])


@pytest.fixture
def peer_kind() -> type[SessionPeer]:
    return IndependentSessionPeer


@pytest.fixture(autouse=True)
def sound(cluster: SessionCluster) -> Iterator[None]:
    """What the peers of each test reported keeps the rules of an independent run."""
    yield
    assert check({name: peer.lines() for name, peer in cluster.peers.items()}) == []


@on_virtual_time
async def test_run_ends_and_reports_the_spread(cluster: SessionCluster) -> None:
    peers = cluster.all(wait=3)
    await until(lambda: any(peer.outcomes for peer in peers))
    status = peers[0].status_tracker.status()
    assert status.lineage and {line.live for line in status.peers} == {True}
    await cluster.end()
    for peer in peers:
        assert len(peer.outcomes) == 4 and peer.outcomes.count("committed") >= 3
        assert peer.status_tracker.status().state == "finished"
        last = peer.view.reports[-1]
        assert math.isfinite(last.spread) and last.spread_limit == SPREAD_LIMIT
        assert any(report.spread > 0 for report in peer.view.reports)


@alone
@on_virtual_time
async def test_newcomer_fetches_a_state_and_continues_training(cluster: SessionCluster) -> None:
    founder = cluster.add("a", run_rounds=12)
    await until(lambda: len(founder.outcomes) >= 3)
    newcomer = cluster.add("b", run_rounds=12)
    await cluster.end()
    first, second = newcomer.view.reports[:2]
    assert first.outcome == "superseded" and first.bytes_downloaded > 0
    assert second.parent == first.lineage and second.round >= 2
    assert newcomer.outcomes.count("committed") >= 3


@on_virtual_time
async def test_leaver_hands_in_and_exits(cluster: SessionCluster) -> None:
    peers = cluster.all(run_rounds=8)
    await until(lambda: len(peers[0].outcomes) >= 2)
    asked = now()
    peers[2].session.leave()
    await cluster.end("c")
    assert now() - asked < 5.0
    await cluster.end("ab")
    assert all(peer.view.reports[-1].round == 7 for peer in peers[:2])


@alone
@on_virtual_time
async def test_own_rounds_count_without_partners(cluster: SessionCluster) -> None:
    alone = cluster.add("a", rounds=3, run_rounds=50)
    await cluster.end()
    assert alone.outcomes == ["skipped"] * 3
