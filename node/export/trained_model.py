"""Load the trained model of a peer's state directory: its newest checkpoint and its run.

It changes nothing in the directory, so the peer may be running.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from node.config.manifest import Manifest, ManifestError, unseal
from node.membership.hello import MAX_RUN_BYTES
from node.runtime.identity import verify
from node.storage.checkpoint import DIRECTORY, Checkpoint, CheckpointError, newest

_LAST_REPORTS_BYTES = 4 << 20
_ATTEMPTS = 3
"""A running peer may delete a checkpoint while it is being read; there is a newer one then."""


class TrainedError(ValueError):
    """There is no model to load. The message says in one line what happened, why, and what to do."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The model of a run before a round.

    Attributes:
        tensors: the outer parameters by their names in the module, float32.
        held_out_loss: loss of these parameters, as measured by this peer; nan if it was not measured.
    """

    manifest: Manifest
    checkpoint: Checkpoint
    tensors: Mapping[str, torch.Tensor]
    held_out_loss: float


def load_trained(directory: Path) -> TrainedModel:
    """Load the newest checkpoint in a peer's state directory.

    Raises:
        TrainedError: there is no such directory, it is not a peer's, or it has no undamaged checkpoint.
    """
    manifest = _manifest(directory)
    for attempt in range(_ATTEMPTS):
        try:
            checkpoint = newest(directory)
            vectors = checkpoint.parameters()
            break
        except CheckpointError as error:
            if attempt == _ATTEMPTS - 1 or not (directory / DIRECTORY).is_dir():
                raise TrainedError(
                    f"{error}: a peer makes its first one after some rounds, and keeps only the last ones"
                ) from None
    if checkpoint.run != manifest.run_id:
        raise TrainedError(
            f"the newest checkpoint in {directory} is of run {checkpoint.run[:12]}, the directory of "
            f"{manifest.run_id[:12]}: its peer has made no checkpoint of the new run yet"
        )
    tensors = {}
    for vector, fragment in zip(vectors, checkpoint.layout.fragments, strict=True):
        low = 0
        for name, shape in fragment:
            high = low + math.prod(shape)
            tensors[name], low = vector[low:high].view(shape), high
    return TrainedModel(
        manifest, checkpoint, tensors, _held_out_loss(directory / "rounds.jsonl", checkpoint.lineage.hex())
    )


def _manifest(directory: Path) -> Manifest:
    if not directory.is_dir():
        raise TrainedError(f"{directory} is not a directory: name a peer's state directory by --state-dir")
    try:
        with (directory / "manifest.bin").open("rb") as file:
            return unseal(file.read(MAX_RUN_BYTES + 1), verify)
    except FileNotFoundError:
        raise TrainedError(f"{directory} contains no run: name the state directory of a peer that was in one") from None
    except OSError as error:
        raise TrainedError(f"{directory / 'manifest.bin'} cannot be read: {error.strerror}") from None
    except ManifestError as error:
        raise TrainedError(f"{directory / 'manifest.bin'}: {error}") from None


def _held_out_loss(reports: Path, lineage: str) -> float:
    """Held-out loss after a record, from the peer's last reports; nan if it is not in them."""
    try:
        with reports.open("rb") as file:
            file.seek(max(0, reports.stat().st_size - _LAST_REPORTS_BYTES))
            lines = file.read(_LAST_REPORTS_BYTES).splitlines()
    except OSError:
        return math.nan
    for line in reversed(lines):
        try:
            report = json.loads(line)
            if report["lineage"] == lineage and report["held_out_loss"] is not None:
                return float(report["held_out_loss"])
        except (ValueError, TypeError, KeyError, RecursionError):  # an incomplete line, or another format
            continue
    return math.nan
