"""Real peers of which three vote: the work of all counts, through clusters, and goes on counting across kills."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from tests.support.checkers import Report
from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(400)]

RUN = "voters = 3\n" + paced(elements=20_000, step_seconds=0.05, inner_steps=40)
BACK_SECONDS = 60.0
"""Until a peer that has lost its lead has another, and its work counts: a few rounds of two seconds."""


def one_mean_of_all(peers: list[RealPeer], since: float) -> Report | None:
    """A round that began after that wall time, and that has the work of each of these peers and of no other."""
    decided: dict[str, list[Report]] = {}
    for peer in peers:
        for each in peer.since(since):
            if each["outcome"] == "committed" and peer.id in each["peers"]:
                decided.setdefault(each["lineage"], []).append(each)
    return next((them[0] for them in decided.values() if len(them) == len(peers) == them[0]["contributors"]), None)


def voters(peers: list[RealPeer]) -> list[RealPeer]:
    return [peer for peer in peers if peers[0].sees(peer).get("member")]


@pytest.mark.parametrize("recipe", ["", 'overlap = "keep"\nfragments = 2\n'], ids=["waiting", "overlapping"])
def test_work_behind_voters_counts_across_kills(tmp_path: Path, recipe: str) -> None:
    with RealSwarm(tmp_path, RUN + recipe) as swarm:
        founder = swarm.found("a")
        peers = [founder, *swarm.join("b", "c", "d", "e", "f", "g", via=founder)]
        wait("all seven are in one mean", lambda: one_mean_of_all(peers, 0.0), 120, 0.25)
        assert len(voters(peers)) == 2, "beside the founder"
        behind = [peer for peer in peers[1:] if peer not in voters(peers)]
        assert all("without a vote: contributes through" in str(peer.status()["reason"]) for peer in behind)

        for gone, what in ((behind[0], "an associate"), (voters(peers)[0], "a lead")):
            killed = gone.strike()
            gone.leaves_nothing()
            rest = [peer for peer in peers if peer is not gone]
            wait(f"all but {what} are in one mean", partial(one_mean_of_all, rest, killed), BACK_SECONDS, 0.25)
            gone.start("--bootstrap", founder.address)
            now = time.time()
            wait(f"{what} is in the mean again", partial(one_mean_of_all, peers, now), BACK_SECONDS, 0.25)
        trained_on = [each["seconds_overlap"] > 0 for each in behind[1].since(0.0)]
        assert any(trained_on) == bool(recipe), "an associate trains on while a round averages"
