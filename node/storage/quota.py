"""The limit on disk space for checkpoints, and how much they use."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from node.storage.checkpoint import places


class Quota:
    """The limit on the size of a directory of checkpoints, unfinished ones included."""

    def __init__(self, home: Path, limit_bytes: int) -> None:
        self._home, self.limit_bytes = home, limit_bytes

    def check(self, size: int, ours: Collection[Path] = ()) -> None:
        """Check whether `size` bytes more are within the limit.

        Args:
            ours: directories that do not count, because the bytes are for them, or they will be deleted.

        Raises:
            OSError: they would exceed the limit.
        """
        there = [*places(self._home), *places(self._home, drafts=True)]
        taken = sum(_bytes(path) for path in there if path not in ours)
        if taken + size > self.limit_bytes:
            limit = f"{self.limit_bytes / 1e9:g} GB"
            raise OSError(errno.EDQUOT, f"{(taken + size) / 1e9:.3g} GB would be over {limit}: raise --disk-limit")

    def would_do(self, size: int, gone: Collection[Path]) -> bool:
        """Whether there would be space for `size` bytes if these directories were deleted."""
        with suppress(OSError):
            self.check(size, gone)
            disk = os.statvfs(self._home)
            return disk.f_bavail * disk.f_frsize + sum(_bytes(path) for path in gone) >= size
        return False


def _bytes(path: Path) -> int:
    """Total size of the files in a directory. Files may appear and disappear meanwhile."""
    taken = 0
    with suppress(OSError):
        for each in os.scandir(path):
            with suppress(OSError):
                taken += each.stat().st_size
    return taken
