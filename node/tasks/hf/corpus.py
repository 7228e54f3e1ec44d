"""Read a peer's own data: texts and conversations, from files of text, JSON lines and parquet.

    *.jsonl, *.json      one object on a line: {"text": …}, or {"messages": [{"role": …, "content": …}, …]}, or
                         {"prompt": …, "completion": …}
    *.parquet            the same in columns; needs pyarrow
    everything else      text in UTF-8, cut into documents at the ends of lines

A hash of a document's content decides whether it is held out. So each peer that has a document decides the same.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from node.runtime.extras import install
from node.tasks.hf.settings import ModelError

Messages: TypeAlias = list[dict[str, str]]
MAX_LINE_BYTES = 16 << 20
MAX_MESSAGES = 4096
SAMPLE_BYTES = 256 << 10
_SHARE = 16  # one document of this many is held out
_SMALLEST_BLOCK, _LARGEST_BLOCK, _BLOCKS = 256, 64 << 10, 64
_MAX_SAMPLE_TEXT = 8 << 10
_PROBED_BYTES = 8 << 10


@dataclass(frozen=True, slots=True)
class Document:
    """A text or a conversation.

    Attributes:
        begins, ends: whether a text begins and ends here; else its other parts are documents of their own.
    """

    content: str | Messages
    begins: bool = True
    ends: bool = True

    def line(self) -> bytes:
        """One line of a file of held-out documents; empty if it is a conversation that is too long for one."""
        if isinstance(self.content, str):
            return json.dumps({"text": self.content[:_MAX_SAMPLE_TEXT]}).encode() + b"\n"
        line = json.dumps({"messages": self.content}).encode() + b"\n"
        return line if len(line) <= SAMPLE_BYTES // 8 else b""

    def key(self) -> bytes:
        return hashlib.sha256(json.dumps(self.content).encode(errors="replace")).digest()


class Sample:
    """Held-out documents, at most `SAMPLE_BYTES` of them: those with the smallest hashes."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, bytes]] = []
        self._bytes = 0

    def add(self, document: Document) -> None:
        """Take a document, and drop others if there are too many."""
        if not (line := document.line()):
            return
        heapq.heappush(self._heap, (-int.from_bytes(document.key(), "big"), line))
        self._bytes += len(line)
        while self._bytes > SAMPLE_BYTES:
            self._bytes -= len(heapq.heappop(self._heap)[1])

    def lines(self) -> bytes:
        """The documents, in an order that depends on their content alone."""
        return b"".join(line for _, line in sorted(self._heap, reverse=True))


def is_held_out(document: Document) -> bool:
    """Whether no peer trains on the document. About one in 16 is held out."""
    return document.key()[0] % _SHARE == 0


def data_files(path: Path | None, option: str = "--data") -> list[Path]:
    """The file, or all files of the folder that are neither hidden nor binary, in order.

    Args:
        option: where the user has given the path.

    Raises:
        ModelError: there are none.
    """
    if path is None:
        raise ModelError("task hf needs data to train on: give a file or a folder by --data")
    if not path.is_file() and not path.is_dir():
        raise ModelError(f"there is no file or folder {path}: give texts by {option}")
    try:
        if path.is_file():
            if path.suffix != ".parquet" and _is_binary(path):
                raise ModelError(f"{path} is not text: texts, .jsonl and .parquet are read; unpack it, or convert it")
            return [path]
        found = sorted(each for each in path.rglob("*") if each.is_file() and not _is_hidden(each.relative_to(path)))
        found = [each for each in found if each.suffix == ".parquet" or not _is_binary(each)]
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read ({error.strerror})") from None
    if not found:
        raise ModelError(f"the folder {path} contains no text: give texts by {option}")
    return found


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(_PROBED_BYTES)


