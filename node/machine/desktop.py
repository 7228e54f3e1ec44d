"""Asks the desktop's services by `busctl`: when the computer was last used, and whether the network is metered."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import shutil
from collections.abc import Sequence

from node.runtime.child_process import ChildProcess

log = logging.getLogger(__name__)

ASK_SECONDS = 3.0
_IDLE_SOURCES = {
    "GNOME": (
        "--user", "call", "org.gnome.Mutter.IdleMonitor", "/org/gnome/Mutter/IdleMonitor/Core",
        "org.gnome.Mutter.IdleMonitor", "GetIdletime",
    ),
    "KDE and others": (
        "--user", "call", "org.freedesktop.ScreenSaver", "/org/freedesktop/ScreenSaver",
        "org.freedesktop.ScreenSaver", "GetSessionIdleTime",
    ),
}  # fmt: skip
"""Desktop -> how to ask it for the milliseconds since the last input."""
_METERED = (
    "--system", "get-property", "org.freedesktop.NetworkManager", "/org/freedesktop/NetworkManager",
    "org.freedesktop.NetworkManager", "Metered",
)  # fmt: skip
_METERED_VALUES = {1: True, 2: False, 3: True, 4: False}
"""NetworkManager's NMMetered: yes, no, and two guesses."""
_NUMBER = re.compile(r"^[utx] (\d{1,18})$")


class Desktop:
    """The services of the desktop session in which this peer runs, if it runs in one."""

    def __init__(self) -> None:
        self._busctl = shutil.which("busctl")
        self._idle_sources = list(_IDLE_SOURCES.values())

    async def input_idle_seconds(self) -> float:
        """Time since the keyboard or the mouse was used; nan if no service tells."""
        for source in self._idle_sources:
            if (value := await self._ask(source)) is not None:
                self._idle_sources = [source]  # ask only this one from now on
                return value / 1000
        return math.nan

    async def is_metered(self) -> bool | None:
        """Whether the network's traffic costs money; None if NetworkManager does not tell."""
        value = await self._ask(_METERED)
        return None if value is None else _METERED_VALUES.get(value)

    async def _ask(self, arguments: Sequence[str]) -> int | None:
        if self._busctl is None:
            return None
        lines: list[str] = []
        take = lambda line: lines.append(line) if line and len(lines) < 2 else None  # noqa: E731
        try:
            child = await ChildProcess.start("busctl", (self._busctl, *arguments), take)
        except OSError as error:
            log.debug("busctl does not start: %s", error)
            return None
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await child.ended()
        except TimeoutError:
            return None
        finally:
            await child.kill()
        found = _NUMBER.match(lines[0]) if lines and child.code == 0 else None
        return int(found[1]) if found else None
