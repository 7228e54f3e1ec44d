"""State directories as peers leave them: a run's manifest, and a checkpoint of a module."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from node.config.manifest import Manifest, layout_digest
from node.config.manifest import seal as sealed
from node.config.run_config import RunConfig, load_run
from node.runtime.identity import Identity, load_or_create
from node.storage.checkpoint import OUTER, Checkpoint, DataCursor
from node.storage.file_buffer import outer_header
from node.storage.publish import publish_checkpoint
from node.tasks.base import flatten
from node.tasks.gpt import Gpt
from protocols.base import Member
from protocols.sync.snapshot import SnapshotIndex

SMALL = {
    "gpt.layers": 2,
    "gpt.width": 32,
    "gpt.heads": 2,
    "gpt.context": 24,
    "recipe.rounds": 20,
    "name": "small, of *course*",
}


def small_gpt() -> RunConfig:
    return load_run(None, SMALL, ["butterfly"])


def keep(
    directory: Path, config: RunConfig, module: nn.Module, round_number: int = 5, loss: float | None = 2.5
) -> Checkpoint:
    """Write a checkpoint of the module into a run's state directory, which is created if there is none."""
    directory.mkdir(exist_ok=True)
    founder = load_or_create(directory / "identity.key")
    flat = flatten(module)
    (vector,), lineage = flat.vectors, bytes([round_number]) * 32
    manifest = _manifest(config, founder, flat.layout.sizes(), layout_digest(flat.layout))
    (directory / "manifest.bin").write_bytes(sealed(manifest, founder))
    draft = directory / "checkpoints" / f".draft-{round_number}"
    draft.mkdir(parents=True)
    start = outer_header(flat.layout.sizes(), round_number, lineage)
    (draft / OUTER).write_bytes(start + vector.detach().numpy().tobytes() + bytes(4 * len(vector)))
    index = SnapshotIndex.of(vector.detach(), torch.zeros(len(vector)))
    made = Checkpoint(
        path=draft,
        run=manifest.run_id,
        round=round_number,
        lineage=lineage,
        state_root=index.state_root(round_number),
        layout=flat.layout,
        index=index,
        data=DataCursor(1, 1, 0),
        carried=0,
        files={},
    )
    with (directory / "rounds.jsonl").open("a") as reports:
        reports.write(json.dumps({"lineage": lineage.hex(), "held_out_loss": loss}) + "\n")
    return publish_checkpoint(made, inner=False)


def kept_gpt(directory: Path, round_number: int = 5, seed: int = 3) -> Gpt:
    """Write a checkpoint of a small language model, and return the model."""
    config = small_gpt()
    assert config.gpt
    module = Gpt(config.gpt.shape, seed)
    keep(directory, config, module, round_number)
    return module


def _manifest(config: RunConfig, founder: Identity, elements: tuple[int, ...], layout: bytes) -> Manifest:
    return Manifest(
        config=config,
        founder=Member(founder.peer_id, 1),
        elements=elements,
        state_root=bytes(32),
        created=1.0,
        layout=layout,
    )
