"""Saves the work before the machine sleeps, by logind's delay inhibitor (5 seconds by default)."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Coroutine
from typing import Any

from node.runtime.child_process import ChildProcess

log = logging.getLogger(__name__)

SAVE_SECONDS = 4.0
_SIGNAL = "type='signal',interface='org.freedesktop.login1.Manager',member='PrepareForSleep'"
_INHIBIT = ("--what=sleep", "--mode=delay", "--who=Starling", "--why=saves its work", "sleep", "infinity")


class SleepGuard:
    """Delays the machine's sleep until the work is saved. `run` does nothing on a machine without logind.

    `save` writes what a power cut in the sleep would cost. The machine waits 4 seconds for it; the rest follows after
    the sleep.
    """

    def __init__(self, save: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._save = save
        self._saving: asyncio.Task[None] | None = None
        self._inhibit, self._monitor = shutil.which("systemd-inhibit"), shutil.which("dbus-monitor")
        self._signals: asyncio.Queue[bool | None] = asyncio.Queue(16)
        self._is_signal = False

    async def run(self) -> None:
        """Hold the inhibitor, save and let go when the machine is about to sleep, and take it again afterwards.

        Ends, without the inhibitor, when dbus-monitor does.
        """
        if not self._inhibit or not self._monitor:
            return
        try:
            monitor = await ChildProcess.start("dbus-monitor", (self._monitor, "--system", _SIGNAL), self._take_line)
            try:
                await self._follow(self._inhibit)
            finally:
                await monitor.kill()
                if self._saving:
                    self._saving.cancel()
                    await asyncio.gather(self._saving, return_exceptions=True)
        except OSError as error:
            log.debug("sleep is not noticed beforehand: %s", error)

    async def _follow(self, program: str) -> None:
        while True:
            holder = await ChildProcess.start("systemd-inhibit", (program, *_INHIBIT), lambda line: None)
            try:
                if not await self._next(True):
                    return
                await self._save_in_time()
            finally:
                await holder.kill()
            if not await self._next(False):  # until the machine is awake
                return

    async def _next(self, wanted: bool) -> bool:
        """Wait for a signal of this kind; False if there will be none."""
        while (signal := await self._signals.get()) is not wanted:
            if signal is None:
                log.debug("dbus-monitor has ended: sleep is not noticed beforehand any more")
                return False
        return True

    async def _save_in_time(self) -> None:
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save(), name="save before sleep")
        await asyncio.wait([self._saving], timeout=SAVE_SECONDS)
        if not self._saving.done():
            log.warning("the work could not be saved within %g s before the machine slept", SAVE_SECONDS)
        else:
            self._saving.result()

    def _take_line(self, line: str | None) -> None:
        """Take a line of dbus-monitor: a signal's header, then its argument; None at the end."""
        text = (line or "").strip()
        if line is None:
            if self._signals.full():
                self._signals.get_nowait()
            self._signals.put_nowait(None)
        elif self._is_signal and text in ("boolean true", "boolean false") and not self._signals.full():
            self._signals.put_nowait(text == "boolean true")
        self._is_signal = "member=PrepareForSleep" in text