def read_documents(files: list[Path], is_chat: bool) -> Iterator[Document]:
    """Read all documents.

    Raises:
        ModelError: a file cannot be read, or contains something else. The message names the file and the line.
    """
    texts = [each for each in files if each.suffix not in (".jsonl", ".json", ".parquet")]
    if is_chat and texts:
        raise ModelError(f"{texts[0]} is plain text: conversations are read from .jsonl and .parquet files")
    block = max(_SMALLEST_BLOCK, min(_LARGEST_BLOCK, sum(each.stat().st_size for each in texts) // _BLOCKS))
    for file in files:
        try:
            if file.suffix in (".jsonl", ".json"):
                yield from _from_lines(file, is_chat)
            elif file.suffix == ".parquet":
                yield from _from_parquet(file, is_chat)
            else:
                yield from _from_text(file, block)
        except OSError as error:
            why = error.strerror or " ".join(str(error).split())[:200]
            raise ModelError(f"{file} cannot be read ({why})") from None


def _from_text(file: Path, block: int) -> Iterator[Document]:
    with file.open(encoding="utf-8", errors="replace", newline="") as opened:
        part, begins = _lines(opened, block), True
        while part:
            following = _lines(opened, block)
            for low in range(0, len(part), _LARGEST_BLOCK):
                ends = not following and low + _LARGEST_BLOCK >= len(part)
                yield Document(part[low : low + _LARGEST_BLOCK], begins, ends)
                begins = False
            part = following


def _lines(opened: TextIO, block: int) -> str:
    """About a block of text, to the end of a line if that is not far."""
    text = opened.read(block)
    return text if text.endswith("\n") else text + opened.readline(_LARGEST_BLOCK)


def _from_lines(file: Path, is_chat: bool) -> Iterator[Document]:
    with file.open("rb") as opened:
        for number, line in enumerate(iter(lambda: opened.readline(MAX_LINE_BYTES + 1), b""), 1):
            if len(line) > MAX_LINE_BYTES:
                raise ModelError(f"{file}:{number}: a line of more than {MAX_LINE_BYTES >> 20} MiB")
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError):
                raise ModelError(f"{file}:{number}: not JSON: each line must be one object") from None
            yield document_of(fields, is_chat, f"{file}:{number}")


def _from_parquet(file: Path, is_chat: bool) -> Iterator[Document]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ModelError(f"{file}: reading parquet needs pyarrow: {install('data')}") from None
    try:
        with parquet.ParquetFile(file) as opened:
            wanted = [
                each for each in ("text", "messages", "prompt", "completion") if each in opened.schema_arrow.names
            ]
            number = 0
            for batch in opened.iter_batches(256, columns=wanted):
                for fields in batch.to_pylist():
                    number += 1
                    yield document_of(fields, is_chat, f"{file}: row {number}")
    except ArrowException as error:
        raise ModelError(f"{file}: not a file of parquet: {' '.join(str(error).split())[:200]}") from None


def document_of(fields: Any, is_chat: bool, where: str) -> Document:
    """The document in a JSON object, or in a row of parquet.

    Raises:
        ModelError: there is none. The message begins with `where`.
    """
    if not isinstance(fields, dict):
        raise ModelError(f"{where}: not an object")
    if not is_chat:
        if not isinstance(text := fields.get("text"), str):
            raise ModelError(f'{where}: has no "text"; of conversations, train with hf.format = "chat"')
        return Document(_encodable(text))
    messages = fields.get("messages")
    if messages is None and "prompt" in fields and "completion" in fields:
        messages = [
            {"role": "user", "content": fields["prompt"]},
            {"role": "assistant", "content": fields["completion"]},
        ]
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise ModelError(f'{where}: has no "messages", a list of 1 to {MAX_MESSAGES}')
    return Document([_message(each, where) for each in messages])


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ModelError(f"{where}: a message is an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise ModelError(f"{where}: a message needs role and content, both texts")
    return {"role": _encodable(role), "content": _encodable(content)}


def _encodable(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON may hold, and no tokenizer takes."""
    return text.encode(errors="replace").decode()
