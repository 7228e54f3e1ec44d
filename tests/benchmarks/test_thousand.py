"""The simulation of a thousand peers, with twelve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import thousand, thousand_swarms
from tests.support.long import long


def test_mean_of_clusters_is_that_of_all_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Element by element, within what sums in float32 lose; and those that a fault spares hold one state."""
    monkeypatch.setattr(thousand_swarms, "VOTERS", 4)
    file = tmp_path / "found.json"
    peers = ["--peers", "12", "--elements", "4096", "--chunks", "2"]
    thousand.main([*peers, "--protocols", "clusters", "--rounds", "1", "--json", str(file)])
    (found,) = json.loads(file.read_text())
    assert found["root"] and found["counted"] == 12 and found["error"] <= 1e-6
    capsys.readouterr()
    thousand.main(["faults", "--peers", "12", "--rounds", "1"])
    hit = json.loads(capsys.readouterr().out.splitlines()[0])
    assert hit["died"] == 1 and hit["roots"] == 1 and hit["lost"] <= 2 / 12


@pytest.mark.parametrize("peers, voters", long((100, 5)))
def test_calm_round_of_full_clusters_loses_no_work(monkeypatch: pytest.MonkeyPatch, peers: int, voters: int) -> None:
    """Beyond 96 peers most do not see each other, and plans come to some clusters long after others."""
    monkeypatch.setattr(thousand_swarms, "VOTERS", voters)
    found = thousand.clusters(peers, rounds=1)
    assert found.root and found.lost == 0.0 and (found.error or 0.0) <= 1e-6
