"""Text as bytes: the training text of a peer, and a sample that no peer trains on.

A hash of its relative path decides whether a file is held out. So each peer that has a file decides the same, whatever
else its folder contains. Of a single file, and where that would hold out no file, a hash of its content decides the
same of each block (`node.tasks.readers`). Only plain text is read: rows of JSON or CSV are not what this task is for.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import os
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from node.runtime.directories import cache_directory, cached_file
from node.tasks.files import Selection, look, named, select, shown
from node.tasks.given_data import DataState, GivenData
from node.tasks.readers import blocks, bytes_of, text_of

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


def load(path: Path | None = None, sample: Path | None = None, given: GivenData | None = None) -> Text:
    """Read the text: the standard library's source unless a file or a folder is given.

    The standard library differs between Python versions, so a run sends its held-out sample (at most `HELD_OUT_BYTES`)
    to all peers. Of a single file, and where no file of a folder is held out, some blocks are. A text of over 64 MiB is
    copied into a file in the user's cache, which all processes map, and which may be deleted.
    """
    try:
        evaluated = None if sample is None else _map(sample)[:HELD_OUT_BYTES]
        stdlib = Path(sysconfig.get_path("stdlib"))
        found = Selection(_standard_library(stdlib), {}) if path is None else select(path, has_rows=False)
        root = stdlib if path is None else path if path.is_dir() else path.parent
        source = _Source(root, [each.relative_to(root).as_posix() for each in found.files])
        known = b"" if evaluated is None or path is None else evaluated.numpy().tobytes()
        text = _split(source, known, is_file=path == found.files[0])
    except OSError as error:
        raise ValueError(f"cannot read {error.filename or path or sample}: {error.strerror}") from error
    if given:
        given.tell([*found.lines(), *source.lines()] if path else ())
        given.keep(DataState(len(found.files), found.size, 0, source.digest(text.training)))
    return text if evaluated is None else Text(text.training, evaluated)


def _standard_library(root: Path) -> tuple[Path, ...]:
    files = (each for each in sorted(root.rglob("*.py")) if each.is_file())
    return tuple(each for each in files if not _SKIPPED.intersection(each.relative_to(root).parts))


def _map(path: Path) -> torch.Tensor:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
    if size == 0:
        raise ValueError(f"{path} is empty")
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def held_out(relative: str) -> bool:
    """Whether the file with this relative path (with slashes) is held out. About one file in 16 is."""
    return _is_chosen(relative.encode(errors="surrogateescape"))


def _is_chosen(content: bytes) -> bool:
    return hashlib.sha256(content).digest()[0] % _HELD_OUT_SHARE == 0


class _Source:
    def __init__(self, root: Path, names: Iterable[str]) -> None:
        self.root, self.names = root, sorted(names)
        self._other: dict[str, None] = {}

    def size(self, names: Iterable[str]) -> int:
        return sum((self.root / name).stat().st_size for name in names)

    def pieces(self, name: str) -> Iterator[bytes]:
        """A file's text in pieces: UTF-16 becomes UTF-8, and bytes of an unknown encoding stay as they are."""
        path = self.root / name
        found = look(path)
        if found.encoding != "utf-8-sig":
            yield from (text.encode() for text in text_of(path, found))
            return
        decoder: codecs.IncrementalDecoder = codecs.getincrementaldecoder("utf-8")()
        mark = b"\xef\xbb\xbf"
        for piece in bytes_of(path, found.packing):
            if b"\0" in piece:
                raise ValueError(f"{shown(path)} is not text: it contains NUL bytes; remove the file, or convert it")
            try:
                decoder.decode(piece)
            except UnicodeDecodeError:
                decoder = codecs.getincrementaldecoder("latin-1")()
                self._other[name] = None
            yield piece.removeprefix(mark)
            mark = b""

    def lines(self) -> list[str]:
        if not (names := [*map(shown, self._other)]):
            return []
        return [f"{'encoding':12}{len(names):,} not in UTF-8, whose bytes are trained on as they are: {named(names)}"]

    def digest(self, text: torch.Tensor) -> str:
        """Changes when the files do, of large ones when their names or sizes do."""
        known = json.dumps([(name, (self.root / name).stat().st_size) for name in self.names])
        content = text.numpy().tobytes() if len(text) <= _IN_MEMORY_BYTES else b""
        return hashlib.sha256(known.encode() + content).hexdigest()

    def text(self, names: Sequence[str], salt: str, wanted: Callable[[bytes], bool] | None) -> torch.Tensor:
        """The text of these files, or their wanted blocks: in memory or, if large, in the cache for later calls."""

        def write(file: BinaryIO) -> None:
            for name in names:
                pieces = self.pieces(name)
                file.writelines(filter(wanted, blocks(pieces)) if wanted else pieces)

        if self.size(names) <= _IN_MEMORY_BYTES:
            buffer = io.BytesIO()
            write(buffer)
            text = bytearray(buffer.getbuffer())
            return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        states = ((name, (state := (self.root / name).stat()).st_size, state.st_mtime_ns) for name in names)
        described = [str(self.root.resolve()), salt, *states]
        name = f"{hashlib.sha256(json.dumps(described).encode()).hexdigest()}.text"
        path = cache_directory() / name
        return _map(path if path.exists() else cached_file(name, write))


