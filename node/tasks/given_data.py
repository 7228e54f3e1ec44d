"""What the user gave by --data, and what it was when this peer was last started."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from node.runtime.json_file import read_json, replace_private
from node.runtime.notes import note
from node.tasks.files import counted, size_words

_MAX_RECORD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DataState:
    """What data are compared by: `digest` is of the content where that is cheap, else of names and sizes."""

    files: int
    size: int
    documents: int  # 0 if they are not counted
    digest: str

    def words(self) -> str:
        documents = f", {counted(self.documents, 'document')}" if self.documents else ""
        return f"{counted(self.files, 'file')}, {size_words(self.size)}{documents}"


@dataclass(frozen=True, slots=True)
class GivenData:
    """A path with data, and a record of what it held at the last start of the peer."""

    place: Path | None  # file or folder, or a data set on the hub
    record: Path | None = None
    tells: bool = True  # once for each start, not for each worker
    windows: Path | None = None  # directory in which so many ranks share what comes from the hub
    ranks: int = 1

    def tell(self, lines: Iterable[str]) -> None:
        if self.tells:
            for line in lines:
                note(line)

    def held_out(self) -> bytes:
        """The only held-out document of the last start, if there was only one: it stays held out."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return base64.b64decode(self._read()["held_out"])
        return b""

    def keep(self, state: DataState, sample: bytes = b"") -> None:
        """Tell the user if the data have changed since the last start, and keep what they are now."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            before = DataState(**self._read()["state"])
            if before.digest != state.digest:
                note(f"the data have changed since this peer's last start: then {before.words()}; now {state.words()}")
        only = sample if sample.count(b"\n") == 1 else b""
        if self.record is not None:
            with suppress(OSError):  # then the next start cannot compare
                content = {"state": asdict(state), "held_out": base64.b64encode(only).decode()}
                replace_private(self.record, json.dumps(content))

    def _read(self) -> Any:
        return read_json(self.record, _MAX_RECORD_BYTES) if self.record else None
