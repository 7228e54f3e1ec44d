"""Real peers that rest for a while, by the commands that a user gives; `test_peers_real` has one that is away."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.support.checkers import Report
from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait, whole_rounds

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(180)]

ROUND_SECONDS = 20.0
STEPS, STEP_SECONDS, STEP_TOKENS = 10, 0.2, 1024


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSwarm]:
    with RealSwarm(tmp_path_factory.mktemp("swarm"), paced(step_seconds=STEP_SECONDS, inner_steps=STEPS)) as swarm:
        yield swarm


def counts(peer: RealPeer, report: Report) -> bool:
    """Whether a round's mean has work of a peer."""
    return bool(report["contributions"].get(peer.id, ("", 0, 0))[1])


def test_rest_of_one_costs_the_others_nothing(swarm: RealSwarm) -> None:
    four = swarm.four(ROUND_SECONDS)
    one, *others = four
    worker = one.child("worker")
    assert worker and "paused since" in one.command("pause", "--for", "5m")
    assert json.loads(one.command("status", "--json"))["state"] == "paused"
    for (report,) in whole_rounds(others, 1, ROUND_SECONDS):
        assert report["outcome"] == "committed" and not counts(one, report)
        assert report["tokens"] >= STEPS * STEP_TOKENS, "a round was called early"
    wait("it has the others' mean", lambda: one.last()["round"] >= report["round"], ROUND_SECONDS)
    assert one.last()["outcome"] == "committed", "a resting member votes, and fetches the mean"
    assert one.child("worker") == worker, "a resting worker was replaced"
    assert "works again" in one.command("resume")
    last, back = others[-1], time.time()  # rounds go by while the command starts
    counted = wait("it counts again", lambda: [r for r in last.since(back) if counts(one, r)], 3 * ROUND_SECONDS)
    assert counted[0]["round"] <= last.since(back)[0]["round"] + 1
    swarm.check()


def test_one_trains_on_while_three_pause(swarm: RealSwarm) -> None:
    """A round that counted all four would not be called for an hour."""
    four = swarm.four(ROUND_SECONDS)
    *three, last = four
    for peer in three:
        peer.command("pause", "--for", "5m")
    (reports,) = whole_rounds([last], 2, ROUND_SECONDS)
    assert {each["outcome"] for each in reports} <= {"committed", "alone"}
    assert not any(counts(peer, report) for peer in three for report in reports)
    assert all(each["tokens"] >= STEPS * STEP_TOKENS for each in reports), "a round was called early"
    back = time.time()
    for peer in three:
        peer.command("resume")
    wait("all four are in one mean again", lambda: swarm.all_in_one_mean(four, back), 4 * ROUND_SECONDS)
    swarm.check()
