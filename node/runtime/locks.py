"""File locks that the kernel releases when their process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EBADF, errno.EISDIR}
"""What flock says on file systems without locks: NFS without its lock daemon, some of FUSE, some shared folders.
EBADF: Linux's NFS locks only files that are open for writing, so no directories."""


class LocksUnsupported(OSError):
    """The file system has no locks."""


def hold(path: Path) -> int | None:
    """Lock a file or a directory; returns a descriptor that holds the lock, or None if it is locked already."""
    held = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(held)
        if isinstance(error, BlockingIOError):
            return None
        if error.errno in _UNSUPPORTED:
            raise LocksUnsupported(error.errno, "its file system has no locks", str(path)) from None
        raise OSError(error.errno, error.strerror, str(path)) from None
    return held
