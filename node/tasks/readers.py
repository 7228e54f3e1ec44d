"""The rows and the texts of files: JSON, CSV, parquet and Arrow, in UTF-8 or another Unicode encoding, or compressed.

A file is read in pieces, and nothing of it is guessed or replaced: what cannot be read is named, with what to do.

A text is cut into blocks whose ends depend on the text around them alone, as rsync and restic do. So a text that has
grown has nearly the same blocks as before, and what a hash of a block's content decides stays decided.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from zlib import crc32

from node.runtime.program import install
from node.tasks.files import Look, opened, shown, suffix_of
from node.tasks.hf.settings import ModelError

MAX_ROW_BYTES = 16 << 20
MAX_EXPANSION, _FREE_BYTES = 200, 64 << 20
"""A compressed file may hold this many times its size, and `_FREE_BYTES` more."""
_PIECE_BYTES = 1 << 20
LEAST, USUAL, MOST = 512, 1024, 8 << 10  # bytes of a block: at least, about how many more until it ends, and at most
_BLANK = re.compile(r"[ \t\r\n,]*")
_TEXTS = (
    "content", "contents", "body", "article", "document", "story", "sentence", "code", "raw_content", "Text", "TEXT",
)  # fmt: skip
_PAIRS = (
    ("instruction", "output"), ("instruction", "response"), ("question", "answer"), ("query", "response"),
    ("problem", "solution"), ("input", "output"), ("user", "assistant"),
)  # fmt: skip


def bytes_of(path: Path, packing: str = "") -> Iterator[bytes]:
    """A file's bytes, decompressed."""
    read, most = 0, MAX_EXPANSION * path.stat().st_size + _FREE_BYTES
    try:
        with opened(path, packing) as file:
            while piece := file.read(_PIECE_BYTES):
                read += len(piece)
                if packing and read > most:
                    raise ModelError(
                        f"{shown(path)} holds more than {MAX_EXPANSION} times its size: if that is right, unpack it"
                    )
                yield piece
    except (EOFError, OSError, ValueError) as error:
        if isinstance(error, ModelError) or (isinstance(error, OSError) and error.errno):
            raise
        raise ModelError(f"{shown(path)} is damaged: it cannot be decompressed ({_line(error)})") from None


def text_of(path: Path, found: Look) -> Iterator[str]:
    """A text in pieces, without its byte-order mark."""
    decoder, read = codecs.getincrementaldecoder(found.encoding)(), 0
    for piece in bytes_of(path, found.packing):
        text = _decoded(path, decoder, piece, read)
        if found.kind == "text" and "\0" in text:
            raise ModelError(f"{shown(path)} is not text: it contains NUL bytes; remove the file, or convert it")
        yield text
        read += len(piece)
    yield _decoded(path, decoder, b"", read)


def _decoded(path: Path, decoder: codecs.IncrementalDecoder, piece: bytes, read: int) -> str:
    held = len(decoder.getstate()[0])
    try:
        return decoder.decode(piece, not piece)
    except UnicodeError as error:
        at = read - held + getattr(error, "start", 0)
        name = "UTF-16" if "16" in str(getattr(error, "encoding", "")) else "UTF-8"
        raise ModelError(
            f"{shown(path)} is not in {name} (byte {at:,}): convert it, as by "
            f"iconv -f WINDOWS-1252 -t UTF-8 '{shown(path.name)}' if it comes from Windows, or remove it"
        ) from None