def _split(source: _Source, sample: bytes, is_file: bool) -> Text:
    """Training text and held-out text: whole files by their paths or, of too few files, blocks by their content."""
    training, others = [each for each in source.names if not held_out(each)], list(filter(held_out, source.names))
    if by_blocks := is_file or not training or not others:  # the hash put all on one side
        training = others = source.names
    known = set(blocks([sample])) or (_least(source) if by_blocks else set())

    def is_kept(block: bytes) -> bool:
        return block in known or (by_blocks and _is_chosen(block))

    salt = hashlib.sha256(sample).hexdigest()
    text = source.text(training, salt, (lambda block: not is_kept(block)) if known or by_blocks else None)
    if sample:
        return Text(_without(text, sample), torch.empty(0, dtype=torch.uint8))
    evaluated = source.text(others, f"held out {salt}", is_kept if by_blocks else None)
    if by_blocks and not (len(text) and len(evaluated)):  # there is only one block
        text = text if len(text) else evaluated
        if not (size := min(HELD_OUT_BYTES, len(text) // _HELD_OUT_SHARE)):
            raise ValueError(f"{source.root / source.names[0]} has only {len(text)} bytes of text")
        return Text(text[:-size], text[-size:])
    return Text(text, _sample(evaluated))


def _least(source: _Source) -> set[bytes]:
    """The blocks to hold out beside those that a hash chooses, so that they are a share of a small text, too."""
    if source.size(source.names) > _IN_MEMORY_BYTES:
        return set()
    every = [each for name in source.names for each in blocks(source.pieces(name))]
    missed = min(HELD_OUT_BYTES, sum(map(len, every)) // _HELD_OUT_SHARE) - sum(map(len, filter(_is_chosen, every)))
    found: set[bytes] = set()
    for block in sorted({*every}, key=lambda each: hashlib.sha256(each).digest()):
        if missed <= 0 or len(found) + 1 == len({*every}):
            break
        if not _is_chosen(block):
            found.add(block)
            missed -= len(block)
    return found


def _without(text: torch.Tensor, sample: bytes) -> torch.Tensor:
    """A small text without the sample, where that was no block of its own."""
    if len(text) > _IN_MEMORY_BYTES or sample not in (content := text.numpy().tobytes()):
        return text
    return torch.frombuffer(bytearray(content.replace(sample, b"")), dtype=torch.uint8)


def _sample(text: torch.Tensor) -> torch.Tensor:
    """At most `HELD_OUT_BYTES` of a text, in blocks spread evenly over it, so that the first files do not dominate."""
    blocks = HELD_OUT_BYTES // _BLOCK
    if len(text) <= HELD_OUT_BYTES:
        return text
    starts = ((len(text) - _BLOCK) * block // (blocks - 1) for block in range(blocks))
    return torch.cat([text[start : start + _BLOCK] for start in starts])
