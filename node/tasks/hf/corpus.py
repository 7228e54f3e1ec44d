"""Read a peer's own data: texts and conversations, from files of text and of rows.

    *.jsonl, *.ndjson, *.json   objects: {"text": …}, or {"messages": [{"role": …, "content": …}, …]}, or
                                {"prompt": …, "completion": …}; one on a line, or the elements of a list
    *.csv, *.tsv                the same in columns, which the first line names
    *.parquet, *.arrow          the same in columns; need pyarrow
    everything else             text, cut into blocks by its content (`node.tasks.readers`)

A hash of a document's content decides whether it is held out. So each peer that has a document decides the same. Parts
of a text that are trained on and follow each other are put together again (`joined`).
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from node.tasks.files import Look, look, require_data, shown
from node.tasks.hf.conversation import FIELDS, Conversation, conversation_of, encodable
from node.tasks.hf.settings import ModelError
from node.tasks.readers import blocks, missing, rows_in, text_of

SAMPLE_BYTES = 256 << 10
_SHARE = 16  # one document of this many is held out
_LARGEST_TEXT = 512 << 10
_MAX_SAMPLE_TEXT = 8 << 10
COLUMNS = ("text", *FIELDS)  # what a row may have
_TYPES = {type(None): "null", list: "a list", dict: "an object", int: "a number", float: "a number"}


@dataclass(frozen=True, slots=True)
class Document:
    content: str | Conversation
    begins: bool = True  # of a text; if not, it continues the document before
    ends: bool = True
    where: str = field(default="", compare=False)  # a conversation comes from, for messages
    unused: tuple[str, ...] = field(default=(), compare=False)  # names of a conversation's fields

    def line(self) -> bytes:
        """One line of a file of held-out documents; empty if it is a conversation that is too long for one."""
        if isinstance(self.content, str):
            return json.dumps({"text": self.content[:_MAX_SAMPLE_TEXT]}).encode() + b"\n"
        line = json.dumps(self.content).encode() + b"\n"
        return line if len(line) <= SAMPLE_BYTES // 8 else b""

    def replaced(self) -> int:
        """How many characters are U+FFFD, which stands for what could not be read."""
        if isinstance(self.content, str):
            return self.content.count("\ufffd")
        return json.dumps(self.content, ensure_ascii=False).count("\ufffd")

    def key(self) -> bytes:
        return hashlib.sha256(json.dumps(self.content).encode(errors="replace")).digest()


class Sample:
    """Held-out documents, at most `SAMPLE_BYTES` of them: those with the smallest hashes."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, bytes]] = []
        self._bytes = 0

    def add(self, document: Document) -> None:
        if not (line := document.line()):
            return
        heapq.heappush(self._heap, (-int.from_bytes(document.key(), "big"), line))
        self._bytes += len(line)
        while self._bytes > SAMPLE_BYTES:
            self._bytes -= len(heapq.heappop(self._heap)[1])

    def lines(self) -> bytes:
        return b"".join(line for _, line in sorted(self._heap, reverse=True))


def is_held_out(document: Document) -> bool:
    """Whether no peer trains on the document. About one in 16 is held out."""
    return document.key()[0] % _SHARE == 0


class Seen:
    """Which documents have been read already. Keeps 12 bytes of each key."""

    def __init__(self) -> None:
        self._buckets = [bytearray() for _ in range(1 << 16)]

    def add(self, key: bytes) -> bool:
        """Whether the key is new."""
        bucket, rest = self._buckets[int.from_bytes(key[:2], "big")], key[2:14]
        at = bucket.find(rest)
        while at % len(rest) and at >= 0:
            at = bucket.find(rest, at + 1)
        if at < 0:
            bucket += rest
        return at < 0


def joined(documents: Iterable[Document | None]) -> Iterator[Document]:
    """Put parts of a text together that follow each other, as long as they are short."""
    parts: list[Document] = []

    def whole() -> Document:
        text = "".join(str(each.content) for each in parts)
        return Document(text, parts[0].begins, parts[-1].ends) if len(parts) > 1 else parts[0]

    size = 0
    for document in documents:
        if parts and (document is None or document.begins or size >= _LARGEST_TEXT):
            yield whole()
            parts, size = [], 0
        if document is not None:
            parts.append(document)
            size += len(document.content)
    if parts:
        yield whole()


def read_documents(files: Sequence[Path], is_chat: bool) -> Iterator[Document]:
    for file in files:
        try:
            found = look(file)
            require_data(file, found.kind)
            if found.kind == "text":
                if is_chat:
                    raise ModelError(
                        f"{shown(file)} is plain text: conversations are read from .jsonl, .csv and .parquet files"
                    )
                yield from _from_text(file, found)
            else:
                for fields, where in rows_in(file, found, COLUMNS):
                    yield document_of(fields, is_chat, where)
        except OSError as error:
            why = error.strerror or " ".join(str(error).split())[:200]
            raise ModelError(f"{shown(file)} cannot be read ({why})") from None


def _from_text(file: Path, found: Look) -> Iterator[Document]:
    parts = blocks(text.encode() for text in text_of(file, found))
    part, begins = next(parts, None), True
    while part is not None:
        following = next(parts, None)
        yield Document(part.decode(), begins, following is None)
        part, begins = following, False


def document_of(fields: Any, is_chat: bool, where: str) -> Document:
    """The document in a JSON object, or in a row of parquet."""
    if not isinstance(fields, dict):
        raise ModelError(f"{where}: not an object")
    if is_chat:
        conversation, unused = conversation_of(fields, where, missing(fields, True))
        return Document(conversation, where=where, unused=unused)
    if not isinstance(text := fields.get("text"), str):
        raise ModelError(f"{where}: {_no_text(fields)}")
    return Document(encodable(text))


def _no_text(fields: dict[str, Any]) -> str:
    if "text" in fields:
        return f'its "text" is {_TYPES.get(type(fields["text"]), "of another type")}, not a text'
    lists = [key for key, value in fields.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if lists and "messages" not in fields and "conversations" not in fields:
        return f'has no "text"; write the list under "{shown(lists[0][:40])}" into a file of its own'
    if "messages" in fields or "prompt" in fields:
        return 'has no "text"; of conversations, train with hf.format = "chat"'
    return f'has no "text"{missing(fields, False)}'
