"""Who lives in a container: peers, the spells that containers run for, and how to see from outside which peer it is."""

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
    """An identity: a directory in a volume, whichever container holds it."""

    name: str
    id: str
    directory: Path
    history: History

    def reports(self) -> list[Report]:
        return self.history.reports()

    @property
    def incarnation(self) -> int:
        """How often it was started."""
        return int((self.directory / "incarnation").read_text())


@dataclass(slots=True)
class Spell:
    """A container from a start to its end.

    Attributes:
        name: of the peer that it was; empty as long as that is not known.
        expected: the exit code that it should end with; minus a signal.
        ended, code: None while it runs.
    """

    container: str
    began: float
    name: str = ""
    expected: int = 0
    ended: float | None = None
    code: int = 0


def bytes_of(text: str) -> float:
    """A size as Docker writes it: `604.4MiB`."""
    number, unit = re.fullmatch(r"([\d.]+)\s*([kKMGT]?i?B)", text).groups()  # type: ignore[union-attr]
    power = "BkMGT".index(unit[0].replace("K", "k"))
    return float(number) * (1024 if "i" in unit else 1000) ** power


def directories(pid: int) -> Iterator[str]:
    """Names of state directories that the peer under this first process holds: it has its own open while it lives."""
    for process in psutil.Process(pid).children():
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                if found := _HELD.match(os.readlink(descriptor)):
                    yield found[1]
