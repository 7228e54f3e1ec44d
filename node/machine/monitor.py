"""Looks at the machine every few seconds, and tells what it wishes whenever that changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

from node.machine.desktop import Desktop
from node.machine.probes import MachineProbes
from node.machine.rules import WORK, MachinePolicy, MachineReadings, MachineRules, Wish
from protocols.base import Compute

READ_SECONDS = 5.0
METERED_SECONDS = 30.0


class TrafficQuota(Protocol):
    """A quota of bytes, such as `node.streams.byte_quota.ByteQuota`; `used_up` is set while it is exhausted."""

    used_up: asyncio.Event

    @property
    def exhausted(self) -> bool: ...


class MachineMonitor:
    """Applies the rules of this machine for as long as `run` runs, and calls `on_wish` when its wish changes."""

    def __init__(
        self, rules: MachineRules, compute: Compute, on_wish: Callable[[Wish], None], quota: TrafficQuota | None = None
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
        """Wait for the next look, which comes at once when the quota ends: fast rounds could take more than what is
        left.
        """
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
