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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from node.runtime.directories import cache_directory
from node.tasks.files import shown
from node.tasks.hf.chat import Encoder
from node.tasks.hf.corpus import Document, Sample, Seen, is_held_out, joined, read_documents
from node.tasks.hf.settings import MAX_WORD_CHARACTERS, HfSettings, ModelError
from node.tasks.hf.source import file_state

FORMAT = 6
_KEPT_SECONDS = 30 * 86_400.0  # rows unused for so long are removed, as are unfinished ones
TARGET, START = 1, 2
TOKENS, FLAGS, SAMPLE, ABOUT = "tokens.bin", "flags.bin", "sample.jsonl", "about.json"
MASKED = -100  # label of a token that is not a target


@dataclass(slots=True)
class RowCounts:
    rows: int = 0
    documents: int = 0  # to train on; of a text, each part that a hash chooses for itself
    held_out: int = 0  # documents that no peer trains on
    tokens: int = 0  # of the documents to train on, without padding
    targets: int = 0
    cut: int = 0  # conversations that were longer than a row
    lost: int = 0  # conversations that have lost all their targets by that
    longest: int = 0  # tokens of the longest conversation
    skipped: int = 0  # documents without a target
    empty: int = 0  # answers without content, which are not targets
    unused: str = ""  # names of fields of conversations
    repeated: int = 0  # documents that are equal to an earlier one, and left out
    replaced: int = 0  # characters U+FFFD: the data, or their encoding, were damaged before
    digest: str = ""  # of all documents, in any order

    def lines(self, context: int) -> list[str]:
        masked = 1 - self.targets / self.tokens if self.tokens else 0.0
        found = [
            f"{'documents':12}{self.documents:,} to train on, {self.held_out:,} held out, {self.repeated:,} equal to "
            f"others and left out, {self.skipped:,} without targets",
            f"{'tokens':12}{self.tokens:,}, {masked:.1%} masked",
            f"{'characters':12}{self.replaced:,} replaced (U+FFFD)",
            f"{'rows':12}{self.rows:,} of {context:,} tokens",
        ]
        if self.cut:
            found.append(
                f"{'cut':12}{self.cut:,} conversations, of which {self.lost:,} lost all their targets: "
                f"hf.context = {self.longest} would keep all of them whole"
            )
        if self.empty:
            found.append(f"{'empty':12}{self.empty:,} answers without content: they are not targets")
        if self.unused:
            found.append(f"{'not used':12}{self.unused}: fields that the chat template does not show")
        return found


class RowWriter:
    """Fills rows, and counts them. A text is cut where a row ends; a conversation that does not fit begins another."""

    def __init__(self, settings: HfSettings, write: Callable[[array[int], bytearray], None]) -> None:
        self._context, self._packs, self._cuts = settings.context, settings.pack, settings.format == "text"
        self._write, self.counts = write, RowCounts()
        self._tokens, self._flags = array("i"), bytearray()

    def add(self, sequences: Sequence[tuple[list[int], list[int]]]) -> None:
        """Add the tokens and masks of a document, unless nothing is to be learnt from it."""
        taught = [each for each in sequences if any(each[1][1:])]
        kept = [each for each in taught if self._cuts or any(each[1][1 : self._context])]
        if not self._cuts and taught:
            longest = max(len(tokens) for tokens, _ in taught)
            self.counts.longest = max(self.counts.longest, longest)
            self.counts.cut += longest > self._context
        self.counts.lost += bool(taught) and not kept
        self.counts.skipped += not kept
        for tokens, mask in kept:
            self._add(tokens, mask)

    def _add(self, tokens: list[int], mask: list[int]) -> None:
        if not self._cuts:
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
        self.counts.tokens += len(tokens)
        self.counts.targets += sum(mask[1:])

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
        self.counts.rows += 1
        self._tokens, self._flags = array("i"), bytearray()


