"""A peer's stay in a run whose peers share no anchor: rounds, joining, leaving, the end."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.sim import loop as simloop
from tests.support.independent_checkers import check
from tests.support.session_cluster import SPREAD_LIMIT, IndependentSessionPeer, SessionCluster, now, until


def play(path: Path, body: Callable[[SessionCluster], Awaitable[None]], founders: str = "abc") -> SessionCluster:
    town = SessionCluster(path, founders, IndependentSessionPeer)
    simloop.run(body(town))
    assert town.network.bugs == []
    assert check({name: peer.lines() for name, peer in town.peers.items()}) == []
    return town


def test_run_ends_and_reports_the_spread(tmp_path: Path) -> None:
    async def body(town: SessionCluster) -> None:
        peers = town.all(wait=3)
        await until(lambda: any(peer.outcomes for peer in peers))
        status = peers[0].status_tracker.status()
        assert status.lineage and {line.live for line in status.peers} == {True}
        await town.end()

    town = play(tmp_path, body)
    for peer in town.peers.values():
        assert len(peer.outcomes) == 4 and peer.outcomes.count("committed") >= 3
        assert peer.status_tracker.status().state == "finished"
        last = peer.view.reports[-1]
        assert math.isfinite(last.spread) and last.spread_limit == SPREAD_LIMIT
        assert any(report.spread > 0 for report in peer.view.reports)


def test_newcomer_fetches_a_state_and_continues_training(tmp_path: Path) -> None:
    async def body(town: SessionCluster) -> None:
        founder = town.add("a", run_rounds=12)
        await until(lambda: len(founder.outcomes) >= 3)
        newcomer = town.add("b", run_rounds=12)
        await town.end()
        first, second = newcomer.view.reports[:2]
        assert first.outcome == "superseded" and first.bytes_downloaded > 0
        assert second.parent == first.lineage and second.round >= 2
        assert newcomer.outcomes.count("committed") >= 3

    play(tmp_path, body, founders="a")


def test_leaver_hands_in_and_exits(tmp_path: Path) -> None:
    async def body(town: SessionCluster) -> None:
        peers = town.all(run_rounds=8)
        await until(lambda: len(peers[0].outcomes) >= 2)
        asked = now()
        peers[2].session.leave()
        await town.end("c")
        assert now() - asked < 5.0
        await town.end("ab")
        assert all(peer.view.reports[-1].round == 7 for peer in peers[:2])

    play(tmp_path, body)


def test_own_rounds_count_without_partners(tmp_path: Path) -> None:
    async def body(town: SessionCluster) -> None:
        alone = town.add("a", rounds=3, run_rounds=50)
        await town.end()
        assert alone.outcomes == ["skipped"] * 3

    play(tmp_path, body, founders="a")
