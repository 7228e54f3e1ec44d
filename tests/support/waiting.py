"""Waiting on an event loop, in virtual time or real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def now() -> float:
    return asyncio.get_running_loop().time()


async def until(condition: Callable[[], object], seconds: float = 60.0) -> float:
    began = now()
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
    return now() - began
