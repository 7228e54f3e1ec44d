"""Checkpoints: the state of a peer before a round, in files that are whole or not there, and known to be damaged if so.

    checkpoints/000015-3f2a9c01d4e7/        before round 15, after the record of that lineage
        outer.safetensors                   the outer parameters and momentum: what newcomers are handed out, too
        inner.safetensors                   moments and steps of this peer's AdamW; missing where none could be saved
        feedback.safetensors                what of this peer's work was not sent yet, where a codec sends parts of it
        manifest.json                       what the others are, with the digest of each; and a digest of itself
    checkpoints/.000015-3f2a9c01d4e7/       one in the making, or a download that was broken off

One is made in a hidden directory, flushed, and renamed into place. Its local parameters are the outer ones: at a
checkpoint a peer trains on from there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from node.storage import tensors
from node.storage.file_buffer import PARAMETERS, VELOCITY, outer_buffer, outer_header
from protocols.base import BadPayload, Layout, Vector
from protocols.sync.snapshot import Snapshot, SnapshotIndex

DIRECTORY = "checkpoints"
OUTER, INNER, FEEDBACK = "outer.safetensors", "inner.safetensors", "feedback.safetensors"
MANIFEST = "manifest.json"
FORMAT = 1
MAX_MANIFEST_BYTES = 1 << 26


class CheckpointError(ValueError):
    """There is no checkpoint to use, or this one is damaged; one line."""


@dataclass(frozen=True, slots=True)
class DataCursor:
    """Where a peer's stream of data stands.

    Attributes:
        seed: of the stream.
        incarnation: the life of the peer that began it.
        position: batches drawn.
    """

    seed: int
    incarnation: int
    position: int


@dataclass(frozen=True, slots=True)
class FileDigest:
    """One file of a checkpoint.

    Attributes:
        sha256: of its bytes, hex.
    """

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One that is there, whole when it was verified.

    Attributes:
        path: its directory.
        run: id of the run, 64 hex digits.
        round: the round that comes next.
        lineage: of the record that led there, 32 bytes.
        state_root: of the outer state, 32 bytes.
        layout: of the parameters.
        index: digests of the outer state's chunks.
        data: where the worker's data go on.
        carried: tokens of work that the local parameters held beyond the outer ones, and that is not kept.
        files: name -> what it is.
        threads: that the worker computed with; 0: not known.
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
        """The file of the inner optimiser, if there is one."""
        return self.path / INNER if INNER in self.files else None

    @property
    def feedback(self) -> Path | None:
        """The file of what was not sent yet, if there is one."""
        return self.path / FEEDBACK if FEEDBACK in self.files else None

    @property
    def bytes(self) -> int:
        """What its files take."""
        return sum(file.size for file in self.files.values())

    def snapshot(self) -> Snapshot:
        """Its outer state, to be handed out and to be read.

        Raises:
            OSError: it has gone, or changed since it was verified.
        """
        sizes = self.layout.sizes()
        room = outer_buffer(self.path / OUTER, sizes, self.round, self.lineage, there=True)
        return Snapshot(self.lineage, self.round, self.index, room)

    def parameters(self) -> tuple[Vector, ...]:
        """The outer parameters: a flat float32 vector for each fragment of the layout.

        Raises:
            CheckpointError: it has gone, or changed since it was verified.
        """
        sizes = self.layout.sizes()
        held = tensors.fragments((PARAMETERS, VELOCITY), sizes)
        into = {name: torch.empty(shape) for name, (_, shape) in held.items()}
        try:
            tensors.read(self.path / OUTER, into)
        except (OSError, tensors.Unreadable) as error:
            raise CheckpointError(f"{self.path / OUTER} cannot be read: {_why(error)}") from None
        return tuple(into.values())[: len(sizes)]


def name_of(round_number: int, lineage: bytes) -> str:
    """Of a checkpoint's directory."""
    return f"{round_number:06d}-{lineage.hex()[:12]}"


# -- finding ----------------------------------------------------------------------------------------------------------


def newest(directory: Path) -> Checkpoint:
    """The latest whole checkpoint of a peer: verified, which reads all of it, at about a second a gigabyte.

    `run` and `round` say what it is of, `layout` names and shapes the tensors, `parameters()` are the outer parameters
    as flat vectors, one for each of the layout's fragments (of which there is one today).

    Args:
        directory: the peer's state directory. A running peer may replace its checkpoints while this one is read.

    Raises:
        CheckpointError: there is none; one line, that names the damaged ones.
    """
    damaged: list[str] = []
    for checkpoint in whole(directory, damaged.append):
        return checkpoint
    raise CheckpointError("; ".join([f"{directory} holds no whole checkpoint", *damaged]))


def whole(directory: Path, say: Callable[[str], None], run: str = "") -> Iterator[Checkpoint]:
    """The whole checkpoints of a peer, the newest first, each verified when its turn comes.

    Args:
        directory: the peer's state directory.
        say: told one line of each that is damaged.
        run: id of the run that they have to be of; empty: any.

    Raises:
        CheckpointError: where they are cannot be read; one line.
    """
    try:
        there = places(directory / DIRECTORY)
    except OSError as error:
        raise CheckpointError(f"{directory / DIRECTORY} cannot be read ({_why(error)}): set that right") from None
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
    """Directories of checkpoints, whole or not, the oldest first; or those that are in the making.

    Raises:
        OSError: it cannot be read; that there is none is no error.
    """
    try:
        names = sorted(each.name for each in os.scandir(home) if each.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    return [home / name for name in names if name.startswith(".") == drafts]


def verified(path: Path) -> Checkpoint:
    """The checkpoint in a directory, every byte of it compared with its digest.

    Raises:
        CheckpointError: it is not whole; one line.
    """
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
    """What the manifest in a directory says; the other files are not looked at.

    Raises:
        CheckpointError: it is damaged, or of another version.
        OSError: it cannot be read.
    """
    with (path / MANIFEST).open("rb") as file:
        data = file.read(MAX_MANIFEST_BYTES)
    try:
        fields = json.loads(data)
        if type(fields) is dict and fields.get("format", FORMAT) != FORMAT:
            raise CheckpointError(f"the checkpoint {path} is of format {str(fields['format'])[:10]}: update Starling")
        said = fields.pop("digest")
        sound = said == hashlib.sha256(encode(fields)).hexdigest() and data == encode(fields | {"digest": said})
        if not sound:
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
    """
    Raises:
        ValueError, KeyError, TypeError: no manifest that this version writes.
    """
    layout = Layout(
        tuple(tuple((name, tuple(shape)) for name, shape in fragment) for fragment in fields["layout"]),
    )
    threads = fields.get("threads", 0)  # checkpoints of before threads were measured have none
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
    """SHA-256 of an open file, hex; read in pieces."""
    found, piece, at = hashlib.sha256(), memoryview(bytearray(tensors.PIECE_BYTES)), 0
    while count := os.preadv(file, [piece], at):
        found.update(piece[:count])
        at += count
    return found.hexdigest()


def encode(fields: Mapping[str, Any]) -> bytes:
    """The one spelling of a manifest."""
    return json.dumps(fields, indent=1, sort_keys=True).encode() + b"\n"
