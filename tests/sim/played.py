"""The results of runs, kept in a file, so that a long series can be interrupted and goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Result = dict[str, Any]


class PlayedRuns:
    """A file with one line of JSON for each run: the command that replays it, and its result.

    A line that is cut off, as by a kill, is not counted: its run is played again.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, Result] = {}
        for line in path.read_text().splitlines() if path and path.exists() else ():
            try:
                kept = json.loads(line)
                self._known[kept["replay"]] = dict(kept["result"])
            except (ValueError, KeyError, TypeError):
                continue

    def result(self, replay: str) -> Result | None:
        return self._known.get(replay)

    def add(self, replay: str, result: Result) -> None:
        if self._path:
            with self._path.open("a") as file:  # an empty line first: the last one may be cut off
                file.write("\n" + json.dumps({"replay": replay, "result": result}) + "\n")
