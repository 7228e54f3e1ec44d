"""Whether processes run. One may end between two questions about it."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from tests.support.waiting import until


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def gone(processes: Sequence[psutil.Process], seconds: float = 5.0) -> None:
    """Wait for the end of all."""
    await until(lambda: not any(map(runs, processes)), seconds)
