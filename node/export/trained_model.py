"""What a peer's directory holds of a trained model: its newest checkpoint, and which run that is of. Nothing is changed
there, so that it does not matter whether the peer runs.
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
"""A running peer puts a checkpoint aside while this one is read; by then there is a newer one."""


class TrainedError(ValueError):
    """There is nothing to be had there; one line: what, why, what to do."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model as a run had it before a round.

    Attributes:
        tensors: the outer parameters by their names in the module, float32.
        held_out_loss: of these parameters, as this peer measured it; nan if it did not.
    """

    manifest: Manifest
    checkpoint: Checkpoint
    tensors: Mapping[str, torch.Tensor]
    held_out_loss: float


def load_trained(directory: Path) -> TrainedModel:
    """The newest checkpoint in a peer's state directory.

    Raises:
        TrainedError: no such directory, none of a peer's, no checkpoint, or none that is whole.
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
                    f"{error}: a peer makes its first after some rounds, and keeps the last ones"
                ) from None
    if checkpoint.run != manifest.run_id:
        raise TrainedError(
            f"the newest checkpoint in {directory} is of run {checkpoint.run[:12]}, the directory of "
            f"{manifest.run_id[:12]}: its peer has not made one of its new run yet"
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
        raise TrainedError(f"{directory} is no directory: give a peer's by --state-dir")
    try:
        with (directory / "manifest.bin").open("rb") as file:
            return unseal(file.read(MAX_RUN_BYTES + 1), verify)
    except FileNotFoundError:
        raise TrainedError(f"{directory} holds no run: give the state directory of a peer that was in one") from None
    except OSError as error:
        raise TrainedError(f"{directory / 'manifest.bin'} cannot be read: {error.strerror}") from None
    except ManifestError as error:
        raise TrainedError(f"{directory / 'manifest.bin'}: {error}") from None


def _held_out_loss(reports: Path, lineage: str) -> float:
    """What the peer's last reports say of the parameters that a record led to."""
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
        except (ValueError, TypeError, KeyError, RecursionError):  # half a line, or somebody else's
            continue
    return math.nan
