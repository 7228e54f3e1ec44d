"""Real peers of a run with stages whose states are backed up at peers of other stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.storage.checkpoint import newest
from tests.support import stage_checkers
from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(300)]

RUN = "stages = 3\n" + paced(elements=20_000, inner_steps=3) + "batches = 2\n"


class BackedUpSwarm(RealSwarm):
    invariants = staticmethod(stage_checkers.check)


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
