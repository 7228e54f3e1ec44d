"""A run of a user's own task, the one of docs/tasks.md, by real peers; a joiner without consent is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY, documented_task
from tests.support.real_swarm import START_SECONDS, RealPeer, RealSwarm, wait

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]
RUN = """
task = "shapes:shapes"
fork = "never"
[options]
noise = 2.0
[recipe]
inner_steps = 100
rounds = 10000
learning_rate = 1e-3
"""


def test_peers_with_consent_train_their_own_task(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "shapes.py").write_text(documented_task())

    def prepare(peer: RealPeer) -> None:
        peer.environment["PYTHONPATH"] = os.pathsep.join((str(REPOSITORY), str(tmp_path / "mine")))

    with RealSwarm(tmp_path, RUN, prepare) as swarm:
        a = swarm.found("a")
        wait("the line for others names the task", lambda: f"{a.address} --run-id" in a.said(), 5)
        assert "--task shapes:shapes\n" in a.said()
        agreed = ("--bootstrap", a.address, "--task", "shapes:shapes")
        b, c = swarm.peer("b").start(*agreed), swarm.peer("c").start(*agreed[:2])
        assert c.ends(START_SECONDS) == 2 and not (c.directory / "manifest.bin").exists()
        assert c.said().splitlines()[-1].endswith("that you trust, join with --task shapes:shapes")
        wait("b gets into the run", b.meet, START_SECONDS)
        wait("two are in one mean", lambda: swarm.all_in_one_mean([a, b]), START_SECONDS)
        losses = [each["held_out_loss"] for each in a.reports() if each["held_out_loss"]]
        assert losses[-1] < 0.5, "guessing among ten is 2.3"
