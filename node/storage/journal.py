"""A peer's history on disk: a report or an evaluation a line in `rounds.jsonl`, and their totals in `totals.json`.

The last hundred megabytes or so of lines are kept: `rotate` renames older files to `rounds.1.jsonl` and so on. The
totals also count older reports, and those of earlier incarnations in this directory.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from node.reporting.report import RoundEvaluation, RoundReport, Totals, add_loss, parse_line
from node.reporting.status import to_json
from node.runtime.json_file import read_json

log = logging.getLogger(__name__)

FILE_BYTES = 32 << 20
KEEP_FILES = 3  # number of older files that are kept besides the present one
_MAX_LINE_BYTES = 1 << 20
_RECENT_BYTES = 8 << 20
MAX_WAITING_BYTES = 8 << 20
AT_ONCE = 16  # Number of waiting lines written with one new line. Each costs an access to the file.


class Journal:
    """Appends reports. If the disk is full, some thousands of reports wait in memory, and rounds continue.

    `totals` are of all reports so far, those of earlier incarnations included.
    """

    def __init__(self, path: Path) -> None:
        self.last: RoundReport | None = None
        self._path, self._totals_path = path, path.with_name("totals.json")
        self.totals = self._remembered()
        self._failing = False
        self._waiting: deque[bytes] = deque()

    def write(self, report: RoundReport) -> None:
        """Add a line, on the event loop: it reads back at most a megabyte, and flushes nothing.

        A power failure may lose lines, but they are not part of the peer's state.
        """
        self.last = report
        self.totals.add(report)
        self._write(report)

    def evaluated(self, evaluation: RoundEvaluation) -> None:
        """Add a line, as `write` does."""
        self._write(evaluation)

    def _write(self, line: RoundReport | RoundEvaluation) -> None:
        self._waiting.append(f"{to_json(line)}\n".encode())
        while sum(map(len, self._waiting)) > MAX_WAITING_BYTES:
            self._waiting.popleft()
        try:
            for _ in range(min(AT_ONCE, len(self._waiting))):
                self._append(self._waiting[0])
                self._waiting.popleft()
            self._remember()
            self._failing = False
        except OSError as error:
            if not self._failing:
                why = error.strerror or error
                log.warning("cannot write %s (%s): rounds continue, and their lines wait in memory", self._path, why)
            self._failing = True

    def recent(self) -> list[RoundReport]:
        """The last reports on disk with their losses, a few megabytes of them; unreadable lines are left out."""
        recent = b""
        for path in (self._path, rotated_path(self._path)):
            if len(recent) < _RECENT_BYTES:
                recent = tail(path, _RECENT_BYTES - len(recent)) + recent
        found: list[RoundReport] = []
        for line in recent.splitlines():
            with suppress(ValueError, TypeError):
                report = parse_line(line)
                bytes.fromhex(report.lineage)  # the line may be damaged
                if isinstance(report, RoundReport):
                    found.append(replace(report, tokens=int(report.tokens)))
                else:
                    add_loss(found, report)
        return found

    def _append(self, line: bytes) -> None:
        """Append after the last whole line: a full disk or a crash may have left an incomplete line."""
        rotate(self._path, len(line))
        with self._path.open("a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - _MAX_LINE_BYTES))
            end_of_file = file.read(_MAX_LINE_BYTES)
            file.truncate(end - len(end_of_file) + end_of_file.rfind(b"\n") + 1)
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _remembered(self) -> Totals:
        try:
            return Totals.of(read_json(self._totals_path) or {})
        except (OSError, ValueError, TypeError):
            return Totals()

    def _remember(self) -> None:
        draft = self._totals_path.with_suffix(".new")
        draft.write_text(json.dumps(vars(self.totals)))
        draft.replace(self._totals_path)


def tail(path: Path, size_bytes: int) -> bytes:
    """The last bytes of a file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size_bytes))
            return file.read(size_bytes)
    except OSError:
        return b""


def rotated_path(path: Path, number: int = 1) -> Path:
    """Path of the file that was the present one before the last `number` rotations."""
    return path.with_suffix(f".{number}{path.suffix}")


def rotate(path: Path, coming_bytes: int = 0) -> bool:
    """Rename a file if `coming_bytes` more would make it too large; returns whether it did. Raises OSError."""
    try:
        if path.stat().st_size + coming_bytes <= FILE_BYTES:
            return False
    except FileNotFoundError:
        return False
    for number in range(KEEP_FILES, 1, -1):
        with suppress(FileNotFoundError):
            rotated_path(path, number - 1).replace(rotated_path(path, number))
    path.replace(rotated_path(path))
    return True
