"""A peer's history on disk: one RoundReport a line in `rounds.jsonl`."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

from node.report import RoundReport, Totals
from node.status import to_json

log = logging.getLogger(__name__)

_MAX_LINE_BYTES = 1 << 20


class Journal:
    """Appends reports. A full disk costs lines, not rounds.

    Attributes:
        totals: of all reports so far.
        last: the latest report.
    """

    def __init__(self, path: Path) -> None:
        self.totals = Totals()
        self.last: RoundReport | None = None
        self._path = path
        self._failing = False

    def write(self, report: RoundReport) -> None:
        """Add a line."""
        self.last = report
        self.totals.add(report)
        try:
            self._append(f"{to_json(report)}\n".encode())
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.warning("cannot write %s (%s): rounds go on, their lines are lost", self._path, error.strerror)
            self._failing = True

    def _append(self, line: bytes) -> None:
        """After the last whole line: a disk that was full, or a crash, may have left a piece of one behind it."""
        with self._path.open("a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - _MAX_LINE_BYTES))
            tail = file.read(_MAX_LINE_BYTES)
            file.truncate(end - len(tail) + tail.rfind(b"\n") + 1)
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