class Rows:
    def __init__(self, tokens: torch.Tensor, flags: torch.Tensor) -> None:
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
        return torch.tensor([(len(self) - 1) * each // max(1, count - 1) for each in range(count)], dtype=torch.long)


def rows_of(documents: Iterable[Document], encoder: Encoder, settings: HfSettings) -> Rows:
    tokens, flags = array("i"), bytearray()

    def write(row: array[int], marks: bytearray) -> None:
        tokens.extend(row)
        flags.extend(marks)

    writer = RowWriter(settings, write)
    for document in joined(documents):
        writer.add(encoder.encode(document))
    writer.flush()
    shape = (writer.counts.rows, settings.context)
    if not tokens:
        return Rows(torch.empty(shape, dtype=torch.int32), torch.empty(shape, dtype=torch.uint8))
    return Rows(
        torch.frombuffer(tokens, dtype=torch.int32).view(shape), torch.frombuffer(flags, dtype=torch.uint8).view(shape)
    )


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A peer's data, prepared for training; `sample` has the held-out documents, as JSON lines."""

    rows: Rows
    counts: RowCounts
    sample: bytes


def prepare(
    files: Sequence[Path],
    encoder: Encoder,
    settings: HfSettings,
    tokenizer: str,
    held_out: bytes = b"",
    home: Path | None = None,
) -> PreparedData:
    """Tokenise the files, or map the rows that an earlier call has made of them."""
    try:
        about = [list(map(file_state, files)), FORMAT, settings.context, settings.format, settings.pack, tokenizer]
        home = home or cache_directory()
        place = _place(home, about)
        counts = _counts(place, settings.context)
        if held_out and not (counts and (place / SAMPLE).read_bytes() == held_out):  # else they are this founder's own
            place = _place(home, [*about, hashlib.sha256(held_out).hexdigest()])
            counts = _counts(place, settings.context)
        if counts is None:
            _make(place, files, encoder, settings, frozenset(held_out.splitlines(keepends=True)))
            counts = RowCounts(**json.loads((place / ABOUT).read_text()))
        with suppress(OSError):
            os.utime(place)
        if not counts.rows:
            why = "no text to learn from, beside what is held out"
            if counts.lost:
                why = f"{counts.lost} conversations lost all targets: hf.context = {counts.longest} would keep them"
            raise ModelError(f"{shown(files[0])} and {len(files) - 1} more: {why}")
        size, dimensions = counts.rows * settings.context, (counts.rows, settings.context)
        tokens = torch.from_file(str(place / TOKENS), shared=False, size=size, dtype=torch.int32)
        flags = torch.from_file(str(place / FLAGS), shared=False, size=size, dtype=torch.uint8)
        return PreparedData(
            Rows(tokens.view(dimensions), flags.view(dimensions)), counts, (place / SAMPLE).read_bytes()
        )
    except OSError as error:
        raise ModelError(f"{error.filename or cache_directory()}: {error.strerror or error}") from None


def _place(home: Path, about: list[Any]) -> Path:
    return home / f"rows-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:40]}"


def _counts(place: Path, context: int) -> RowCounts | None:
    """The counts of prepared rows; None if there are none, or a crash of the machine has damaged them."""
    with suppress(OSError, ValueError, TypeError):
        counts = RowCounts(**json.loads((place / ABOUT).read_bytes()))
        sizes = [(place / name).stat().st_size for name in (TOKENS, FLAGS)]
        if sizes == [4 * counts.rows * context, counts.rows * context] and (place / SAMPLE).exists():
            return counts
    return None


def _make(place: Path, files: Sequence[Path], encoder: Encoder, settings: HfSettings, shared: frozenset[bytes]) -> None:
    """Create the directory, atomically: other peers on this machine may be creating it, too."""
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="rows-draft-", dir=place.parent))
    for each in place.parent.glob("rows-*"):
        with suppress(OSError):
            if draft.stat().st_mtime - each.stat().st_mtime > _KEPT_SECONDS:
                shutil.rmtree(each, ignore_errors=True)

    def keeps(document: Document) -> bool:
        return is_held_out(document) or (bool(shared) and document.line() in shared)

    try:
        held_out, counts = _fill(draft, files, encoder, settings, keeps)
        if not shared and not (counts.held_out and counts.documents):  # few documents: hold out one of several
            keys = {each.key() for each in read_documents(files, settings.format == "chat")}
            least = min(keys) if len(keys) > 1 else b""
            held_out, counts = _fill(draft, files, encoder, settings, lambda each: each.key() == least)
        (draft / SAMPLE).write_bytes(held_out)
        (draft / ABOUT).write_text(json.dumps(asdict(counts)))
        for each in draft.iterdir():
            with each.open("rb") as file:
                os.fsync(file.fileno())
        _replace(draft, place, settings.context)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _fill(
    draft: Path, files: Sequence[Path], encoder: Encoder, settings: HfSettings, keeps: Callable[[Document], bool]
) -> tuple[bytes, RowCounts]:
    """Write the rows; return the held-out documents, which `keeps` chooses, and the counts."""
    sample, seen, total = Sample(), Seen(), 0
    encoder.begin()
    with (draft / TOKENS).open("wb") as tokens, (draft / FLAGS).open("wb") as flags:

        def write(row: array[int], marks: bytearray) -> None:
            row.tofile(tokens)
            flags.write(marks)

        def trained() -> Iterator[Document | None]:
            """The documents to train on; None in place of one that is held out, or equal to an earlier one."""
            nonlocal total
            for document in read_documents(files, settings.format == "chat"):
                is_new = seen.add(key := document.key())
                is_kept = is_new and not keeps(document)
                counts.repeated += not is_new
                counts.documents += is_kept
                if is_new:
                    total += int.from_bytes(key, "big")
                    counts.replaced += document.replaced()
                if is_new and not is_kept:
                    counts.held_out += 1
                    sample.add(document)
                yield document if is_kept else None

        writer = RowWriter(settings, write)
        counts = writer.counts
        for document in joined(trained()):
            writer.add(encoder.encode(document))
        writer.flush()
    counts.documents -= counts.skipped
    counts.empty, counts.unused = encoder.empty, ", ".join(sorted(encoder.unused))[:MAX_WORD_CHARACTERS]
    counts.digest = f"{total % (1 << 256):064x}"
    return sample.lines(), counts


def _replace(draft: Path, place: Path, context: int) -> None:
    """Put the draft in place of nothing, or of something damaged, but not of what another peer has made meanwhile."""
    try:
        os.rename(draft, place)
    except OSError:
        if _counts(place, context):
            return
        shutil.rmtree(place, ignore_errors=True)
        os.rename(draft, place)
