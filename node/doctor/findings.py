"""What the doctor finds: one line each, and below it what to do; and how it runs one check after another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from node.reporting.status import printable
from protocols.aio import loop_time
from protocols.base import Deadline

MAX_FINDINGS = 100
MAX_TEXT = 400


class Level(StrEnum):
    OK = "ok"
    UNKNOWN = "?"  # could not be found out
    WARN = "warn"
    FAIL = "FAIL"  # with this the peer would not work


@dataclass(frozen=True, slots=True)
class Finding:
    check: str  # the check's name, for scripts
    level: Level
    text: str
    cure: str = ""  # what to do, as a sentence or a command

    def __str__(self) -> str:
        line = f"{self.level:<5} {printable(self.text, MAX_TEXT)}"
        return f"{line}\n      {printable(self.cure, MAX_TEXT)}" if self.cure else line


def parse_finding(data: object) -> Finding:
    """Read a finding from JSON. Raises ValueError."""
    if not isinstance(data, Mapping) or not all(isinstance(data.get(name), str) for name in Finding.__slots__):
        raise ValueError("a finding is malformed")
    check, text, cure = (printable(data[name], MAX_TEXT) for name in ("check", "text", "cure"))
    return Finding(check, Level(data["level"]), text, cure)


def found(check: str, text: str, faults: Iterable[tuple[Level, str, str]]) -> list[Finding]:
    """The faults of a check, each with its cure; without faults the line that says that all is well."""
    return [Finding(check, *each) for each in faults] or [Finding(check, Level.OK, text)]


def exit_code(findings: Iterable[Finding]) -> int:
    """0: all is well, or not known; 1: there is a warning; 2: the peer would not work."""
    levels = {each.level for each in findings}
    return 2 if Level.FAIL in levels else 1 if Level.WARN in levels else 0


def conclusion(findings: Sequence[Finding]) -> str:
    """The last line: whether the peer works."""
    for level, words in ((Level.FAIL, "This peer would not work"), (Level.WARN, "You can train")):
        if lines := [each.check for each in findings if each.level is level]:
            return f"{words}. {level}: {', '.join(dict.fromkeys(lines))}."
    return "You can train."


# -- one after another -------------------------------------------------------------------------------------------------


class CheckStep(NamedTuple):
    """Some checks that belong together: their subject as shown if they take too long, and the time that they may."""

    subject: str
    seconds: float
    find: Callable[[], Awaitable[Iterable[Finding]]]


async def examine(steps: Iterable[CheckStep], tell: Callable[[Finding], None], deadline: Deadline) -> bool:
    """Run the steps in order, and tell each finding at once. Returns whether all steps have ended in time.

    One that has not is left behind, not awaited: a thread that waits for a dead disk cannot be ended.
    """
    in_time = True
    for step in steps:
        until = min(deadline, loop_time() + step.seconds)
        task = asyncio.ensure_future(step.find())
        try:
            await asyncio.wait([task], timeout=max(0.0, until - loop_time()))
        finally:
            if not task.done():
                task.cancel()
        if not task.done():
            in_time = False
            tell(Finding(step.subject, Level.UNKNOWN, f"{step.subject}: not found out in time"))
            continue
        for finding in task.result():
            tell(finding)
    return in_time
