"""Real peers without a shared anchor: they mix, one is killed and resumes from its checkpoint, all leave cleanly."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support.real_swarm import IndependentSwarm, RealPeer, paced, wait

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
PATIENT_SECONDS = 120.0
RUN = 'protocol = "gossip"\nspread_limit = 1.0\n' + paced(50_000, 0.1, 5)


def often(peer: RealPeer) -> None:
    peer.environment["NODE_CHECKPOINT_EVERY"] = "2"


def mixed(peer: RealPeer) -> int:
    """The number of rounds in which this peer exchanged with another."""
    return sum(each["outcome"] == "committed" for each in peer.reports())


def checkpoints(peer: RealPeer) -> list[int]:
    """The rounds of its checkpoints; it begins with one of round 0."""
    return [int(each.name.partition("-")[0]) for each in (peer.directory / "checkpoints").glob("[0-9]*")]


@pytest.mark.long
def test_three_peers_mix_although_one_is_killed(tmp_path: Path) -> None:
    with IndependentSwarm(tmp_path, RUN, often) as swarm:
        founder = swarm.found("a")
        b, c = swarm.join("b", "c", via=founder)
        wait("all have mixed twice", lambda: min(map(mixed, (founder, b, c))) >= 2, PATIENT_SECONDS)
        fetched = [each for each in b.reports() if each["outcome"] == "superseded"]
        assert fetched and fetched[0]["bytes_downloaded"] >= 8 * 50_000
        wait("it has a checkpoint of its work", lambda: max(checkpoints(c), default=0) >= 2, PATIENT_SECONDS)
        c.strike()
        c.leaves_nothing()
        before = c.reports()
        c.start("--bootstrap", founder.address)
        wait("it mixes again", lambda: mixed(c) > sum(e["outcome"] == "committed" for e in before), PATIENT_SECONDS)
        again = c.reports()[len(before)]
        assert again["outcome"] != "superseded" and again["round"] >= 2, "from its own checkpoint"
        for peer in (b, c, founder):
            assert peer.ask("finish")["ok"] and peer.ends(PATIENT_SECONDS) == 0
        assert founder.last()["spread_limit"] == 1.0
        assert all(math.isfinite(each["spread"]) for each in founder.reports() if each["outcome"] != "superseded")
