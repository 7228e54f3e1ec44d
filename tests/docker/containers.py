"""Peers and the runs of their containers, and how to see from outside which peer a container holds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.checkers import Report
from tests.support.history import History

_HELD = re.compile(r"/state/starling/(peer-\d+)(/|$)")


@dataclass(frozen=True, slots=True)
class Peer:
    """A state directory in a volume, whichever container holds it."""

    name: str
    id: str
    directory: Path
    history: History

    def reports(self) -> list[Report]:
        return self.history.reports()

    @property
    def incarnation(self) -> int:
        return int((self.directory / "incarnation").read_text())


@dataclass(slots=True)
class Spell:
    """One run of a container. `name`: its peer; empty while unknown. `code`: an exit code, or minus a signal."""

    container: str
    began: float
    name: str = ""
    expected: int = 0
    ended: float | None = None
    code: int = 0


def bytes_of(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)\s*([kKMGT]?i?B)", text).groups()  # type: ignore[union-attr]
    power = "BkMGT".index(unit[0].replace("K", "k"))
    return float(number) * (1024 if "i" in unit else 1000) ** power


def directories(pid: int) -> Iterator[str]:
    for process in psutil.Process(pid).children(recursive=True):
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                if found := _HELD.match(os.readlink(descriptor)):
                    yield found[1]
