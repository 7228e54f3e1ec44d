"""Rows of tokens of equal length, made once from a peer's data and mapped from files after that.

    tokens.bin      int32, one row after the other
    flags.bin       uint8: 1 the token is a target, 2 a document begins
    sample.jsonl    held-out documents
    about.json      `RowCounts`

The directory's name is a hash of everything that decides its content.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from node.tasks.hf.chat import Encoder
from node.tasks.hf.corpus import Document, Sample, is_held_out, read_documents
from node.tasks.hf.digests import cache_directory
from node.tasks.hf.settings import HfSettings, ModelError

FORMAT = 1
TARGET, START = 1, 2
MASKED = -100
"""Label of a token that is no target."""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """What the data hold.

    Attributes:
        documents: those to train on.
        held_out: documents that no peer trains on.
        tokens: of the documents to train on, without padding.
        targets: tokens from which something is learnt.
        cut: conversations that were longer than a row, and are cut.
        skipped: documents without a target.
    """

    rows: int = 0
    documents: int = 0
    held_out: int = 0
    tokens: int = 0
    targets: int = 0
    cut: int = 0
    skipped: int = 0


class RowWriter:
    """Fills rows. A text is cut where a row ends; a conversation that does not fit begins another."""

    def __init__(self, settings: HfSettings, write: Callable[[array[int], bytearray], None]) -> None:
        """
        Args:
            write: takes each full row: its tokens and its flags.
        """
        self._context, self._packs, self._cuts = settings.context, settings.pack, settings.format == "text"
        self._write = write
        self._tokens, self._flags = array("i"), bytearray()
        self.rows = self.tokens = self.targets = self.cut = 0

    def add(self, tokens: list[int], mask: list[int]) -> None:
        """Add a document."""
        if not self._cuts and len(tokens) > self._context:
            self.cut += 1
            tokens, mask = tokens[: self._context], mask[: self._context]
        low = 0
        while low < len(tokens):
            room = self._context - len(self._tokens)
            if room < 2 or (not self._cuts and len(tokens) > room) or (self._tokens and not self._packs):
                self.flush()
                continue
            self._put(tokens[low : low + room], mask[low : low + room])
            low += room

    def _put(self, tokens: list[int], mask: list[int]) -> None:
        self._tokens.extend(tokens)
        # The first token of a document is never predicted.
        self._flags.append(START)
        self._flags.extend(TARGET if each else 0 for each in mask[1:])
        self.tokens += len(tokens)
        self.targets += sum(mask[1:])

    def flush(self) -> None:
        """Pad the last row and write it."""
        if not self._tokens:
            return
        padding = self._context - len(self._tokens)
        self._tokens.extend([0] * padding)
        if padding:
            self._flags.append(START)
            self._flags.extend(bytes(padding - 1))
        self._write(self._tokens, self._flags)
        self.rows += 1
        self._tokens, self._flags = array("i"), bytearray()


class Rows:
    """Rows of tokens, in memory or mapped from a file."""

    def __init__(self, tokens: torch.Tensor, flags: torch.Tensor) -> None:
        """
        Args:
            tokens, flags: (rows, context), int32 and uint8.
        """
        self._tokens, self._flags = tokens, flags
        self._order: tuple[tuple[int, int], torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    def take(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(tokens, positions, labels) of these rows, int64 (rows, context). Positions restart with each document."""
        tokens, flags = self._tokens[rows].long(), self._flags[rows]
        index = torch.arange(tokens.shape[1]).expand_as(tokens)
        begins = (flags & START).bool()
        positions = index - torch.where(begins, index, 0).cummax(1).values
        labels = torch.full_like(tokens, MASKED)
        labels[:, :-1] = torch.where((flags[:, 1:] & TARGET).bool() & ~begins[:, 1:], tokens[:, 1:], MASKED)
        return tokens, positions, labels

    def batch(self, seed: int, position: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The `position`-th batch of a stream: all rows once in the order that the seed gives, then in another."""
        first = position * count
        return self.take(torch.stack([self._at(seed, each) for each in range(first, first + count)]))

    def _at(self, seed: int, number: int) -> torch.Tensor:
        epoch, index = divmod(number, len(self))
        if self._order is None or self._order[0] != (seed, epoch):
            digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            self._order = (seed, epoch), torch.randperm(len(self), generator=generator)
        return self._order[1][index]

    def spread(self, count: int) -> torch.Tensor:
        """Indices of at most `count` rows, evenly over all."""
        count = min(count, len(self))
        return torch.tensor([(len(self) - 1) * each // max(1, count - 1) for each in range(count)])


def rows_of(documents: Iterable[Document], encoder: Encoder, settings: HfSettings) -> Rows:
    """Rows of a few documents, in memory."""
    tokens, flags = array("i"), bytearray()

    def write(row: array[int], marks: bytearray) -> None:
        tokens.extend(row)
        flags.extend(marks)

    writer = RowWriter(settings, write)
    for document in documents:
        ids, mask = encoder.encode(document)
        if any(mask[1:]):
            writer.add(ids, mask)
    writer.flush()
    shape = (writer.rows, settings.context)
    if not writer.rows:
        return Rows(torch.empty(shape, dtype=torch.int32), torch.empty(shape, dtype=torch.uint8))
    return Rows(
        torch.frombuffer(tokens, dtype=torch.int32).view(shape), torch.frombuffer(flags, dtype=torch.uint8).view(shape)
    )


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A peer's data, prepared for training.

    Attributes:
        sample: the held-out documents, as JSON lines.
    """

    rows: Rows
    counts: RowCounts
    sample: bytes


def prepare(files: list[Path], encoder: Encoder, settings: HfSettings, tokenizer: str) -> PreparedData:
    """Tokenise the files, or map the rows that an earlier call has made of them.

    Args:
        tokenizer: digest of the tokenizer and the template.

    Raises:
        ModelError: a file cannot be read, or there is nothing to learn in them.
    """
    try:
        states = [(str(each.resolve()), each.stat().st_size, each.stat().st_mtime_ns) for each in files]
        shape = [FORMAT, settings.context, settings.format, settings.pack, tokenizer]
        key = hashlib.sha256(json.dumps([states, shape]).encode()).hexdigest()
        place = cache_directory() / f"rows-{key[:40]}"
        if not (place / "about.json").exists():
            _make(place, files, encoder, settings)
        counts = RowCounts(**json.loads((place / "about.json").read_text()))
        if not counts.rows:
            raise ModelError(f"{files[0]} and {len(files) - 1} more: no text to learn from, beside what is held out")
        size, dimensions = counts.rows * settings.context, (counts.rows, settings.context)
        tokens = torch.from_file(str(place / "tokens.bin"), shared=False, size=size, dtype=torch.int32)
        flags = torch.from_file(str(place / "flags.bin"), shared=False, size=size, dtype=torch.uint8)
        return PreparedData(
            Rows(tokens.view(dimensions), flags.view(dimensions)), counts, (place / "sample.jsonl").read_bytes()
        )
    except OSError as error:
        raise ModelError(f"{error.filename or files[0]}: {error.strerror or error}") from None


def _make(place: Path, files: list[Path], encoder: Encoder, settings: HfSettings) -> None:
    """Create the directory, atomically: other peers on this machine may be creating it, too."""
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=place.parent))
    try:
        held_out, counts = _fill(draft, files, encoder, settings, is_held_out)
        if not counts.held_out and counts.documents > 1:  # few documents: hold out one of them
            least = min(each.key() for each in read_documents(files, settings.format == "chat"))
            held_out, counts = _fill(draft, files, encoder, settings, lambda each: each.key() == least)
        (draft / "sample.jsonl").write_bytes(held_out)
        (draft / "about.json").write_text(json.dumps(asdict(counts)))
        if not (place / "about.json").exists():
            shutil.rmtree(place, ignore_errors=True)
            os.rename(draft, place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _fill(
    draft: Path, files: list[Path], encoder: Encoder, settings: HfSettings, keeps: Callable[[Document], bool]
) -> tuple[bytes, RowCounts]:
    """Write the rows; return the held-out documents, which `keeps` chooses, and the counts."""
    sample, documents, held_out, skipped = Sample(), 0, 0, 0
    with (draft / "tokens.bin").open("wb") as tokens, (draft / "flags.bin").open("wb") as flags:

        def write(row: array[int], marks: bytearray) -> None:
            row.tofile(tokens)
            flags.write(marks)

        writer = RowWriter(settings, write)
        for document in read_documents(files, settings.format == "chat"):
            if keeps(document):
                held_out += 1
                sample.add(document)
                continue
            ids, mask = encoder.encode(document)
            if any(mask[1:]):
                documents += 1
                writer.add(ids, mask)
            else:
                skipped += 1
        writer.flush()
    counts = RowCounts(writer.rows, documents, held_out, writer.tokens, writer.targets, writer.cut, skipped)
    return sample.lines(), counts
