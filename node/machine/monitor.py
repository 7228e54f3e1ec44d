"""Looks at the machine every few seconds and tells what it wishes; and saves the work before the machine sleeps."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from node.machine.probes import Desktop, MachineProbes
from node.machine.rules import WORK, MachinePolicy, MachineReadings, MachineRules, Wish
from node.runtime.child_process import ChildProcess
from node.streams.byte_quota import ByteQuota
from protocols.base import Compute

READ_SECONDS = 5.0
METERED_SECONDS = 30.0


class MachineMonitor:
    """Applies the rules of this machine for as long as `run` runs, and calls `on_wish` when its wish changes."""

    def __init__(
        self, rules: MachineRules, compute: Compute, on_wish: Callable[[Wish], None], quota: ByteQuota | None = None
    ) -> None:
        self._rules, self._policy = rules, MachinePolicy(rules)
        self._compute, self._on_wish, self._quota = compute, on_wish, quota
        self._probes, self._desktop = MachineProbes(), Desktop()
        self._is_metered: bool | None = None
        self._metered_at = float("-inf")
        self.readings: MachineReadings | None = None
        self.wish: Wish = WORK

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self.look(loop.time())
            await self._pause()

    async def _pause(self) -> None:
        """Wait for the next look. It comes at once when the quota ends: fast rounds could take more than is left."""
        if self._quota is None or self._quota.used_up.is_set():
            await asyncio.sleep(READ_SECONDS)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(READ_SECONDS):
                await self._quota.used_up.wait()

    async def look(self, now: float) -> None:
        """Read once, and decide."""
        readings = await self._compute.run(partial(self._probes.read, load=self._rules.busy), 0)
        if self._rules.metered and now - self._metered_at >= METERED_SECONDS:
            self._metered_at, self._is_metered = now, await self._desktop.is_metered()
        if self._rules.in_use:
            readings = replace(readings, input_idle_seconds=await self._desktop.input_idle_seconds())
        is_spent = self._quota is not None and self._quota.exhausted
        self.readings = replace(readings, is_metered=self._is_metered, quota_is_spent=is_spent)
        wish = self._policy.decide(self.readings, now)
        if wish != self.wish:
            self.wish = wish
            self._on_wish(wish)


# -- sleep -------------------------------------------------------------------------------------------------------------


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
