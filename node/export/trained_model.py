"""Load the trained model of a run: the newest checkpoint in a peer's state directory, or with stages one of each stage.

It changes nothing in the directories, so their peers may be running.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from node.config.manifest import Manifest, ManifestError, layout_digest, unseal
from node.membership.hello import MAX_RUN_BYTES
from node.runtime.identity import verify
from node.storage.certificate_log import stored
from node.storage.checkpoint import DIRECTORY, Checkpoint, CheckpointError, newest
from node.storage.statedir import StateError, read_stage
from node.tasks.extra import named_tensors
from protocols import wire
from protocols.base import BadPayload, Vector
from protocols.consensus import record as records
from protocols.consensus.messages import Certificate

_LAST_REPORTS_BYTES = 4 << 20
_ATTEMPTS = 3
"""A running peer may delete a checkpoint while it is being read; there is a newer one then."""


class TrainedError(ValueError):
    """There is no model to load. The message says in one line what happened, why, and what to do."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The model of a run before a round, assembled from its stages if it has some.

    `rounds` is the number of rounds that have trained each stage. `tensors` are float32, in the module's order; if two
    stages use the same name, each name begins with `stageK.`. `held_out_loss` is that of a peer of stage 0, or nan.
    """

    manifest: Manifest
    checkpoints: tuple[Checkpoint, ...]
    rounds: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]
    held_out_loss: float

    @property
    def is_of_one_round(self) -> bool:
        return len(set(self.rounds)) == 1

    def warning(self) -> str:
        """One line if the stages do not belong to the same round; else nothing."""
        if self.is_of_one_round:
            return ""
        each = ", ".join(f"stage {stage} after {count}" for stage, count in enumerate(self.rounds))
        return f"warning: the checkpoints are of different rounds ({each}): the model may be worse than that of a round"


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The newest checkpoint of a directory, and its outer parameters: a flat float32 vector for each fragment."""

    directory: Path
    checkpoint: Checkpoint
    vectors: tuple[Vector, ...]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for vector, fragment in zip(self.vectors, self.checkpoint.layout.fragments, strict=True):
            yield from named_tensors(fragment, vector)


def load_trained(directories: Sequence[Path]) -> TrainedModel:
    """Load the newest checkpoint in a peer's state directory, or assemble those of all stages."""
    manifest = _run_of(directories)
    places = _by_stage(directories, manifest)
    parts = [_newest_of(each, stage, manifest) for stage, each in enumerate(places)]
    rounds = tuple(trained_rounds(part.directory, part.checkpoint) for part in parts)
    loss, lineage = math.nan, parts[0].checkpoint.lineage.hex()
    if len(set(rounds)) == 1:  # otherwise it was measured with other parameters
        losses = (_held_out_loss(each / "rounds.jsonl", lineage) for each in places[0])
        loss = next((loss for loss in losses if math.isfinite(loss)), math.nan)
    return TrainedModel(manifest, tuple(part.checkpoint for part in parts), rounds, _joined(parts), loss)


def is_one_staged_run(directories: Sequence[Path]) -> bool:
    try:
        return _run_of(directories).stages is not None
    except TrainedError:
        return False


def _run_of(directories: Sequence[Path]) -> Manifest:
    first, *others = directories
    manifest = _manifest(first)
    for other in others:
        if (run := _manifest(other).run_id) != manifest.run_id:
            raise TrainedError(
                f"{first} is of run {manifest.run_id[:12]}, {other} of run {run[:12]}: "
                "give state directories of one run only"
            )
    return manifest


def _by_stage(directories: Sequence[Path], manifest: Manifest) -> list[list[Path]]:
    """The directories of each stage, in order: at least one of each."""
    if manifest.stages is None:
        if len(directories) > 1:
            raise TrainedError(
                f"run {manifest.run_id[:12]} has no stages, so each peer has the whole model: "
                f"give one --state-dir, not {len(directories)}"
            )
        return [list(directories)]
    places: list[list[Path]] = [[] for _ in manifest.stages]
    for directory in directories:
        try:
            stage = read_stage(directory)
        except StateError as error:
            raise TrainedError(str(error)) from None
        if stage >= len(places):
            raise TrainedError(
                f"{directory} is of stage {stage}, its run has stages 0 to {len(places) - 1}: "
                "correct its stage.json, or leave the directory out"
            )
        places[stage].append(directory)
    if missing := [str(stage) for stage, each in enumerate(places) if not each]:
        raise TrainedError(_missing(missing))
    return places


def _missing(stages: Sequence[str]) -> str:
    if len(stages) == 1:
        return f"stage {stages[0]} is missing: give the state directory of one of its peers by another --state-dir"
    listed = f"{', '.join(stages[:-1])} and {stages[-1]}"
    return f"stages {listed} are missing: give the state directory of a peer of each of them by another --state-dir"


def _newest_of(directories: Sequence[Path], stage: int, manifest: Manifest) -> _Loaded:
    """The newest checkpoint of a stage. A directory without one counts only if no other has one."""
    best, first_error = None, None
    for directory in directories:
        try:
            loaded = _load(directory, stage, manifest)
        except TrainedError as error:
            first_error = first_error or error
            continue
        if best is None or loaded.checkpoint.round > best.checkpoint.round:
            best = loaded
    if best is None:
        assert first_error is not None, "no directory was given"
        raise first_error
    return best


def _load(directory: Path, stage: int, manifest: Manifest) -> _Loaded:
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
    if manifest.stages and layout_digest(checkpoint.layout) != manifest.stages[stage].layout:
        raise TrainedError(
            f"the newest checkpoint in {directory} has other tensors than stage {stage} of its run: "
            "correct its stage.json, or give the directory of another peer of that stage"
        )
    return _Loaded(directory, checkpoint, vectors)


def _joined(parts: Sequence[_Loaded]) -> dict[str, torch.Tensor]:
    names = Counter(name for part in parts for name, _ in part.tensors())
    shared = any(count > 1 for count in names.values())
    return {
        f"stage{stage}.{name}" if shared else name: tensor
        for stage, part in enumerate(parts)
        for name, tensor in part.tensors()
    }


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


def trained_rounds(directory: Path, checkpoint: Checkpoint) -> int:
    """Count the rounds before a checkpoint, without those for which nothing was trained, as `Chain.trained` does.

    It reads the chain in a peer's state directory and verifies no votes. If that chain does not lead to the
    checkpoint, or cannot be read, all rounds count.
    """
    idle, lineage = 0, b""
    try:
        for encoded in islice(stored(directory / "certificates.bin"), checkpoint.round):
            certificate = wire.expect(wire.decode(encoded), Certificate)
            record = records.decode(certificate.record)
            idle += record.idle
            lineage = records.lineage(certificate.record)
    except (OSError, BadPayload, ValueError):
        return checkpoint.round
    return checkpoint.round - idle if lineage == checkpoint.lineage else checkpoint.round
