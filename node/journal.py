"""A peer's history on disk: one RoundReport a line in `rounds.jsonl`."""

from __future__ import annotations

import logging
from pathlib import Path

from node.report import RoundReport, Totals
from node.status import to_json

log = logging.getLogger(__name__)


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
        line = to_json(report) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.warning("cannot write %s (%s): rounds go on, their lines are lost", self._path, error.strerror)
            self._failing = True
