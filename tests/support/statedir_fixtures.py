"""State directories as peers leave them: a run's manifest, and a checkpoint of a module."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from node.config.manifest import Manifest, StageEntry, layout_digest
from node.config.manifest import seal as sealed
from node.config.run_config import RunConfig, load_run
from node.runtime.identity import Identity, load_or_create
from node.storage.buffers import outer_header
from node.storage.checkpoint import OUTER, Checkpoint, DataCursor, publish_checkpoint
from node.tasks.flat import flatten
from node.tasks.gpt import Gpt
from node.tasks.gpt_presets import GptConfig
from node.tasks.gpt_stage import GptStage
from node.tasks.hf.settings import ModelPins
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
    directory: Path,
    config: RunConfig,
    module: nn.Module,
    round_number: int = 5,
    loss: float | None = 2.5,
    model: ModelPins | None = None,
) -> Checkpoint:
    """Write a checkpoint of the module into a run's state directory, which is created if there is none."""
    directory.mkdir(exist_ok=True)
    founder = load_or_create(directory / "identity.key")
    layout = flatten(module).layout
    manifest = _manifest(config, founder, layout.sizes(), layout_digest(layout), model=model)
    (directory / "manifest.bin").write_bytes(sealed(manifest, founder))
    return keep_checkpoint(directory, manifest.run_id, module, round_number, loss=loss)


def keep_checkpoint(
    directory: Path,
    run_id: str,
    module: nn.Module,
    round_number: int,
    lineage: bytes | None = None,
    loss: float | None = None,
) -> Checkpoint:
    """Write a checkpoint of the module, and a report of the round before it. The lineage defaults to a made-up one."""
    flat = flatten(module)
    vector, lineage = flat.vector, lineage or bytes([round_number]) * 32
    draft = directory / "checkpoints" / f".draft-{round_number}"
    draft.mkdir(parents=True)
    start = outer_header(flat.layout.sizes(), round_number, lineage)
    (draft / OUTER).write_bytes(start + vector.detach().numpy().tobytes() + bytes(4 * len(vector)))
    index = SnapshotIndex.of(vector.detach(), torch.zeros(len(vector)))
    made = Checkpoint(
        path=draft,
        run=run_id,
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


def assemble(config: GptConfig, stages: Iterable[GptStage]) -> Gpt:
    whole = Gpt(config)
    whole.load_state_dict({name: tensor for stage in stages for name, tensor in stage.state_dict().items()})
    return whole


@dataclass(frozen=True)
class StagedRun:
    """A run in which each peer holds one stage of a model."""

    config: RunConfig
    modules: tuple[nn.Module, ...]
    run_id: str
    envelope: bytes

    @property
    def whole(self) -> Gpt:
        """The whole language model."""
        assert self.config.gpt
        return assemble(self.config.gpt.shape, [each for each in self.modules if isinstance(each, GptStage)])

    def keep(self, directory: Path, stage: int, round_number: int = 5, module: nn.Module | None = None) -> Path:
        """Write a checkpoint of a stage into the directory of one of its peers; the loss is known at stage 0 only."""
        self.enter(directory, stage)
        lineage, loss = bytes([stage + 100, round_number]) * 16, None if stage else 2.5
        keep_checkpoint(directory, self.run_id, module or self.modules[stage], round_number, lineage, loss)
        return directory

    def enter(self, directory: Path, stage: int) -> Path:
        """Make this the directory of a peer of a stage, without a checkpoint."""
        directory.mkdir(exist_ok=True)
        (directory / "manifest.bin").write_bytes(self.envelope)
        (directory / "stage.json").write_text(json.dumps({"stage": stage}))
        return directory


def staged_run(founder: Path, bounds: Sequence[int] = (0, 1, 3, 4), seed: int = 3) -> StagedRun:
    """Found a run of a small language model."""
    config = load_run(None, SMALL | {"stages": len(bounds) - 1, "name": "in stages"}, ["butterfly"])
    assert config.gpt
    modules = [GptStage(config.gpt.shape, low, high, seed) for low, high in pairwise(bounds)]
    return found_in_stages(founder, config, modules, bounds[1:])


def found_in_stages(founder: Path, config: RunConfig, modules: Sequence[nn.Module], ends: Sequence[int]) -> StagedRun:
    """Found a run whose stages are these modules."""
    founder.mkdir(exist_ok=True)
    identity = load_or_create(founder / "identity.key")
    layouts = [flatten(module).layout for module in modules]
    entries = tuple(
        StageEntry(end=end, state_root=bytes(32), layout=layout_digest(layout))
        for end, layout in zip(ends, layouts, strict=True)
    )
    elements = tuple(sum(layout.sizes()) for layout in layouts)
    manifest = _manifest(config, identity, elements, None, entries)
    return StagedRun(config, tuple(modules), manifest.run_id, sealed(manifest, identity))


def _manifest(
    config: RunConfig,
    founder: Identity,
    elements: tuple[int, ...],
    layout: bytes | None,
    stages: tuple[StageEntry, ...] | None = None,
    model: ModelPins | None = None,
) -> Manifest:
    return Manifest(
        config=config,
        founder=Member(founder.peer_id, 1),
        elements=elements,
        state_root=bytes(32),
        created=1.0,
        layout=layout,
        stages=stages,
        model=model,
    )
