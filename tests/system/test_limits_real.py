"""Limits of real peers: a quota that holds across a kill, then pauses the peer; a cap that the run cannot bear."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
QUOTA_BYTES, RESERVE_BYTES = 300_000_000, 15_000_000
RUN = 'codec = "fp32"\n' + paced(elements=2_000_000, step_seconds=0.05, inner_steps=4)
LIMITS = ("--upload-limit", "20", "--quota", "300MB/day")


def moved(peer: RealPeer) -> int:
    """Bytes that its rounds took, as its reports say: less than all."""
    return sum(each["bytes_sent"] + each["bytes_received"] for each in peer.reports())


def stored(peer: RealPeer) -> int:
    used: int = json.loads((peer.directory / "quota.json").read_text())["used_bytes"]
    return used


def is_away(peer: RealPeer) -> bool:
    """Whether it says that its quota pauses it, and its worker has ended."""
    status = peer.status()
    return status.get("state") == "paused" and "used up" in status["reason"] and peer.child("worker") is None


def cli(*arguments: str) -> str:
    """What a command prints to stderr."""
    return subprocess.run([sys.executable, "-m", "node", *arguments], stderr=subprocess.PIPE, text=True).stderr


@pytest.mark.long
def test_quota_holds_across_a_kill(tmp_path: Path) -> None:
    with RealSwarm(tmp_path, RUN) as swarm:
        a = swarm.found("a")
        via = ("--bootstrap", a.address)
        b = swarm.peer("b").start(*via, *LIMITS)
        wait("some rounds are over", lambda: moved(b) > 80_000_000, 120)
        limits = b.status()["limits"]
        assert limits.startswith("at most 20 MB/s up; ") and limits.endswith("MB of 300 MB used this day")
        b.strike()
        b.leaves_nothing()
        killed = stored(b)
        assert moved(b) <= killed <= moved(b) + 2 * RESERVE_BYTES + 50_000_000  # a round, the state, and small messages
        b.start(*via, *LIMITS)
        wait("the quota is used up, and the peer is away", lambda: b.running and is_away(b), 150)
        assert "nine tenths of the quota are used" in b.said()
        assert b.said().count("quota used up; paused until") == 1
        b.ask("finish")
        assert b.ends(30) == 0
        assert moved(b) <= stored(b) <= QUOTA_BYTES + 1_000_000
        assert stored(b) >= 0.85 * QUOTA_BYTES
        assert b.start(*via, *LIMITS).ends(60) == 2
        assert b.said().splitlines()[-1].startswith("starling: the quota is used up until ")
        assert b.start(*via, "--upload-limit", "0.07").ends(60) == 2
        assert "the upload limit of 0.07 MB/s is too low for this run: a round's 8 MB would take 114 s" in b.said()
        assert cli("set", "upload-limit", "0.07", "--state-dir", str(a.directory)).startswith(
            "starling: the upload limit of 0.07 MB/s is too low for this run"
        )
        assert a.status()["limits"] == ""
        said = cli("set", "upload-limit", "2", "--state-dir", str(a.directory))
        assert said == "upload-limit is 2MB from now on\n"
        assert a.status()["limits"].startswith("at most 2 MB/s up")
        rounds = a.last()["round"]
        wait("the other goes on", lambda: a.last()["round"] > rounds + 2, 60)
