"""Checkpoints: the state of a peer before a round, in files that are written atomically and verified by digests.

    checkpoints/000015-3f2a9c01d4e7/        before round 15, after the record with this hash
        outer.safetensors                   the outer parameters and momentum, which are also served to joiners
        inner.safetensors                   moments and steps of this peer's optimiser; missing if they were not saved
        feedback.safetensors                error feedback, if the codec sends only parts of a vector
        manifest.json                       description and digest of the other files, and a digest of itself
    checkpoints/.000015-3f2a9c01d4e7/       an unfinished checkpoint, or an interrupted download

A checkpoint is written to a hidden directory, flushed, and renamed. It holds no local parameters: at a checkpoint they
are the outer ones, from which the peer continues to train.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from node.runtime import tensors
from node.runtime.identity import sync_directory
from node.storage.buffers import PARAMETERS, VELOCITY, outer_buffer, outer_header
from protocols.base import BadPayload, Layout, Vector
from protocols.sync.snapshot import Snapshot, SnapshotIndex

DIRECTORY = "checkpoints"
OUTER, INNER, FEEDBACK = "outer.safetensors", "inner.safetensors", "feedback.safetensors"
MANIFEST = "manifest.json"
FORMAT = 1
MAX_MANIFEST_BYTES = 1 << 26


class CheckpointError(ValueError):
    """There is no usable checkpoint, or this one is damaged. The message is one line."""


@dataclass(frozen=True, slots=True)
class DataCursor:
    """Position in a peer's stream of data, in batches. The seed and the incarnation that started it name the stream."""

    seed: int
    incarnation: int
    position: int


@dataclass(frozen=True, slots=True)
class FileDigest:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk, the state before `round`, after the record with the hash `lineage`.

    `carried` are tokens of uncounted work in the local parameters, which the checkpoint does not contain. `threads` is
    the number of threads that the worker computed with; 0: not known.
    """

    path: Path
    run: str
    round: int
    lineage: bytes
    state_root: bytes
    layout: Layout
    index: SnapshotIndex
    data: DataCursor
    carried: int
    files: Mapping[str, FileDigest]
    threads: int = 0

    @property
    def name(self) -> str:
        return name_of(self.round, self.lineage)

    @property
    def inner(self) -> Path | None:
        """Path of the inner optimiser's state, if the checkpoint has one."""
        return self.path / INNER if INNER in self.files else None

    @property
    def feedback(self) -> Path | None:
        return self.path / FEEDBACK if FEEDBACK in self.files else None

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def snapshot(self) -> Snapshot:
        """Its outer state, for serving it to joiners and for reading it. Raises OSError if the file was replaced."""
        sizes = self.layout.sizes()
        buffer = outer_buffer(self.path / OUTER, sizes, self.round, self.lineage, there=True)
        return Snapshot(self.lineage, self.round, self.index, buffer)

    def parameters(self) -> tuple[Vector, ...]:
        """The outer parameters: a flat float32 vector for each fragment of the layout. Raises CheckpointError."""
        sizes = self.layout.sizes()
        held = tensors.fragments((PARAMETERS, VELOCITY), sizes)
        into = {name: torch.empty(shape) for name, (_, shape) in held.items()}
        try:
            tensors.read(self.path / OUTER, into)
        except (OSError, tensors.Unreadable) as error:
            raise CheckpointError(f"{self.path / OUTER} cannot be read: {_why(error)}") from None
        return tuple(into.values())[: len(sizes)]


def name_of(round_number: int, lineage: bytes) -> str:
    return f"{round_number:06d}-{lineage.hex()[:12]}"


# -- finding ----------------------------------------------------------------------------------------------------------


def newest(directory: Path) -> Checkpoint:
    """Find the latest undamaged checkpoint of a peer, which may be running. It verifies all bytes, about 1 GB a second.

    Raises CheckpointError, whose message names the damaged ones.
    """
    damaged: list[str] = []
    for checkpoint in whole(directory, damaged.append):
        return checkpoint
    raise CheckpointError("; ".join([f"{directory} holds no whole checkpoint", *damaged]))


def whole(directory: Path, say: Callable[[str], None], run: str = "") -> Iterator[Checkpoint]:
    """Yield a peer's undamaged checkpoints of one run (empty: of any), newest first, each just after its verification.

    `say` gets one line for each one that is damaged or of another run. Raises CheckpointError.
    """
    try:
        there = places(directory / DIRECTORY)
    except OSError as error:
        raise CheckpointError(f"{directory / DIRECTORY} cannot be read ({_why(error)}): repair it") from None
    for path in reversed(there):
        try:
            checkpoint = verified(path)
            if run and checkpoint.run != run:
                raise CheckpointError(f"the checkpoint {path} is of another run, {checkpoint.run[:12]}")
        except CheckpointError as error:
            say(f"{error}: it is not used")
        else:
            yield checkpoint