def rows_in(path: Path, found: Look, columns: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """The rows of a file, and where each is, for messages."""
    if found.kind in ("parquet", "arrow"):
        yield from _arrow(path, found, columns)
    elif found.kind == "csv":
        yield from _csv(path, found, columns)
    else:
        for value, line in json_values(text_of(path, found), shown(path)):
            yield value, f"{shown(path)}:{line}"


def json_values(pieces: Iterable[str], name: str) -> Iterator[tuple[Any, int]]:
    """The values of a file, and the line of each: one on a line, over several lines, or the elements of a list."""
    decoder, held, line, in_list = json.JSONDecoder(object_pairs_hook=_object), "", 1, False
    for piece in chain(pieces, (None,)):
        held, low = held + (piece or ""), 0
        while True:
            line, low = _skip(held, low, _blank(held, low), line)
            if low == len(held):
                break
            if held[low] == ("]" if in_list else "["):
                in_list, low = not in_list, low + 1
                continue
            try:
                value, high = decoder.raw_decode(held, low)
            except (ValueError, RecursionError) as error:
                if piece is None or len(held) - low > MAX_ROW_BYTES or isinstance(error, _TwiceError):
                    raise ModelError(f"{name}:{line}: {_why(error, len(held), piece is None)}") from None
                break
            yield value, line
            line, low = _skip(held, low, high, line)
        held = held[low:]
    if in_list:
        raise ModelError(f"{name}:{line}: the file ends within a list: it is not complete")


class _TwiceError(ValueError):
    """A key comes twice in an object."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for index, (key, _) in enumerate(pairs) if any(key == other for other, _ in pairs[:index]))
        raise _TwiceError(f'the key "{shown(twice[:50])}" comes twice: remove one of them')
    return found


def _blank(text: str, low: int) -> int:
    found = _BLANK.match(text, low)
    return found.end() if found else low


def _skip(text: str, low: int, high: int, line: int) -> tuple[int, int]:
    return line + text.count("\n", low, high), high


def _why(error: Exception, length: int, is_over: bool) -> str:
    if isinstance(error, _TwiceError):
        return str(error)
    begun = getattr(error, "msg", "").startswith("Unterminated") or getattr(error, "pos", 0) >= length - 1
    if begun and not is_over:
        return f"a line of more than {MAX_ROW_BYTES >> 20} MiB: divide it"
    return f"not JSON: each line must be one object ({getattr(error, 'msg', type(error).__name__)})"


def _csv(path: Path, found: Look, columns: Sequence[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Rows under a header, whose delimiter is the one of three that comes most often there."""
    csv.field_size_limit(MAX_ROW_BYTES)
    lines, name = _lines(text_of(path, found), shown(path)), shown(path)
    first = next(lines, "")
    delimiter = "\t" if suffix_of(path) == ".tsv" else max(",;\t", key=first.count)
    reader = csv.reader(chain((first,), lines), delimiter=delimiter, strict=True)
    try:
        header = [each.strip() for each in next(reader, [])]
        if len(set(header)) < len(header):
            raise ModelError(f"{name}:1: two columns have the same name: the first line must name each column")
        if not set(header) & set(columns):
            what = "the first line must name the columns"
            raise ModelError(f'{name}:1: has no "text" nor "messages"{missing(header, False)}; {what}')
        for row in reader:
            if row and len(row) != len(header):
                raise ModelError(
                    f"{name}:{reader.line_num}: {len(row)} fields, where the first line names {len(header)} columns"
                )
            if row:
                yield dict(zip(header, row, strict=True)), f"{name}:{reader.line_num}"
    except csv.Error as error:
        raise ModelError(f"{name}:{reader.line_num}: not CSV ({_line(error)})") from None


def _lines(pieces: Iterable[str], name: str) -> Iterator[str]:
    held = ""
    for piece in pieces:
        *whole, held = (held + piece).split("\n")
        yield from (f"{each}\n" for each in whole)
        if len(held) > MAX_ROW_BYTES:
            raise ModelError(f"{name}: a line of more than {MAX_ROW_BYTES >> 20} MiB: divide it")
    if held:
        yield held


def _arrow(path: Path, found: Look, columns: Sequence[str]) -> Iterator[tuple[dict[str, Any], str]]:
    try:
        from pyarrow import ArrowException
    except ImportError:
        raise ModelError(f"{shown(path)}: reading {found.kind} needs pyarrow: {install('data')}") from None
    number = 0
    try:
        for batch in _batches(path, found, columns):
            for fields in batch.to_pylist():
                number += 1
                yield fields, f"{shown(path)}: row {number}"
    except ArrowException as error:
        raise ModelError(f"{shown(path)}: not a file of {found.kind}, or damaged: {_line(error)}") from None


def _batches(path: Path, found: Look, columns: Sequence[str]) -> Iterator[Any]:
    """Batches of rows with those of the columns that there are, else with all of one row, for its names."""
    from pyarrow import ArrowInvalid, ipc, memory_map, parquet

    if found.kind == "parquet":
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            yield from file.iter_batches(256, columns=_wanted(path, names, columns))
        return
    with memory_map(str(path)) as source:
        try:
            file = ipc.open_file(source)
            batches: Iterable[Any] = map(file.get_batch, range(file.num_record_batches))
        except ArrowInvalid:
            source.seek(0)
            file = batches = ipc.open_stream(source)  # what `datasets` keeps
        wanted = _wanted(path, file.schema.names, columns)
        for batch in batches:
            for low in range(0, batch.num_rows, 256):
                yield batch.slice(low, 256).select(wanted)


def _wanted(path: Path, names: Sequence[str], columns: Sequence[str]) -> Sequence[str]:
    if twice := [each for each in columns if names.count(each) > 1]:
        raise ModelError(f"{shown(path)}: two columns have the name {twice[0]}: rename or remove one of them")
    return [each for each in columns if each in names] or names


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def missing(names: Iterable[str], is_chat: bool) -> str:
    """What a row has instead of a document, and what to rename, for a message; empty if it has nothing."""
    every = [str(each) for each in names]
    if not every:
        return ""
    has = f"it has {', '.join(shown(each[:40]) for each in every[:8])}{', …' if len(every) > 8 else ''}"
    pair = next((pair for pair in _PAIRS if set(pair) <= set(every)), None)
    if pair or is_chat:
        question, answer = pair or ("the question", "the answer")
        chat = "" if is_chat else ', and train with hf.format = "chat"'
        return f" ({has}: rename {question} to prompt and {answer} to completion{chat})"
    text = next((each for each in _TEXTS if each in every), "the right one")
    return f" ({has}: rename {text} to text)"


def blocks(data: Iterable[bytes]) -> Iterator[bytes]:
    """The blocks of a text in UTF-8. No character is divided."""
    held = b""
    for piece in data:
        held, low = held + piece, 0
        while len(held) - low > 2 * MOST:
            high = _end(held, low)
            yield held[low:high]
            low = high
        held = held[low:]
    low = 0
    while low < len(held):
        high = _end(held, low)
        high = len(held) if len(held) - high < LEAST else high  # a short rest is not a block of its own
        yield held[low:high]
        low = high


def _end(text: bytes, low: int) -> int:
    before, last = low + LEAST - 1, low
    while (line := text.find(b"\n", before, low + MOST)) >= 0:
        begins = text.rfind(b"\n", low, line) + 1 or low
        if crc32(text[begins:line]) * USUAL < (line + 1 - begins) << 32:
            return line + 1
        before = last = line + 1
    if len(text) <= low + MOST:
        return len(text)
    if last > low:
        return last
    end = low + MOST
    while text[end] & 0xC0 == 0x80 and end > low + MOST - 4:
        end -= 1
    return end
