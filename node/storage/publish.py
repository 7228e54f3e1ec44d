"""Turn a hidden directory with a checkpoint's files into a checkpoint: hash them, flush them, rename the directory."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from node.runtime import tensors
from node.runtime.identity import sync_directory
from node.storage.checkpoint import (
    FEEDBACK,
    FORMAT,
    INNER,
    MANIFEST,
    OUTER,
    Checkpoint,
    FileDigest,
    digest,
    encode,
    parse,
)


def publish_checkpoint(made: Checkpoint, inner: bool, feedback: bool = False) -> Checkpoint:
    """Publish a hidden directory as a checkpoint, which then survives a crash or a power failure.

    Args:
        made: the checkpoint; its path is that of the hidden directory, and its `files` are ignored.
        inner: whether it has an inner state; if not, the file of that name is deleted.
        feedback: the same for the error feedback.

    Raises:
        OSError: it cannot be written; there is no checkpoint then.
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
