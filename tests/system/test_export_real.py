"""A model in stages, fetched from running peers by the address of one of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from node.cli.app import main
from protocols.sync.snapshot import SnapshotIndex
from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait

pytestmark = pytest.mark.real

SIZES = (5_000, 5_001)
NOBODY = "12D3KooWGRUfuFwTaVcXCnUbTbVLYYEkYgjDM3Bd7q4RuRyTQhaP"
"""A peer that does not exist: one that does would be found by its id, whatever the address says."""


def every_round(peer: RealPeer) -> None:
    peer.environment["NODE_CHECKPOINT_EVERY"] = "1"


def hashes(peer: RealPeer) -> dict[str, str]:
    """Lineage -> hash of the outer parameters after it."""
    return {each["lineage"]: each["params_hash"] for each in peer.reports()}


@pytest.mark.long
def test_stages_are_fetched_from_the_peers_that_one_peer_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RealSwarm(tmp_path, "stages = 2\n" + paced(elements=sum(SIZES), inner_steps=5), every_round) as swarm:
        founder = swarm.found("a")
        (other,) = swarm.join("b", via=founder)
        peers = (founder, other)
        wait("two rounds of each stage", lambda: all(len(peer.reports()) > 1 for peer in peers), 40)
        out = tmp_path / "out"
        dead = f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}"
        arguments = ["export", "--bootstrap", dead, "--bootstrap", other.address, "--out", str(out), "--no-check"]
        assert main(arguments) == 0, capsys.readouterr()
        said = capsys.readouterr().err.splitlines()
        assert said[0].startswith(f"warning: {dead}: cannot be reached: "), said
        assert said[-1].startswith(f"wrote {out}: run {other.status()['run_id'][:12]} after "), said
        lineages = re.findall(r"\| lineage of stage \d \| `(\w+)`", (out / "README.md").read_text())
        tensors = load_file(out / "model.safetensors")
        for stage, peer in enumerate(peers):
            vector = tensors[f"stage{stage}.paced"]
            assert vector.shape == (SIZES[stage],)
            root = SnapshotIndex.of(vector, torch.zeros_like(vector)).parameters_root
            assert root.hex() == hashes(peer)[lineages[stage]]
        assert all(len(peer.status()["peers"]) == 1 for peer in peers), "it takes no part in the run"
        founder.strike()
        assert main(["export", "--bootstrap", other.address, "--out", str(tmp_path / "more")]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert ": no peer of stage 0 can be reached (" in line and line.endswith("of each stage by --state-dir")
