"""File locks that the kernel releases when their process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def hold(path: Path) -> int | None:
    """Lock a file or a directory. Return a descriptor that holds the lock until it is closed; None if it is locked.

    Raises:
        OSError: the file cannot be opened, or its file system has no locks.
    """
    held = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(held)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return held
