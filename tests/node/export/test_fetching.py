"""The model of a running swarm, fetched by a process that takes no part in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from node.config.manifest import Manifest, layout_digest, seal
from node.config.run_config import RunConfig, load_run
from node.export.fetching import FetchableRun, fetch_state, fetchable
from node.export.trained_model import trained_rounds
from node.runtime.identity import create
from node.storage.checkpoint import newest
from node.tasks.flat import flatten
from node.tasks.hf.settings import ModelError
from protocols.base import Layout, Member
from protocols.consensus.record import Kind
from protocols.history.chain import UNSETTLED
from protocols.registry import INDEPENDENT_PROTOCOLS
from tests.support.refusals import one_line
from tests.support.simulated import simulated
from tests.support.statedir_fixtures import found_in_stages, staged_run
from tests.support.sync_cluster import SyncCluster

ELEMENTS = 300_000
"""Several chunks."""
LAYOUT = Layout(((("paced", (ELEMENTS,)),),))


def made_by_anna() -> FetchableRun:
    config = load_run(None, {"task": "paced", "paced.elements": ELEMENTS}, ["butterfly"])
    anna = Member("anna")
    manifest = Manifest(config=config, founder=anna, elements=(ELEMENTS,), state_root=UNSETTLED, created=1.0)
    return FetchableRun(b"sealed", manifest, (LAYOUT,))


class Anna(SyncCluster):
    """A peer that founded a run, and a stranger who fetches it.

    Attributes:
        made: the run, as the stranger knows it.
    """

    def __init__(self) -> None:
        self.made = made_by_anna()
        super().__init__(["anna"], ELEMENTS, every_rounds=4, run=bytes.fromhex(self.made.manifest.run_id))

    async def fetch(self, directory: Path, *bootstrap: str) -> None:
        await fetch_state(self.join("zoe"), self.made, bootstrap or ["anna"], directory)


def founded(config: RunConfig, layout: Layout, directory: Path) -> bytes:
    """The envelope of a run with this layout."""
    directory.mkdir(exist_ok=True)
    founder = create(directory / "identity.key")
    manifest = Manifest(
        config=config,
        founder=Member(founder.peer_id, 1),
        elements=layout.sizes(),
        state_root=bytes(32),
        created=1.0,
        layout=layout_digest(layout),
    )
    return seal(manifest, founder)


def refused(sealed: bytes) -> str:
    return one_line(ModelError, fetchable, sealed)


@simulated(Anna)
async def test_newest_state_on_the_chain_is_fetched_without_a_trace(swarm: Anna, tmp_path: Path) -> None:
    anna = swarm.peers["anna"]
    await swarm.rounds("anna", 10)
    before = anna.chain.head
    await swarm.fetch(tmp_path)
    made = newest(tmp_path)
    kept = anna.snapshots.get(made.lineage)
    assert kept and made.round == 8 and made.state_root == kept.index.state_root(8) and made.layout == LAYOUT
    fetched = made.snapshot()
    chunks = range(len(kept.index.digests))
    assert len(chunks) > 2 and all(fetched.chunk(index) == kept.chunk(index) for index in chunks)
    assert trained_rounds(tmp_path, made) == 8
    assert (tmp_path / "manifest.bin").read_bytes() == b"sealed"
    assert anna.chain.head == before and not anna.sync._context.peers._callers


@simulated(Anna)
async def test_chain_that_its_votes_do_not_prove_is_not_used(swarm: Anna, tmp_path: Path) -> None:
    await swarm.rounds("anna", 3)
    await swarm.decide("anna", Kind.FORK)  # a whole roster cannot fork itself
    await swarm.rounds("anna", 4)
    with pytest.raises(ModelError, match="no peer sent a snapshot of this chain"):
        await swarm.fetch(tmp_path)
    assert not (tmp_path / "checkpoints").exists()


def test_run_that_cannot_be_fetched_gives_one_line(tmp_path: Path) -> None:
    assert "the envelope is damaged" in refused(b"nonsense")
    other = staged_run(tmp_path / "founder", (0, 2, 4))
    assert fetchable(other.envelope).layouts == tuple(flatten(module).layout for module in other.modules)
    own = load_run(None, {"task": "paced", "paced.elements": 6, "stages": 2}, ["butterfly"])
    modules = [nn.ParameterDict({name: torch.zeros(3)}) for name in ("paced", "other")]
    assert "other tensors than" in refused(found_in_stages(tmp_path / "stages", own, modules, (1, 2)).envelope)
    paced = {"task": "paced", "paced.elements": ELEMENTS}
    for name, config, layout, words in (
        (
            "gossip",
            load_run(None, {**paced, "protocol": "gossip"}, INDEPENDENT_PROTOCOLS),
            LAYOUT,
            "a model of its own",
        ),
        ("own", load_run(None, {"task": "mine:make"}, ["butterfly"]), LAYOUT, "only its peers know its tensors"),
        ("other", load_run(None, paced, ["butterfly"]), Layout(((("other", (ELEMENTS,)),),)), "other tensors than"),
    ):
        assert words in refused(founded(config, layout, tmp_path / name))
