"""A lower share of busy cores, so that the programs of the machine's user come first; and what that costs a process."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_ATTEMPTS = 20
_PAUSE_SECONDS = 0.11
"""The kernel takes ten requests a second for groups of sessions, from all users together."""
_PROC = Path("/proc/self")


def stand_back(nice: int, sleep: Callable[[float], None]) -> None:
    """Raise the niceness of all threads, and of the session's scheduling group where the kernel makes such groups.

    With autogroups (`kernel.sched_autogroup_enabled`) each session is a group, cores are shared out between the groups,
    and niceness acts inside of one only. What cannot be had is left as it is: in a container the cgroup decides.

    Args:
        nice: is added to the process's own, up to 19. 0 leaves everything as it is.
        sleep: waits between two attempts.
    """
    if nice == 0:
        return
    level = min(19, os.getpriority(os.PRIO_PROCESS, 0) + nice)
    for thread in _threads():  # niceness is each thread's own; those to come inherit it
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


def ready_seconds(pid: int) -> float:
    """How long the threads of a process, together, were ready to run while no core was free for them.

    0 where the kernel does not tell. It grows while others take the cores, not while the process hangs or is stopped.
    """
    nanoseconds = 0
    with suppress(OSError):
        for thread in (Path("/proc") / str(pid) / "task").iterdir():
            with suppress(OSError, ValueError, IndexError):
                nanoseconds += int((thread / "schedstat").read_text().split()[1])
    return nanoseconds / 1e9


def _threads() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_PROC / "task")]
    except OSError:
        return [0]
