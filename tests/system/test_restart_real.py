"""A single real peer that is killed and restarted: it ends with the same bits as one that was not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.real_swarm import RealPeer, RealSwarm, wait

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
ALONE = """
task = "gpt"
[recipe]
inner_steps = 8
rounds = 5
warmup_steps = 4
[gpt]
preset = "w64"
context = 64
rows = 2
"""


def often(peer: RealPeer) -> None:
    peer.environment["NODE_CHECKPOINT_EVERY"] = "2"


def curve(peer: RealPeer) -> list[tuple[float, float, str]]:
    """Loss, held-out loss and hash of the parameters, of each round that moved them."""
    moved = [each for each in peer.reports() if each["outcome"] == "alone"]
    return [(each["loss"], each["held_out_loss"], each["params_hash"]) for each in moved]


def checkpoints(peer: RealPeer) -> list[int]:
    return sorted(int(path.name.partition("-")[0]) for path in (peer.directory / "checkpoints").glob("[0-9]*"))


@pytest.mark.long
def test_killed_single_peer_resumes_the_same_training(tmp_path: Path) -> None:
    with RealSwarm(tmp_path, ALONE, often) as swarm:
        whole = swarm.found("whole")
        assert whole.ends(100) == 0 and len(curve(whole)) == 5 and checkpoints(whole) == [2, 4, 5]
    with RealSwarm(tmp_path, ALONE, often) as swarm:
        torn = swarm.peer("torn")
        torn.directory.mkdir()
        shutil.copy2(whole.directory / "identity.key", torn.directory)  # the same identity draws the same data
        again = ("--run", str(tmp_path / "run.toml"))
        torn.start(*again)
        wait("three rounds are over", lambda: len(curve(torn)) >= 3, 60)
        torn.strike()
        torn.leaves_nothing()
        before = curve(torn)
        assert torn.start(*again).ends(100) == 0
        after = curve(torn)[len(before) :]
        assert [before, after] == [curve(whole)[: len(before)], curve(whole)[-len(after) :]]
        assert len(after) in (5 - 2, 5 - 4), "from a checkpoint"
        assert checkpoints(torn)[-1] == 6, "one round more, in which the new incarnation took over"
        assert torn.said().count("from the state directory") == 1