def places(home: Path, drafts: bool = False) -> list[Path]:
    """List the directories of checkpoints, oldest first, unverified; or of the unfinished ones. Raises OSError."""
    try:
        names = sorted(each.name for each in os.scandir(home) if each.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    return [home / name for name in names if name.startswith(".") == drafts]


def verified(path: Path) -> Checkpoint:
    """Read the checkpoint in a directory, and compare each file with its digest. Raises CheckpointError."""
    try:
        checkpoint = described(path)
        for name, file in checkpoint.files.items():
            opened = os.open(path / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.fstat(opened).st_size != file.size or digest(opened) != file.sha256:
                    raise CheckpointError(f"the checkpoint {path} is damaged: {name} is not what it was")
            finally:
                os.close(opened)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {_why(error)}") from None
    return checkpoint


def described(path: Path) -> Checkpoint:
    """Read the manifest in a directory, without looking at the other files. Raises CheckpointError and OSError."""
    with (path / MANIFEST).open("rb") as file:
        data = file.read(MAX_MANIFEST_BYTES)
    try:
        fields = json.loads(data)
        if type(fields) is dict and fields.get("format", FORMAT) != FORMAT:
            raise CheckpointError(f"the checkpoint {path} is of format {str(fields['format'])[:10]}: update Starling")
        own = fields.pop("digest")
        is_intact = own == hashlib.sha256(encode(fields)).hexdigest() and data == encode(fields | {"digest": own})
        if not is_intact:
            raise ValueError
        checkpoint = parse(path, fields)
        if checkpoint.name != path.name.removeprefix("."):
            raise ValueError
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, BadPayload):
        raise CheckpointError(f"the checkpoint {path} is damaged: {MANIFEST} is not what it was") from None
    return checkpoint


def parse(path: Path, fields: Mapping[str, Any]) -> Checkpoint:
    """Build a checkpoint from the fields of its manifest. Raises ValueError, KeyError or TypeError."""
    layout = Layout(
        tuple(tuple((name, tuple(shape)) for name, shape in fragment) for fragment in fields["layout"]),
    )
    threads = fields.get("threads", 0)  # older checkpoints have none
    if type(threads) is not int or threads < 0:
        raise ValueError
    if list(layout.sizes()) != fields["elements"] or not fields["files"].keys() <= {OUTER, INNER, FEEDBACK}:
        raise ValueError
    files = {name: FileDigest(each["size"], each["sha256"]) for name, each in fields["files"].items()}
    made = Checkpoint(
        path=path,
        run=fields["run"],
        round=fields["round"],
        lineage=bytes.fromhex(fields["lineage"]),
        state_root=bytes.fromhex(fields["state_root"]),
        layout=layout,
        index=SnapshotIndex.unpack(sum(layout.sizes()), bytes.fromhex(fields["outer_digests"])),
        data=DataCursor(**fields["data"]),
        carried=fields["carried_tokens"],
        files=files,
        threads=threads,
    )
    start = len(outer_header(layout.sizes(), made.round, made.lineage))
    if files[OUTER].size != start + 8 * made.index.elements or made.index.state_root(made.round) != made.state_root:
        raise ValueError
    return made


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def digest(file: int) -> str:
    """SHA-256 of an open file, in hex."""
    found, piece, at = hashlib.sha256(), memoryview(bytearray(tensors.PIECE_BYTES)), 0
    while count := os.preadv(file, [piece], at):
        found.update(piece[:count])
        at += count
    return found.hexdigest()


def encode(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, indent=1, sort_keys=True).encode() + b"\n"


def publish_checkpoint(made: Checkpoint, inner: bool, feedback: bool = False) -> Checkpoint:
    """Publish a hidden directory as a checkpoint, which then survives a crash or a power failure.

    Without `inner` (or `feedback`), the file of that name is deleted. If it raises OSError, there is no checkpoint.
    """
    draft, home = made.path, made.path.parent
    there = {OUTER: True, INNER: inner, FEEDBACK: feedback}
    names = [name for name, one in there.items() if one]
    for name in there.keys() - names:
        (draft / name).unlink(missing_ok=True)
    files = {name: FileDigest((draft / name).stat().st_size, _flushed(draft / name)) for name in names}
    fields = _describe(made, files)
    file = os.open(draft / MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        tensors.put(file, encode(fields), 0)
        os.fsync(file)
    finally:
        os.close(file)
    sync_directory(draft)
    place = home / made.name
    if place.exists():  # a damaged one, or an identical one
        shutil.rmtree(place)
    draft.rename(place)
    sync_directory(home)
    sync_directory(home.parent)  # before the first checkpoint, `home` may itself be new
    return parse(place, fields)


def _flushed(path: Path) -> str:
    """Flush a file to disk, and return the digest of its content."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = digest(file)
        os.fsync(file)
        return found
    finally:
        os.close(file)


def _describe(made: Checkpoint, files: Mapping[str, FileDigest]) -> dict[str, Any]:
    fields = {
        "format": FORMAT,
        "run": made.run,
        "round": made.round,
        "lineage": made.lineage.hex(),
        "state_root": made.state_root.hex(),
        "elements": list(made.layout.sizes()),
        "layout": [[[name, list(shape)] for name, shape in fragment] for fragment in made.layout.fragments],
        "outer_digests": made.index.pack().hex(),
        "data": {"seed": made.data.seed, "incarnation": made.data.incarnation, "position": made.data.position},
        "carried_tokens": made.carried,
        "threads": made.threads,
        "error_feedback": FEEDBACK if FEEDBACK in files else None,
        "files": {name: {"size": file.size, "sha256": file.sha256} for name, file in files.items()},
    }
    return fields | {"digest": hashlib.sha256(encode(fields)).hexdigest()}
