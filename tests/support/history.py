"""A peer's history, read from its directory while the peer writes it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from node.reporting.report import merge_line
from tests.support.checkers import Report, began


class History:
    """The reports in a `rounds.jsonl`. Lines that were read once are not read again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reports: list[Report] = []
        self._read_bytes = 0

    def reports(self) -> list[Report]:
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._read_bytes:  # the file is of another run now
                    self._reports, self._read_bytes = [], 0
                file.seek(self._read_bytes)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.splitlines():
            merge_line(self._reports, line)
        self._read_bytes += len(whole)
        return list(self._reports)


class Reporter(Protocol):
    @property
    def id(self) -> str: ...

    def reports(self) -> list[Report]: ...


def one_mean(peers: Iterable[Reporter], since: float = 0.0) -> Report | None:
    """A round whose mean has work of exactly these peers, and which each began after that wall time; None: not yet."""
    wanted = list(peers)
    ids = {peer.id for peer in wanted}
    full = [
        {
            each["lineage"]: each
            for each in peer.reports()
            if began(each) > since and ids == {*each["peers"]} and (each["weight"] or 0) > 0
        }
        for peer in wanted
    ]
    if not full:
        return None
    return next((report for lineage, report in full[0].items() if all(lineage in each for each in full)), None)
