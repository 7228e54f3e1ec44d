"""Saves the work before the machine sleeps, by logind's delay inhibitor (5 seconds by default)."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable

from node.runtime.child_process import ChildProcess

log = logging.getLogger(__name__)

SAVE_SECONDS = 4.0
_SIGNAL = "type='signal',interface='org.freedesktop.login1.Manager',member='PrepareForSleep'"
_INHIBIT = ("--what=sleep", "--mode=delay", "--who=Starling", "--why=saves its work", "sleep", "infinity")


class SleepGuard:
    """Delays the machine's sleep until the work is saved. `run` does nothing on a machine without logind."""

    def __init__(self, save: Callable[[], Awaitable[None]]) -> None:
        """
        Args:
            save: writes what a power cut in the sleep would cost. It is cancelled after 4 seconds.
        """
        self._save = save
        self._inhibit, self._monitor = shutil.which("systemd-inhibit"), shutil.which("dbus-monitor")
        self._signals: asyncio.Queue[bool] = asyncio.Queue(16)
        self._is_signal = False

    async def run(self) -> None:
        """Hold the inhibitor, save and let go when the machine is about to sleep, and take it again afterwards."""
        if not self._inhibit or not self._monitor:
            return
        try:
            monitor = await ChildProcess.start("dbus-monitor", (self._monitor, "--system", _SIGNAL), self._take_line)
        except OSError as error:
            log.debug("sleep is not noticed beforehand: %s", error)
            return
        try:
            await self._follow(self._inhibit)
        finally:
            await monitor.kill()

    async def _follow(self, program: str) -> None:
        while True:
            holder = await ChildProcess.start("systemd-inhibit", (program, *_INHIBIT), lambda line: None)
            try:
                while not await self._signals.get():
                    pass
                async with asyncio.timeout(SAVE_SECONDS):
                    await self._save()
            except TimeoutError:
                log.warning("the work could not be saved within %g s before the machine slept", SAVE_SECONDS)
            finally:
                await holder.kill()
            while await self._signals.get():  # until the machine is awake
                pass

    def _take_line(self, line: str | None) -> None:
        """Take a line of dbus-monitor: a signal's header, then its argument."""
        text = (line or "").strip()
        if self._is_signal and text in ("boolean true", "boolean false") and not self._signals.full():
            self._signals.put_nowait(text == "boolean true")
        self._is_signal = "member=PrepareForSleep" in text
