"""How much of the disk checkpoints may take, and what they do take."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from node.storage.checkpoint import places


class Quota:
    """The cap on a directory of checkpoints, whole ones and those in the making."""

    def __init__(self, home: Path, limit_bytes: int) -> None:
        self._home, self.limit_bytes = home, limit_bytes

    def check(self, size: int, ours: Collection[Path] = ()) -> None:
        """
        Args:
            ours: directories that are not counted: the bytes are for one of them, or it is to be given up.

        Raises:
            OSError: so much more would be too much.
        """
        there = [*places(self._home), *places(self._home, drafts=True)]
        taken = sum(_bytes(path) for path in there if path not in ours)
        if taken + size > self.limit_bytes:
            limit = f"{self.limit_bytes / 1e9:g} GB"
            raise OSError(errno.EDQUOT, f"{(taken + size) / 1e9:.3g} GB would be over {limit}: raise --disk-limit")

    def would_do(self, size: int, gone: Collection[Path]) -> bool:
        """Whether there would be so much room if these directories were given up."""
        with suppress(OSError):
            self.check(size, gone)
            disk = os.statvfs(self._home)
            return disk.f_bavail * disk.f_frsize + sum(_bytes(path) for path in gone) >= size
        return False


def _bytes(path: Path) -> int:
    """What the files in a directory take; files may come and go meanwhile."""
    taken = 0
    with suppress(OSError):
        for each in os.scandir(path):
            with suppress(OSError):
                taken += each.stat().st_size
    return taken
