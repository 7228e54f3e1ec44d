"""Founding a run. The founder alone initialises the parameters; all other peers download them."""

from __future__ import annotations

import hashlib

import torch

from node.config.manifest import Manifest, layout_digest, seal
from node.config.run_config import RunConfig
from node.joining.bootstrap import RunInfo
from node.runtime.identity import Identity
from node.training.remote import RemoteTrainer
from protocols.base import Compute, Member
from protocols.sync.snapshot import SnapshotIndex


async def found_run(
    config: RunConfig, founder: Member, identity: Identity, trainer: RemoteTrainer, compute: Compute, created: float
) -> tuple[Manifest, RunInfo]:
    """Make the manifest of a new run, and what joiners get of it.

    Args:
        identity: the founder's identity, which signs the manifest.
        trainer: holds the initial parameters; it has taken no step yet.
        created: wall time, seconds since 1970.
    """
    sample = await trainer.held_out()
    manifest = Manifest(
        config=config,
        founder=founder,
        elements=trainer.layout.sizes(),
        state_root=await _initial_root(trainer, compute),
        held_out=hashlib.sha256(sample).digest() if sample else bytes(32),
        created=created,
        layout=layout_digest(trainer.layout),
    )
    return manifest, RunInfo(seal(manifest, identity), sample)


async def _initial_root(trainer: RemoteTrainer, compute: Compute) -> bytes:
    """State root of the run's initial outer state: the initial parameters, and no momentum."""
    anchor = torch.empty(trainer.layout.sizes()[0])
    await trainer.read(anchor)
    index = await compute.run(lambda: SnapshotIndex.of(anchor, torch.zeros_like(anchor)), 8 * len(anchor))
    return index.state_root(0)
