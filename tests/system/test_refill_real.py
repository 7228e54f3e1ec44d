"""Real peers of a run with stages: states are backed up at peers of other stages, and lost stages begin again."""

from __future__ import annotations

import re
import shutil
import time
from functools import partial
from pathlib import Path

import pytest

from node.storage.checkpoint import newest
from tests.support import stage_checkers
from tests.support.history import one_mean
from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait
from tests.system.test_stages_real import goes_on, kill

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(300)]

RUN = "stages = 3\n" + paced(elements=20_000, inner_steps=3) + "batches = 2\n"


REFILL_SECONDS = 300.0
GOES_ON_SECONDS = 60.0  # of two rounds of each, on a busy machine
MOST_LOST = 7  # rounds: a backup is renewed every five, and takes a moment


class BackedUpSwarm(RealSwarm):
    invariants = staticmethod(partial(stage_checkers.check, movers="abcdef"))


def backup(peer: RealPeer, stage: int) -> int | None:
    """The round of the newest whole state of another stage at a peer."""
    try:
        return newest(peer.directory / "stages" / str(stage)).round
    except ValueError:
        return None


def test_each_stage_is_backed_up_at_two_peers_of_others(tmp_path: Path) -> None:
    """And the backups are renewed, one state at a time."""
    with BackedUpSwarm(tmp_path, RUN) as swarm:
        founder = swarm.found("a")
        peers = [founder, *swarm.join("b", "c", via=founder)]
        wait("each is in a stage", lambda: all((peer.directory / "stage").exists() for peer in peers), 60)
        stages = {peer: int((peer.directory / "stage").read_text()) for peer in peers}

        def held() -> list[int]:
            found = [backup(peer, stage) for peer in peers for stage in range(3) if stages[peer] != stage]
            return [each for each in found if each is not None]

        wait("six backups", lambda: len(held()) == 6, 120, 0.25)
        assert "is at 2 other peers; here: stage" in founder.status()["backups"]
        before = max(held())
        wait("newer ones", lambda: len(held()) == 6 and min(held()) >= before + 5, 120, 0.25)
        for peer in peers:
            for stage in range(3):
                if stages[peer] != stage:
                    assert len(list((peer.directory / "stages" / str(stage) / "checkpoints").iterdir())) <= 2


def stage_of(peer: RealPeer) -> int:
    """-1 while it asks for one."""
    file = peer.directory / "stage"
    return int(file.read_text().split()[0].partition("-")[0]) if file.exists() else -1


@pytest.mark.timeout(900)
def test_lost_stage_begins_again_within_five_minutes(tmp_path: Path) -> None:
    """Its peers are killed, and a disk is gone. The new member is killed as soon as it is there, and restarts.

    The peer of the other disk comes back later, and joins the new seat.
    """
    with BackedUpSwarm(tmp_path, RUN) as swarm:
        founder = swarm.found("a")
        peers = [founder, *swarm.join("b", "c", via=founder), *swarm.join("d", "e", "f", via=founder)]

        def placed() -> list[list[RealPeer]] | None:
            found = [[peer for peer in peers if stage_of(peer) == stage] for stage in range(3)]
            return found if all(len(each) == 2 and one_mean(each) for each in found) else None

        # of three that join at once, two may be given one stage by different peers: then one of them moves
        stages = wait("two that count in each stage", placed, 240, 0.25)
        rest = stages[0] + stages[2]
        wait("two backups of stage 1", lambda: sum((backup(peer, 1) or 0) >= 5 for peer in rest) == 2, 120, 0.25)
        gone, stopped = stages[1]
        kill(gone)
        kill(stopped)
        began = time.monotonic()
        shutil.rmtree(gone.directory)

        def lost() -> str:
            return next((str(peer.status().get("lost")) for peer in stages[0] if peer.running), "")

        wait("a refill", lambda: "stage 1 began again" in lost(), REFILL_SECONDS, 1.0)
        (found,) = re.findall(r"stage 1 began again after \d+ rounds: (\d+) lost", lost())
        assert int(found) <= MOST_LOST
        member = wait("its member", lambda: next((peer for peer in rest if stage_of(peer) == 1), None), 60)
        driver = next(peer for peer in stages[0] if peer is not member)
        kill(member)
        member.start("--bootstrap", driver.address)
        goes_on(member, "in stage 1")
        goes_on(driver, "with the new member of stage 1")
        assert time.monotonic() - began <= REFILL_SECONDS + GOES_ON_SECONDS
        assert member.reports()[-1]["refilled"] == {"1": int(found)}
        stopped.start("--bootstrap", driver.address, "--stage", "1")
        wait("it counts again", lambda: one_mean([member, stopped]) if stage_of(stopped) == 1 else None, 180, 0.5)
