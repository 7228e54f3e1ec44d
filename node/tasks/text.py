"""Text as bytes: the training text of a peer, and a sample that no peer trains on.

A hash of its relative path decides whether a file is held out. So each peer that has a file decides the same, whatever
else its folder contains.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from node.runtime.directories import cache_directory

HELD_OUT_BYTES = 256 << 10
_HELD_OUT_SHARE = 16  # one file, or one byte, of this many is held out
_BLOCK = 4 << 10
_IN_MEMORY_BYTES = 64 << 20
_SKIPPED = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """Training text and held-out text, uint8 vectors. They share no file or, if there is only one file, no byte."""

    training: torch.Tensor
    held_out: torch.Tensor

    def require(self, width: int) -> None:
        """Check that both texts are long enough.

        Raises:
            ValueError: one of the two is shorter than a window of `width` bytes.
        """
        for words, part in (("training", self.training), ("held-out", self.held_out)):
            if len(part) < width:
                raise ValueError(f"the {words} text has {len(part)} bytes: a window takes {width}")

    def windows(self, seed: int, position: int, rows: int, width: int) -> torch.Tensor:
        """The `position`-th batch of a stream: int64 (rows, width), at offsets that depend only on (seed, position)."""
        draw = random.Random(f"{seed}/{position}")
        starts = [draw.randrange(len(self.training) - width + 1) for _ in range(rows)]
        return torch.stack([self.training[start : start + width] for start in starts]).long()

    def held_out_windows(self, rows: int, width: int) -> torch.Tensor:
        """At most `rows` windows, int64 (rows, width), spread evenly over the held-out text without overlap."""
        rows = min(rows, len(self.held_out) // width)
        last = len(self.held_out) - width
        starts = [last * row // max(1, rows - 1) for row in range(rows)]
        return torch.stack([self.held_out[start : start + width] for start in starts]).long()


def load(path: Path | None = None, sample: Path | None = None) -> Text:
    """Read the text: the standard library's source unless a file or a folder is given.

    Of the standard library it uses all *.py files without tests, idlelib, lib2to3 and site-packages, about 11 MB. They
    differ between Python versions, so a run sends its held-out sample (at most `HELD_OUT_BYTES`) to all peers.

    Of a folder it uses all files that are not hidden. If they are over 64 MiB, it copies them into one file in the
    user's cache, which all processes map, and which may be deleted. A single file is mapped, and its end is held out.

    Args:
        sample: a file to evaluate on instead of the held-out part of this text, which is not trained on either.

    Raises:
        ValueError: the path is missing, empty or unreadable. The message is one line that names it.
    """
    try:
        text = _load(path)
        return text if sample is None else Text(text.training, _map(sample)[:HELD_OUT_BYTES])
    except OSError as error:
        raise ValueError(f"cannot read {error.filename or path}: {error.strerror}") from error


def _load(path: Path | None) -> Text:
    if path is None:
        return _split(*_standard_library())
    if path.is_file():
        return _split_bytes(_map(path), str(path))
    if not path.is_dir():
        raise ValueError(f"no file or folder {path}: give a text to train on by --data")
    return _split(path, (file for file in path.rglob("*") if _visible(file.relative_to(path))))


def _standard_library() -> tuple[Path, Iterable[Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    return root, (file for file in root.rglob("*.py") if not _SKIPPED.intersection(file.relative_to(root).parts))


def _visible(relative: Path) -> bool:
    return not any(part.startswith(".") for part in relative.parts)


def _map(path: Path) -> torch.Tensor:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
    if size == 0:
        raise ValueError(f"{path} is empty")
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def held_out(relative: str) -> bool:
    """Whether the file with this relative path (with slashes) is held out. About one file in 16 is."""
    return hashlib.sha256(relative.encode(errors="surrogateescape")).digest()[0] % _HELD_OUT_SHARE == 0


def _split(root: Path, files: Iterable[Path]) -> Text:
    """Read the training files and the held-out files, each in the order of their relative paths."""
    names = sorted(file.relative_to(root).as_posix() for file in files if file.is_file())
    training = _read(root, [name for name in names if not held_out(name)])
    sample = _read(root, [name for name in names if held_out(name)])
    if not len(training) and not len(sample):
        raise ValueError(f"{root} holds no text")
    if not len(training) or not len(sample):  # too few files: the hash put all on one side
        return _split_bytes(training if len(training) else sample, str(root))
    return Text(training, _sample(sample))


def _read(root: Path, names: Sequence[str]) -> torch.Tensor:
    """The concatenated files, uint8."""
    states = [(root / name).stat() for name in names]
    if sum(state.st_size for state in states) > _IN_MEMORY_BYTES:
        described = [str(root.resolve()), *((n, s.st_size, s.st_mtime_ns) for n, s in zip(names, states, strict=True))]
        return _map(_copied(root, names, hashlib.sha256(json.dumps(described).encode()).hexdigest()))
    text = bytearray()
    for name in names:
        text.extend((root / name).read_bytes())
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _copied(root: Path, names: Sequence[str], digest: str) -> Path:
    """A file in the user's cache that contains all of them; created if it does not exist."""
    cache = cache_directory()
    path = cache / f"{digest}.text"
    if path.exists():
        return path
    descriptor, fresh = tempfile.mkstemp(dir=cache)
    try:
        with open(descriptor, "wb") as copy:
            for name in names:
                with open(root / name, "rb") as file:
                    shutil.copyfileobj(file, copy)
        os.replace(fresh, path)  # atomic, because other peers on this machine may be creating the same file
    except BaseException:
        os.unlink(fresh)
        raise
    return path


def _sample(text: torch.Tensor) -> torch.Tensor:
    """At most `HELD_OUT_BYTES` of a text, in blocks spread evenly over it, so that the first files do not dominate."""
    blocks = HELD_OUT_BYTES // _BLOCK
    if len(text) <= HELD_OUT_BYTES:
        return text
    starts = ((len(text) - _BLOCK) * block // (blocks - 1) for block in range(blocks))
    return torch.cat([text[start : start + _BLOCK] for start in starts])


def _split_bytes(text: torch.Tensor, name: str) -> Text:
    size = min(HELD_OUT_BYTES, len(text) // _HELD_OUT_SHARE)
    if size == 0:
        raise ValueError(f"{name} has only {len(text)} bytes of text")
    return Text(text[:-size], text[-size:])
