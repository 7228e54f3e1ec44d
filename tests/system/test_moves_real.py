"""Real peers of a run with stages that are moved from one to another, or move by themselves."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support import stage_checkers
from tests.support.checkers import DECIDED
from tests.support.history import one_mean
from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait
from tests.system.test_stages_real import goes_on, kill

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(300)]

RUN = "stages = 2\n" + paced(elements=20_000, inner_steps=3) + "batches = 2\n"
MOVE_SECONDS = 60.0


class MovingSwarm(RealSwarm):
    """Of the peer c, which is moved, each incarnation is in one stage."""

    invariants = staticmethod(partial(stage_checkers.check, movers="c"))


def counts(peer: RealPeer, stage: int) -> bool:
    """Whether the latest decided rounds of a stage have this peer's work."""
    life = peer.status().get("incarnation")
    last = [each for each in peer.reports() if each["outcome"] == "committed" and each["incarnation"] == life][-2:]
    return len(last) == 2 and all(each["stage"] == stage and peer.id in each["peers"] for each in last)


@pytest.mark.timeout(600)
def test_moved_peer_contributes_in_its_new_stage(tmp_path: Path) -> None:
    """And in its first one again, from the checkpoint that it has left there. The process stays.

    Killed in a move, it is in one of the two stages after a restart.
    """
    with MovingSwarm(tmp_path, RUN) as swarm:
        founder = swarm.found("a", "--stage", "0")
        swarm.join("b", via=founder)
        moved = swarm.peer("c").start("--bootstrap", founder.address, "--stage", "0")
        wait("c counts in stage 0", lambda: moved.meet() and counts(moved, 0), 90)
        process, worker = moved.pid, moved.child("worker")
        assert "stage 1 already" in swarm["b"].command("move", "1", code=2)
        assert "stage 1 would be empty" in swarm["b"].command("move", "0", code=2)
        assert "no stage 7" in moved.command("move", "7", code=2)
        for target in (1, 0):
            assert f"moving to stage {target}" in moved.command("move", str(target))
            wait(f"c counts in stage {target}", lambda target=target: counts(moved, target), MOVE_SECONDS)  # type: ignore[misc]
            assert moved.status()["stage"] == target and f"to stage {target}" in moved.status()["move"]
            goes_on(founder, f"with c in stage {target}")
        assert moved.pid == process and moved.child("worker") != worker
        assert moved.status()["incarnation"] == 3
        for moment in ("switched", "asked", "leaving"):  # the first from stage 0
            kill_in_move(moved, moment, founder)
            goes_on(founder, "with c")


def kill_in_move(moved: RealPeer, moment: str, founder: RealPeer) -> None:
    target = 1 - moved.status()["stage"]
    moved.command("move", str(target))
    if moment == "leaving":
        wait("it leaves", lambda: "finishing the round" in str(moved.status().get("reason")), MOVE_SECONDS, 0.02)
    if moment == "switched":
        switched = f"{target} pinned\n"
        wait("it switches", lambda: (moved.directory / "stage").read_text() == switched, MOVE_SECONDS, 0.02)
    kill(moved)
    moved.start("--bootstrap", founder.address, "--stage", "0")  # as a service that was set up so does
    wait(f"c counts again, killed when {moment}", lambda: counts(moved, 0) or counts(moved, 1), 90)
    assert moment != "switched" or counts(moved, target)


CROWDED = "stages = 3\nrebalance = true\n" + paced(elements=20_000, step_seconds=1.6, inner_steps=12) + "batches = 8\n"
"""Two replicas in each stage take twice as many microbatches as one: a round gets shorter by the moves."""
BALANCED_ROUNDS = 10
CROWDED_SECONDS = 300.0  # the joiners are in the roster after one round, and in the mean after two: of a minute each


class RebalancingSwarm(RealSwarm):
    invariants = staticmethod(partial(stage_checkers.check, movers="abcdef"))

    def crowd(self) -> list[list[RealPeer]]:
        """Start four, one and one peers, of which any may move from then on; returns those of each stage."""
        founder = self.found("a")
        for name in "bc":  # the first of stages 1 and 2
            self.join(name, via=founder)
        for name in "def":  # `--stage` would pin them. A peer that starts again keeps its stage
            placed = self.peer(name).start("--bootstrap", founder.address, "--stage", "0")
            wait(f"{name} is in stage 0", lambda placed=placed: (placed.directory / "stage").exists(), 60)  # type: ignore[misc]
            kill(placed)
        crowded = self.by_stage()
        assert [len(each) for each in crowded] == [4, 1, 1]
        self.join("d", "e", "f", via=founder)
        wait("all train that are in stage 0", lambda: one_mean(self.by_stage()[0]), CROWDED_SECONDS)
        return crowded

    def by_stage(self) -> list[list[RealPeer]]:
        stages = {peer: int((peer.directory / "stage").read_text()) for peer in self.peers.values()}
        return [[peer for peer, stage in stages.items() if stage == each] for each in range(3)]

    def is_balanced(self) -> bool:
        """Whether two peers of each stage are in one mean there."""
        stages = self.by_stage()
        return [len(each) for each in stages] == [2, 2, 2] and all(map(one_mean, stages))


@pytest.mark.timeout(900)
def test_crowded_stage_spreads_by_itself_without_lost_rounds(tmp_path: Path) -> None:
    """The rule looks once a minute, and a round is shorter than that here."""
    with RebalancingSwarm(tmp_path, CROWDED) as swarm:
        before = swarm.crowd()
        begun = max(peer.last()["round"] for peer in swarm.by_stage()[0])
        wait("two work in each stage", swarm.is_balanced, 480, 0.25)
        drivers = swarm.by_stage()[0]
        ended = min(peer.last()["round"] for peer in drivers)
        assert ended - begun <= BALANCED_ROUNDS
        after = swarm.by_stage()
        assert set(before[1]) <= set(after[1]) and set(before[2]) <= set(after[2]), "two moves"
        assert all("pinned" not in (peer.directory / "stage").read_text() for peer in swarm.peers.values())
        goes_on(drivers[0], "in balance")
    for driver in drivers:
        decided = [each for each in driver.reports() if begun < each["round"] and each["outcome"] in DECIDED]
        assert {each["outcome"] for each in decided} == {"committed"}
        assert [each["round"] for each in decided] == list(range(begun + 1, decided[-1]["round"] + 1)), "none is lost"
        assert all(later["parent"] == each["lineage"] for each, later in pairwise(decided))
