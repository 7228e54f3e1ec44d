"""Lower the priority of this process, so that other programs come first."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_ATTEMPTS = 20
_PAUSE_SECONDS = 0.11
"""The kernel accepts ten requests a second for session groups, from all users together."""
_PROC = Path("/proc/self")


def stand_back(nice: int, sleep: Callable[[float], None]) -> None:
    """Raise the niceness of all threads, and of the session's scheduling group where the kernel makes such groups.

    With autogroups (`kernel.sched_autogroup_enabled`) each session is a group. The kernel divides the cores between
    the groups, and niceness has an effect only inside a group. A request that the kernel rejects has no effect: in a
    container the cgroup decides.

    Args:
        nice: added to the process's own niceness, up to 19. 0 changes nothing.
        sleep: called to wait between two attempts.
    """
    if nice == 0:
        return
    level = min(19, os.getpriority(os.PRIO_PROCESS, 0) + nice)
    for thread in _threads():  # each thread has its own niceness, and later threads inherit it
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, level)
    for _ in range(_ATTEMPTS):
        try:
            (_PROC / "autogroup").write_text(str(level))
            return
        except BlockingIOError:
            sleep(_PAUSE_SECONDS)
        except OSError:
            return


def _threads() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_PROC / "task")]
    except OSError:
        return [0]
