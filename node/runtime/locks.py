"""Locks that the kernel ends with the process that holds them, however that ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def hold(path: Path) -> int | None:
    """A descriptor that locks a file or a directory until it is closed; None if somebody has one already.

    Raises:
        OSError: it cannot be opened, or not be locked there.
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
