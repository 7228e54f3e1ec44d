"""Load the trained model of a run: the newest checkpoint in a peer's state directory, or with stages one of each stage.

It changes nothing in the directories, so their peers may be running.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from node.config.manifest import Manifest, ManifestError, layout_digest, unseal
from node.membership.hello import MAX_RUN_BYTES
from node.membership.seats import seat_of
from node.runtime.identity import verify
from node.storage.certificate_log import stored
from node.storage.checkpoint import DIRECTORY, Checkpoint, CheckpointError, newest
from node.storage.journal import tail
from node.storage.statedir import STAGE, StateError, home_of, read_stage
from node.tasks.extra import named_tensors
from node.tasks.hf.settings import ModelError
from protocols import wire
from protocols.base import BadPayload
from protocols.consensus import record as records
from protocols.consensus.messages import Certificate

_LAST_REPORTS_BYTES = 4 << 20
_ATTEMPTS = 3  # a running peer may delete a checkpoint while it is being read; there is a newer one then


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
    """The newest checkpoint of a directory, and its outer parameters by their names."""

    directory: Path
    checkpoint: Checkpoint
    tensors: dict[str, torch.Tensor]


def load_trained(directories: Sequence[Path]) -> TrainedModel:
    """Load the newest checkpoint in a peer's state directory, or assemble those of all stages."""
    manifest = _run_of(directories)
    places = _by_stage(directories, manifest)
    parts = [_newest_of(each, stage, manifest) for stage, each in enumerate(places)]
    rounds = tuple(trained_rounds(part.directory, part.checkpoint) for part in parts)
    losses = (_held_out_loss(each / "rounds.jsonl", parts[0].checkpoint.lineage.hex()) for each in places[0])
    loss = next(filter(math.isfinite, losses), math.nan) if len(set(rounds)) == 1 else math.nan  # of other parameters
    return TrainedModel(manifest, tuple(part.checkpoint for part in parts), rounds, _joined(parts), loss)


def is_one_staged_run(directories: Sequence[Path]) -> bool:
    try:
        return _run_of(directories).stages is not None
    except ModelError:
        return False


def _run_of(directories: Sequence[Path]) -> Manifest:
    first, *others = directories
    manifest = _manifest(first)
    for other in others:
        if (run := _manifest(other).run_id) != manifest.run_id:
            raise ModelError(
                f"{first} is of run {manifest.run_id[:12]}, {other} of run {run[:12]}: "
                "give state directories of one run only"
            )
    return manifest


def _by_stage(directories: Sequence[Path], manifest: Manifest) -> list[list[Path]]:
    """The directories of each stage, in order: at least one of each."""
    if manifest.stages is None:
        if len(directories) > 1:
            raise ModelError(
                f"run {manifest.run_id[:12]} has no stages, so each peer has the whole model: "
                f"give one --state-dir, not {len(directories)}"
            )
        return [list(directories)]
    places: list[list[Path]] = [[] for _ in manifest.stages]
    for directory in directories:
        try:
            stage = read_stage(directory)
        except StateError as error:
            raise ModelError(str(error)) from None
        if stage >= len(places):
            raise ModelError(
                f"{directory} is of stage {stage}, its run has stages 0 to {len(places) - 1}: "
                "correct its stage.json, or leave the directory out"
            )
        places[stage].append(directory)
    if missing := [str(stage) for stage, each in enumerate(places) if not each]:
        *others, last = missing
        what, whose = f"stage {last} is", "one of its peers"
        if others:
            what, whose = f"stages {', '.join(others)} and {last} are", "a peer of each of them"
        raise ModelError(f"{what} missing: give the state directory of {whose} by another --state-dir")
    return places


def _newest_of(directories: Sequence[Path], stage: int, manifest: Manifest) -> _Loaded:
    """The newest checkpoint of a stage. A directory without one counts only if no other has one."""
    best, errors = None, list[ModelError]()
    for directory in directories:
        try:
            loaded = _load(directory, stage, manifest)
            best = max(best or loaded, loaded, key=lambda each: each.checkpoint.round)
        except ModelError as error:
            errors.append(error)
    if best is None:
        raise errors[0]
    return best


