"""Founding a run. The founder alone initialises the parameters; all other peers download them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from node.config.manifest import Manifest, ManifestError, layout_digest, seal
from node.config.run_config import RunConfig
from node.joining.bootstrap import RunInfo
from node.runtime.identity import Identity
from node.training.remote import RemoteTrainer
from protocols.base import Compute, Member
from protocols.sync.snapshot import SnapshotIndex

if TYPE_CHECKING:
    from node.joining.stage_plan import StagePlan


@dataclass(frozen=True, slots=True)
class Founder:
    me: Member
    identity: Identity
    created: float


async def found_run(
    config: RunConfig,
    founder: Founder,
    trainer: RemoteTrainer,
    compute: Compute,
    plan: StagePlan | None = None,
) -> tuple[Manifest, RunInfo]:
    """Make the manifest of a new run, and what joiners get of it.

    `trainer` holds the initial parameters, with stages those of stage 0; it has taken no step yet.
    """
    sample = await trainer.held_out()
    root = await _initial_root(trainer, compute)
    if plan and root != plan.entries[0].state_root:
        raise ManifestError("this machine has drawn two different initial states: its memory may be damaged")
    manifest = Manifest(
        config=config,
        founder=founder.me,
        elements=plan.elements if plan else trainer.layout.sizes(),
        state_root=root,
        held_out=hashlib.sha256(sample).digest() if sample else bytes(32),
        created=founder.created,
        layout=None if plan else layout_digest(trainer.layout),
        stages=plan.entries if plan else None,
        model=await trainer.pins() if config.hf else None,
    )
    return manifest, RunInfo(seal(manifest, founder.identity), sample)


async def _initial_root(trainer: RemoteTrainer, compute: Compute) -> bytes:
    anchor = torch.empty(trainer.layout.sizes()[0])
    await trainer.read(anchor)
    index = await compute.run(lambda: SnapshotIndex.of(anchor, torch.zeros_like(anchor)), 8 * len(anchor))
    return index.state_root(0)
