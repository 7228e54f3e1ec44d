"""Run work that would block the event loop, on one thread. The other cores are for training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import torch

T = TypeVar("T")


class ThreadCompute:
    """`protocols.base.Compute`. Use as an async context manager."""

    async def __aenter__(self) -> ThreadCompute:
        self._pool = ThreadPoolExecutor(1, "compute", initializer=_set_up_thread)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def run(self, work: Callable[[], T], cost_bytes: int) -> T:
        """Run `work` outside the event loop. A cancelled caller still waits for the work, which uses its buffers."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():  # it may be cancelled again: by a timeout, then by its group
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            raise


def _set_up_thread() -> None:
    # Both settings are per thread. Subnormal numbers are kept, because all members must compute the same bits.
    torch.set_flush_denormal(False)
    torch.set_num_threads(1)