def _load(directory: Path, stage: int, manifest: Manifest) -> _Loaded:
    for attempt in range(_ATTEMPTS):
        try:
            checkpoint = newest(home_of(directory))
            vectors = checkpoint.parameters()
            break
        except CheckpointError as error:
            if attempt == _ATTEMPTS - 1 or not (home_of(directory) / DIRECTORY).is_dir():
                raise ModelError(
                    f"{error}: a peer makes its first one after some rounds, and keeps only the last ones"
                ) from None
    if checkpoint.run != manifest.run_id:
        raise ModelError(
            f"the newest checkpoint in {directory} is of run {checkpoint.run[:12]}, the directory of "
            f"{manifest.run_id[:12]}: its peer has made no checkpoint of the new run yet"
        )
    if manifest.stages and layout_digest(checkpoint.layout) != manifest.stages[stage].layout:
        raise ModelError(
            f"the newest checkpoint in {directory} has other tensors than stage {stage} of its run: "
            "correct its stage.json, or give the directory of another peer of that stage"
        )
    fragments = zip(checkpoint.layout.fragments, vectors, strict=True)
    return _Loaded(directory, checkpoint, dict(each for pair in fragments for each in named_tensors(*pair)))


def _joined(parts: Sequence[_Loaded]) -> dict[str, torch.Tensor]:
    is_shared = len({name for part in parts for name in part.tensors}) < sum(len(part.tensors) for part in parts)
    return {
        f"stage{stage}.{name}" if is_shared else name: tensor
        for stage, part in enumerate(parts)
        for name, tensor in part.tensors.items()
    }


def _manifest(directory: Path) -> Manifest:
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory: name a peer's state directory by --state-dir")
    try:
        with (directory / "manifest.bin").open("rb") as file:
            return unseal(file.read(MAX_RUN_BYTES + 1), verify)
    except FileNotFoundError:
        raise ModelError(f"{directory} contains no run: name the state directory of a peer that was in one") from None
    except OSError as error:
        raise ModelError(f"{directory / 'manifest.bin'} cannot be read: {error.strerror}") from None
    except ManifestError as error:
        raise ModelError(f"{directory / 'manifest.bin'}: {error}") from None


def _held_out_loss(reports: Path, lineage: str) -> float:
    """Held-out loss after a record, from the peer's last reports; nan if it is not in them."""
    for line in reversed(tail(reports, _LAST_REPORTS_BYTES).splitlines()):
        try:
            report = json.loads(line)
            if report["lineage"] == lineage and report["held_out_loss"] is not None:
                return float(report["held_out_loss"])
        except (ValueError, TypeError, KeyError, RecursionError):  # an incomplete line, or another format
            continue
    return math.nan


def trained_rounds(directory: Path, checkpoint: Checkpoint) -> int:
    """Count the rounds before a checkpoint that trained something, as `Chain.trained` does.

    If the chain in the directory does not lead to the checkpoint, or cannot be read, all rounds count.
    """
    idle, lineage, home = 0, b"", home_of(directory)
    rounds = _rounds_before(home) + checkpoint.round
    try:
        for encoded in islice(stored(home / "certificates.bin"), checkpoint.round):
            certificate = wire.expect(wire.decode(encoded), Certificate)
            record = records.decode(certificate.record)
            idle += record.idle
            lineage = records.lineage(certificate.record)
    except (OSError, BadPayload, ValueError):
        return rounds
    return rounds - idle if lineage == checkpoint.lineage else rounds


def _rounds_before(home: Path) -> int:
    """Training rounds that count as done where the chain of a directory begins: its stage may have begun again."""
    with suppress(OSError):
        seat = seat_of((home / STAGE).read_bytes())
        return sum(base.trained for base in seat.base) if seat else 0
    return 0
